"""A fast engine that starts to differ after its proof: caught, switched off for the whole node, told once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import tokenizers

import meshd
from tests.fakes.node import Node, running, wait_until

TOKENIZER = Path(meshd.__file__).parent / "backend" / "tokenizer"
CROSSCHECKS = "mesh_tokenizer_crosscheck_total"
DRIFT = "a text that is none of the proof: "

# Stands in for the package in every process of the node: the reference, but for texts with those words.
ENGINE = f"""
import tokenizers

class Encoding:
    def __init__(self, ids):
        self.ids = ids

class Tokenizer:
    def __init__(self, reference):
        self.reference = reference

    @classmethod
    def from_file(cls, path):
        return cls(tokenizers.Tokenizer.from_file(path))

    def no_truncation(self):
        pass

    def no_padding(self):
        pass

    def encode(self, text, add_special_tokens=True):
        ids = self.reference.encode(text, add_special_tokens=add_special_tokens).ids
        return Encoding([0, *ids[1:]] if {DRIFT!r} in text else ids)
"""


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    packages = tmp_path_factory.mktemp("packages")
    (packages / "fastokens.py").write_text(ENGINE)
    flags = (
        "--io-processes", "1", "--prepare-workers", "2", "--tokenizer-path", str(TOKENIZER),
        "--tokenizer-engine", "fastokens", "--tokenizer-crosscheck-ratio", "1",
    )  # fmt: skip
    with running(*flags, env={"PYTHONPATH": str(packages)}) as running_node:
        yield running_node


def test_a_difference_is_answered_by_the_reference_and_ends_the_fast_engine_on_all_workers(node):
    reference = tokenizers.Tokenizer.from_file(str(TOKENIZER / "tokenizer.json"))

    def tokens_are_right(text: str) -> None:
        status, _, body = node.request("POST", "/v1/tokenize", {"prompt": text})
        assert status == 200, body
        assert json.loads(body)["tokens"] == reference.encode(text, add_special_tokens=False).ids

    for number in range(8):
        tokens_are_right(f"text {number}")
    wait_until(lambda: node.metric(CROSSCHECKS, result="match") == 8, "not every encode is repeated")
    for number in range(8):
        tokens_are_right(f"{DRIFT}{number}")
        tokens_are_right(f"text {number}")
    assert node.metric(CROSSCHECKS, result="mismatch") == 1
    assert node.metric(CROSSCHECKS, result="match") == 8, "nothing is repeated where nothing fast is used"

    def told() -> list[str]:
        return [line["level"] for line in node.lines if line.get("event") == "tokenizer_engine_off"]

    wait_until(lambda: bool(told()), "nobody is told")
    assert told() == ["error"]
