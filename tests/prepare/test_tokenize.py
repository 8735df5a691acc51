"""Tokenize and detokenize in one prepare worker, with a tokenizer whose ids are the bytes of the text."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from meshd.api.endpoints import ENDPOINTS
from meshd.errors import MeshError
from meshd.prepare.stopwatch import StageTimes, Stopped, Stopwatch
from meshd.prepare.tokenize import TokenizerAnswers
from meshd.prepare.tokenizer import DecodeFailed, EncodeFailed

BY_NAME = {endpoint.name: endpoint for endpoint in ENDPOINTS}
SPECIAL = 256


class ByBytes:
    """Its ids are bytes; 256 is a special token, and 999 breaks the engine."""

    def __init__(self, mark: str = "") -> None:
        self.mark = mark

    def encode(self, text: str) -> list[int]:
        if text == "break":
            raise EncodeFailed("a panic")
        return list((self.mark + text).encode())

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        if 999 in ids:
            raise DecodeFailed("a panic")
        special = "" if skip_special_tokens else "<s>"
        return "".join(special if each == SPECIAL else chr(each) for each in ids)


class Set:
    def __init__(self, **entries: ByBytes) -> None:
        self.entries = entries

    def find(self, model: str) -> ByBytes | None:
        return self.entries.get(model, self.entries.get("default"))

    def first(self) -> ByBytes | None:
        return next(iter(self.entries.values()), None)


class Harness:
    def __init__(self, tokenizers: Set | None, limit: int = 1000) -> None:
        ticks = itertools.count(0, 10)
        self.watch = Stopwatch(lambda: next(ticks))
        self.answers = TokenizerAnswers(tokenizers, limit, self.watch)

    def raw(self, name: str, should_stop=lambda: False, **members: Any) -> tuple[str, bytes]:
        body = memoryview(bytearray(json.dumps(members).encode()))
        return self.answers.answer(BY_NAME[name], body, should_stop)

    def __call__(self, name: str, **members: Any) -> Any:
        return json.loads(self.raw(name, **members)[1])

    def refusal(self, name: str, **members: Any) -> tuple[str, str]:
        with pytest.raises(MeshError) as caught:
            self(name, **members)
        return caught.value.code, caught.value.message


def ask(limit: int = 1000) -> Harness:
    return Harness(Set(default=ByBytes()), limit)


def test_one_prompt_gives_one_list_and_a_list_gives_lists():
    assert ask().raw("tokenize", model="m1", prompt="Hi") == (
        "m1",
        b'{"tokens":[72,105],"count":2,"char_count":2}',
    )
    assert ask().raw("tokenize", prompt=["Hi", "", "yo"]) == (
        "",
        b'{"tokens":[[72,105],[],[121,111]],"count":[2,0,2],"char_count":[2,0,2]}',
    )
    assert ask()("tokenize", prompt=[]) == {"tokens": [], "count": [], "char_count": []}


def test_char_count_counts_scalar_values():
    family = "👩‍👩‍👧‍👦"
    assert ask()("tokenize", prompt=family)["char_count"] == 7
    assert ask()("tokenize", prompt=["é", "e\u0301"])["char_count"] == [1, 2]


def test_ids_give_a_text_and_lists_give_texts():
    assert ask().raw("detokenize", tokens=[72, 105]) == ("", b'{"text":"Hi"}')
    assert ask()("detokenize", tokens=[[72], [], [105]]) == {"text": ["H", "", "i"]}
    assert ask()("detokenize", tokens=[]) == {"text": ""}


def test_special_tokens_are_skipped_unless_the_request_says_otherwise():
    assert ask()("detokenize", tokens=[SPECIAL, 72]) == {"text": "H"}
    for value, text in ((True, "H"), (None, "H"), (False, "<s>H")):
        assert ask()("detokenize", tokens=[SPECIAL, 72], skip_special_tokens=value) == {"text": text}


@pytest.mark.parametrize("model", [None, "", "unknown"])
def test_no_model_is_the_default_else_the_one_registered_first(model):
    several = Harness(Set(b=ByBytes("b"), a=ByBytes("a")))
    assert several("tokenize", model=model, prompt="x")["tokens"] == [98, 120]
    default = Harness(Set(b=ByBytes("b"), default=ByBytes("d")))
    assert default("tokenize", model=model, prompt="x")["tokens"] == [100, 120]


def test_a_model_without_a_tokenizer_is_told_so_before_its_text_is_measured():
    for harness in (Harness(Set(a=ByBytes()), limit=1), Harness(None, limit=1)):
        assert harness.refusal("tokenize", model="m2", prompt="too long")[0] == "tokenizer_not_found"
        assert harness.refusal("detokenize", model="m2", tokens=[1])[0] == "tokenizer_not_found"
    assert Harness(None).refusal("tokenize", prompt="x")[0] == "tokenizer_not_found"


@pytest.mark.parametrize("text", ["x" * 100, "é" * 50, "世" * 33 + "x", "😀" * 25])
def test_a_prompt_of_exactly_the_byte_limit_passes_and_one_byte_more_does_not(text):
    assert len(text.encode()) == 100
    assert ask(100)("tokenize", prompt=text)["count"] == 100
    assert ask(100)("tokenize", prompt=[text[:20], text[20:]])["char_count"] == [20, len(text) - 20]
    for more in (text + "y", [text, "y"], ["y", text]):
        assert ask(100).refusal("tokenize", prompt=more)[0] == "tokenizer_input_too_large"


def test_as_many_ids_as_a_quarter_of_the_limit_pass_and_one_more_does_not():
    assert ask(103)("detokenize", tokens=[72] * 25) == {"text": "H" * 25}
    assert ask(103)("detokenize", tokens=[[72] * 20, [72] * 5]) == {"text": ["H" * 20, "H" * 5]}
    for more in ([72] * 26, [[72] * 20, [72] * 6]):
        assert ask(103).refusal("detokenize", tokens=more)[0] == "tokenizer_input_too_large"


@pytest.mark.parametrize("wrong", [-1, 2**32, 10**20, -(10**20), 10**300])
def test_an_id_outside_32_bits_is_invalid(wrong):
    for tokens in ([1, wrong], [[1], [wrong]]):
        code, message = ask().refusal("detokenize", tokens=tokens)
        assert code == "invalid_request" and '"tokens"' in message


def test_a_failure_of_the_engine_has_the_code_of_its_endpoint():
    assert ask().refusal("tokenize", prompt=["a", "break"])[0] == "tokenization_error"
    assert ask().refusal("detokenize", tokens=[999])[0] == "detokenization_error"


def test_each_stage_is_timed_under_its_name():
    tokenize, detokenize = ask(), ask()
    tokenize("tokenize", prompt="x")
    detokenize("detokenize", tokens=[72])
    assert tokenize.watch.stop() == StageTimes(json_parse=10, encode=10, view=10)
    assert detokenize.watch.stop() == StageTimes(json_parse=10, decode=10, view=10)
    detokenize.refusal("detokenize", tokens=[999])
    assert detokenize.watch.stop() == StageTimes(json_parse=10, decode=10)


def test_a_batch_looks_between_its_texts_whether_it_shall_stop():
    for name, members in (("tokenize", {"prompt": ["a"] * 5}), ("detokenize", {"tokens": [[72]] * 5})):
        looks = itertools.count()
        with pytest.raises(Stopped):
            ask().raw(name, should_stop=lambda looks=looks: next(looks) == 3, **members)
        assert next(looks) == 4
