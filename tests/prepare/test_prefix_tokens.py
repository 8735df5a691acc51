from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshd.api.prefix_key import unpack_token_ids
from meshd.prepare.packed_engine import packing
from meshd.prepare.prefix_tokens import last_safe_cut, packed_head, utf8_length, window_end
from tests.fakes.tokenizer_events import RecordedEvents

SAFE_CUT = re.compile(r"(?<=[A-Za-z]) (?=[A-Za-z])")
ENGLISH = "the quick brown fox jumps over the lazy dog, "


class Words:
    """A tokenizer whose ids are the lengths of words; remembers what it was given."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def encode(self, text: str) -> list[int]:
        self.texts.append(text)
        return [len(word) for word in re.findall(r" ?[^ ]+| +", text)]


def head(text: str, count: int, may_cut: bool = True) -> tuple[list[int], Words, RecordedEvents]:
    words, events = Words(), RecordedEvents()
    packed = packed_head(text, count, packing(words.encode), may_cut, events)
    return unpack_token_ids(packed), words, events


@given(st.text("ab  é\n."), st.integers(0, 12), st.integers(0, 12))
def test_the_last_safe_cut_is_what_a_search_of_all_cuts_finds(text, start, end):
    cuts = [
        found.start()
        for found in SAFE_CUT.finditer(text)
        if found.start() - 1 >= start and found.start() + 1 < end
    ]
    assert last_safe_cut(text, start, end) == (cuts[-1] if cuts else -1)


@given(st.text(), st.integers(0, 40))
def test_a_window_holds_all_characters_that_fit(text, size):
    end = window_end(text, size)
    assert len(text[:end].encode()) <= size
    assert end == len(text) or len(text[: end + 1].encode()) > size


def test_a_text_within_the_window_is_tokenized_whole():
    text = ENGLISH * 5
    ids, words, events = head(text, 16)
    assert words.texts == [text]
    assert ids == Words().encode(text)[:16]
    assert (events.offered, events.tokenized, events.fallbacks) == (len(text), len(text), [])


@pytest.mark.parametrize("may_cut", [True, False])
def test_a_window_is_counted_in_bytes_and_includes_its_last(may_cut):
    for text in ("a " * 8, "é" * 7 + " a", "的" * 5 + "a"):
        assert utf8_length(text) == 16
        assert head(text, 1, may_cut)[2].fallbacks == []
    assert head("é" * 7 + " a.", 1, may_cut)[2].fallbacks == ["no_safe_cut"]


@pytest.mark.parametrize("count", [1, 16, 256])
def test_a_mebibyte_costs_what_16_kib_cost(count):
    """Counted in bytes that are tokenized: no more than the window."""
    tokenized = []
    for size in (16 << 10, 1 << 20):
        text = (ENGLISH * (size // len(ENGLISH) + 1))[:size]
        ids, words, events = head(text, count)
        assert ids == Words().encode(text)[:count]
        assert events.offered == size
        assert events.tokenized == sum(map(len, words.texts)) <= 16 * count
        tokenized.append(events.tokenized)
    assert tokenized[0] == tokenized[1]


def test_the_prefix_ends_with_the_letter_before_the_space():
    _, words, _ = head("one two three four five six seven", 1)
    assert words.texts == ["one"]  # 6 bytes: "one tw"


def test_a_text_of_long_words_is_tried_in_a_longer_window_next():
    _, words, events = head("one incomprehensibilities two three four five", 2)
    assert words.texts == ["one", "one incomprehensibilities two"]  # 12 and 32 bytes
    assert (events.tokenized, events.fallbacks) == (3 + 29, [])


def test_the_window_doubles_until_it_has_a_cut():
    text = "1234567 " * 20 + "ab cd " + "1234567 " * 200
    ids, words, events = head(text, 2)
    assert len(words.texts) == 1
    assert words.texts[0] == "1234567 " * 20 + "ab"
    assert ids == [7, 8]
    assert events.fallbacks == []


def test_a_cut_on_the_edge_of_a_window_is_found():
    for before in range(10, 24):
        _, words, _ = head("1" * before + "b c" + "." * 200, 1)
        assert words.texts == ["1" * before + "b"]


def test_the_window_doubles_until_there_are_enough_ids():
    text = "abcdefghijklmnopqrstuvwxyz" * 3 + " a" * 1000
    ids, words, events = head(text, 4)
    assert ids == [78, 2, 2, 2]
    assert [len(prefix) for prefix in words.texts] == [126]
    text = "a b" + "c" * 200 + " a" * 1000
    ids, words, events = head(text, 4)
    assert ids == [1, 202, 2, 2]
    assert [len(prefix) for prefix in words.texts] == [1, 253]
    assert (events.offered, events.tokenized, events.fallbacks) == (len(text), 254, [])


def test_a_text_without_a_safe_cut_is_tokenized_whole_and_counted():
    text = "的" * 1000
    ids, words, events = head(text, 2)
    assert ids == [1000]
    assert words.texts == [text]
    assert (events.offered, events.tokenized, events.fallbacks) == (3000, 3000, ["no_safe_cut"])


def test_a_text_with_too_few_ids_before_its_cuts_is_tokenized_whole_and_not_counted():
    text = "a b" + "c" * 1000
    ids, words, events = head(text, 4)
    assert ids == [1, 1002]
    assert words.texts == ["a", text]
    assert events.fallbacks == []
    assert events.tokenized == 1 + len(text)


def test_without_the_cut_proof_a_long_text_is_tokenized_whole_and_counted():
    text = ENGLISH * 100
    ids, words, events = head(text, 1, may_cut=False)
    assert words.texts == [text]
    assert ids == [3]
    assert events.fallbacks == ["no_safe_cut"]


def test_bytes_offered_are_estimated_where_counting_would_cost_the_whole_text():
    text = "größer als es je war " * 10_000
    events = head(text, 16)[2]
    assert events.tokenized <= 96
    assert abs(events.offered - len(text.encode())) < 0.05 * len(text)


def test_a_lone_surrogate_behind_the_window_costs_nothing():
    assert head("the end of the day " * 9 + "\ud800", 1)[0] == [3]
