from __future__ import annotations

import pytest

from meshd.api.prefix_key import unpack_token_ids
from meshd.prepare.conversation_cache import FOR_FAST, ConversationCache
from meshd.prepare.crosscheck import CheckedEngine, CrossCheck, LocalSwitch
from meshd.prepare.cut_proof import Cuts
from meshd.prepare.tokenizer import LoadedTokenizer, WorkerTools
from tests.fakes.tokenizer_events import RecordedEvents


def by_bytes(text: str) -> list[int]:
    return list(text.encode())


class Drifting:
    """A fast engine that is right for its first encodes and then differs in one id."""

    def __init__(self, right: int = 0) -> None:
        self.right = right
        self.calls = 0

    def __call__(self, text: str) -> list[int]:
        self.calls += 1
        ids = by_bytes(text)
        return ids if self.calls <= self.right else [ids[0] + 1, *ids[1:]]


class Counting:
    def __init__(self) -> None:
        self.texts: list[str] = []

    def __call__(self, text: str) -> list[int]:
        self.texts.append(text)
        return by_bytes(text)


def always() -> CrossCheck:
    return CrossCheck(1.0, lambda: 0.999)


def at_work(fast, reference=by_bytes, crosscheck=None, switch=None, cache=None):
    events = RecordedEvents()
    loaded = LoadedTokenizer(reference, fast, cuts=Cuts("", ""), source="model.json")
    tools = WorkerTools(events, cache, crosscheck)
    return loaded.for_worker(tools, switch), events


def test_the_ratio_decides_which_encodes_are_repeated():
    draws = iter((0.0, 0.24, 0.25, 0.9))
    check = CrossCheck(0.25, lambda: next(draws))
    assert [check.is_due() for _ in range(4)] == [True, True, False, False]
    assert not CrossCheck(0.0, lambda: 0.0).is_due()
    assert CrossCheck(1.0, lambda: 0.9999999).is_due()


def test_equal_ids_are_counted_and_change_nothing():
    reference = Counting()
    tokenizer, events = at_work(by_bytes, reference, always())
    assert tokenizer.encode("abc") == [97, 98, 99]
    assert reference.texts == ["abc"]
    assert (events.crosschecks, events.engines_off) == (["match"], [])
    assert tokenizer.engine == "fastokens"


def test_an_engine_that_starts_to_differ_is_caught_switched_off_and_not_asked_again():
    fast = Drifting(right=3)
    tokenizer, events = at_work(fast, crosscheck=always())
    for _ in range(10):
        assert tokenizer.encode("abc") == [97, 98, 99]
        assert unpack_token_ids(tokenizer.packed_head("abc", 2)) == [97, 98]
    assert fast.calls == 4
    assert events.crosschecks == ["match"] * 3 + ["mismatch"]
    assert events.engines_off == ["model.json"]
    assert tokenizer.engine == "tokenizers"


@pytest.mark.parametrize("ask", ["encode", "packed_head"])
def test_the_sampled_request_uses_the_reference_ids(ask):
    tokenizer, events = at_work(Drifting(), crosscheck=always())
    ids = tokenizer.encode("abc") if ask == "encode" else unpack_token_ids(tokenizer.packed_head("abc", 2))
    assert ids == [97, 98, 99][: len(ids)]
    assert events.crosschecks == ["mismatch"]


def test_a_difference_that_was_not_sampled_goes_unseen():
    draws = iter((0.5, 0.5, 0.0))
    tokenizer, events = at_work(Drifting(), crosscheck=CrossCheck(0.1, lambda: next(draws)))
    assert [tokenizer.encode("abc")[0] for _ in range(3)] == [98, 98, 97]
    assert events.crosschecks == ["mismatch"]


def test_the_switch_is_of_one_tokenizer_on_all_workers():
    switch, other = LocalSwitch(), LocalSwitch()
    here, told = at_work(Drifting(), crosscheck=always(), switch=switch)
    there, told_there = at_work(Drifting(right=100), switch=switch)
    another, _ = at_work(Drifting(right=100), switch=other)
    here.encode("abc")
    assert (there.engine, another.engine) == ("tokenizers", "fastokens")
    assert there.encode("abc") == [97, 98, 99]
    assert (told.engines_off, told_there.engines_off) == (["model.json"], [])


def test_whoever_finds_it_off_already_tells_nobody():
    switch, events = LocalSwitch(), RecordedEvents()

    def turned_off_meanwhile(text: str) -> list[int]:
        switch.turn_off()
        return [0]

    engine = CheckedEngine(turned_off_meanwhile, by_bytes, switch, always(), events, "model.json")
    assert engine.encode("a") == [97]
    assert (events.crosschecks, events.engines_off) == (["mismatch"], [])


def test_what_the_fast_engine_left_in_the_cache_is_not_used_after_a_mismatch():
    text = "the end of the day " * (3 * FOR_FAST.piece // 19)
    draws = [0.9]
    cache = ConversationCache(64 << 20)
    tokenizer, events = at_work(Drifting(), crosscheck=CrossCheck(0.5, lambda: draws[0]), cache=cache)
    assert tokenizer.encode(text) != by_bytes(text)
    assert len(cache) > 0
    draws[0] = 0.0
    grown = text + "and so on"
    assert tokenizer.encode(grown) == by_bytes(grown)
    assert events.crosschecks == ["mismatch"]


def test_an_engine_that_raises_is_no_mismatch():
    def raises(text: str) -> list[int]:
        raise ValueError

    tokenizer, events = at_work(raises, crosscheck=always())
    assert tokenizer.encode("abc") == [97, 98, 99]
    assert (events.fallbacks, events.crosschecks) == (["engine_error"], [])
    assert tokenizer.engine == "fastokens"
