from __future__ import annotations

import re
import tracemalloc
from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshd.prepare.conversation_cache import FOR_FAST, FOR_SLOW, ConversationCache, cuts_of

PIECE = FOR_SLOW.piece
LISTS = replace(FOR_FAST, piece=8192)  # smaller pieces, for smaller texts
FORMS = pytest.mark.parametrize("form", [FOR_SLOW, LISTS], ids=["packed", "lists"])
SAFE_CUT = re.compile(r"(?<=[A-Za-z]) (?=[A-Za-z])")
WORDS = ("alpha", "beta", "gamma", "delta", "42", "naïve", "的", "x, y", "\n", "end.")


class Words:
    """A tokenizer that every safe cut is right for; counts what it was given."""

    def __init__(self, first: int = 0) -> None:
        self.first = first
        self.characters = 0

    def encode(self, text: str) -> list[int]:
        self.characters += len(text)
        return [self.first + sum(word.encode()) * 1000 + len(word) for word in re.findall(r" ?[^ ]+| ", text)]


def conversation(seed: int, size: int) -> str:
    rng = Random(seed)
    text = ""
    while len(text) < size:
        text += rng.choice(WORDS) + " "
    return text[:size]


@given(st.lists(st.sampled_from((*WORDS, "a b" * 400, "7" * 900)), max_size=60).map(" ".join))
def test_cuts_are_safe_and_do_not_depend_on_what_follows(text):
    cuts = cuts_of(text, PIECE)
    safe = {found.start() for found in SAFE_CUT.finditer(text)}
    assert set(cuts) <= safe
    assert all(low < high for low, high in pairwise(cuts))
    for end in (len(text) // 2, len(text) * 2 // 3):
        shorter = cuts_of(text[:end], PIECE)
        assert cuts[: len(shorter)] == shorter


def test_ids_are_those_of_the_whole_text_at_first_and_again():
    for form in (FOR_SLOW, LISTS):
        cache = ConversationCache()
        root = cache.new_root()
        for seed in range(20):
            text = conversation(seed % 7, 1000 * seed)
            for _ in range(2):
                assert cache.encode(root, text, Words().encode, form) == Words().encode(text)


@FORMS
def test_a_grown_conversation_costs_its_new_turns(form):
    cache, words = ConversationCache(), Words()
    root = cache.new_root()
    turns = [conversation(seed, 1500) for seed in range(60)]
    text = ""
    for turn in turns:
        text += turn
        before = words.characters
        ids = cache.encode(root, text, words.encode, form)
        assert words.characters - before <= len(turn) + 2 * form.piece
        assert ids == Words().encode(text)
    assert words.characters < (1 + form.piece / 1000) * len(text), (
        "without a cache it were 30 times its length"
    )


def test_the_ids_of_a_fast_engine_are_kept_for_the_opening_of_a_long_text():
    """All of them would take 13 of 16 MiB, and be no quicker to put together than to encode."""
    cache, words = ConversationCache(), Words()
    root = cache.new_root()
    text = conversation(1, 1 << 20)
    for again in (False, True):
        before = words.characters
        assert cache.encode(root, text, words.encode, FOR_FAST) == Words().encode(text)
        assert (words.characters - before < len(text)) == again
    assert 0 < cache.size <= (4 << 20)


def test_a_grown_mebibyte_costs_its_new_turn_too():
    cache, words = ConversationCache(), Words()
    root = cache.new_root()
    text = conversation(1, 1 << 20)
    cache.encode(root, text, words.encode, FOR_SLOW)
    before = words.characters
    grown = text + conversation(2, 1000)
    assert cache.encode(root, grown, words.encode, FOR_SLOW) == Words().encode(grown)
    assert words.characters - before <= 1000 + 2 * PIECE


def test_conversations_with_the_same_opening_share_it():
    cache, words = ConversationCache(), Words()
    root = cache.new_root()
    system = conversation(1, 40_000)
    cache.encode(root, system + conversation(2, 3000), words.encode, FOR_SLOW)
    before = words.characters
    cache.encode(root, system + conversation(3, 3000), words.encode, FOR_SLOW)
    assert words.characters - before <= 3000 + 2 * PIECE


def test_a_change_in_the_middle_leaves_nothing_of_what_follows():
    cache = ConversationCache()
    root = cache.new_root()
    text = conversation(1, 40_000)
    changed = text[:20_000] + "!" + text[20_000:]
    for given_text in (text, changed, text):
        assert cache.encode(root, given_text, Words().encode, FOR_SLOW) == Words().encode(given_text)


def test_roots_share_nothing():
    cache = ConversationCache()
    text = conversation(1, 20_000)
    for first in (0, 10**6):
        words = Words(first)
        root = cache.new_root()
        assert cache.encode(root, text, words.encode, LISTS) == Words(first).encode(text)


def test_ids_that_are_returned_are_the_callers_own():
    cache = ConversationCache()
    root = cache.new_root()
    text = conversation(1, 20_000)
    cache.encode(root, text, Words().encode, LISTS).clear()
    assert cache.encode(root, text, Words().encode, LISTS) == Words().encode(text)


@FORMS
def test_memory_stays_in_bounds_and_is_counted_honestly(form):
    limit = 1 << 20
    cache = ConversationCache(limit)
    root = cache.new_root()
    tracemalloc.start()
    try:
        for seed in range(60):
            cache.encode(root, conversation(seed, 30_000), Words().encode, form)
            assert cache.size <= limit
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert cache.size > limit // 2, "it was full"
    assert held < 1.15 * limit


def test_the_least_recently_used_goes_first():
    cache, words = ConversationCache(300_000), Words()
    root = cache.new_root()
    kept = conversation(1, 40_000)
    cache.encode(root, kept, words.encode, FOR_SLOW)
    for seed in range(2, 40):
        cache.encode(root, conversation(seed, 20_000), words.encode, FOR_SLOW)
        before = words.characters
        cache.encode(root, kept, words.encode, FOR_SLOW)
        assert words.characters - before <= 2 * PIECE


def test_the_end_of_a_conversation_goes_before_its_beginning():
    kept = conversation(1, 40_000)
    half_gone = 0
    for others in range(40):
        cache, words = ConversationCache(300_000), Words()
        root = cache.new_root()
        for text in (kept, *(conversation(2 + seed, 10_000) for seed in range(others))):
            cache.encode(root, text, words.encode, FOR_SLOW)
        before = words.characters
        cache.encode(root, kept[:10_000], words.encode, FOR_SLOW)
        has_beginning = words.characters - before <= 2 * PIECE
        before = words.characters
        cache.encode(root, kept, words.encode, FOR_SLOW)
        has_end = words.characters - before <= 2 * PIECE
        half_gone += has_beginning and not has_end
        assert has_beginning or not has_end
    assert half_gone


def test_no_text_drives_out_all_others():
    cache, words = ConversationCache(200_000), Words()
    root = cache.new_root()
    kept = conversation(1, 20_000)
    cache.encode(root, kept, words.encode, FOR_SLOW)
    huge = conversation(2, 400_000)
    assert cache.encode(root, huge, words.encode, FOR_SLOW) == Words().encode(huge)
    assert cache.size <= 200_000
    before = words.characters
    cache.encode(root, kept, words.encode, FOR_SLOW)
    assert words.characters - before <= 2 * PIECE


def test_a_failing_engine_leaves_the_cache_usable():
    cache = ConversationCache()
    root = cache.new_root()
    text = conversation(1, 20_000)
    calls = 0

    def fails_late(piece: str) -> list[int]:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise ValueError
        return Words().encode(piece)

    with pytest.raises(ValueError):
        cache.encode(root, text, fails_late, FOR_SLOW)
    assert cache.encode(root, text, Words().encode, FOR_SLOW) == Words().encode(text)
