"""Bounded prefix tokenization: the ids that open a text, at a cost that depends on their number alone.

A *safe cut* is a place between an ASCII letter and one space that is followed by an ASCII letter: the text
before it is tokenized as it would be within the whole. Why that is so, and for which tokenizers, is the
matter of ``cut_proof``. Line ends are no such place: ``\\n\\n`` before a word splits differently at the end
of a text.
"""

from __future__ import annotations

import re
from typing import Final

from meshd.prepare.engine_proof import Encode
from meshd.prepare.tokenizer_events import NO_SAFE_CUT, TokenizerEvents

WINDOW_BYTES_PER_ID: Final = 16

# Greedy, so the last one is found. The space is a literal of its own, which the matcher looks for going back
# without a step of its machine for each character: 0.3 ms for 1 MiB that has none.
_LAST_CUT: Final = re.compile(r"(?s:.*) (?<=[A-Za-z] )(?=[A-Za-z])")


def last_safe_cut(text: str, start: int, end: int) -> int:
    """Return the last safe cut whose letter before the space is at ``start`` or later, -1 if there is none.

    ``text[:cut]`` ends with that letter. The letter after the space is before ``end``: what stands from
    there on has no say.
    """
    found = _LAST_CUT.match(text, start + 1, end)
    return found.end() - 1 if found else -1


def head_ids(text: str, count: int, encode: Encode, may_cut: bool, events: TokenizerEvents) -> list[int]:
    """Return the first ``count`` ids of ``text``, at least 1, or all if there are fewer.

    ``encode``: a text to all its ids. ``may_cut``: the tokenizer has passed the cut proof. Without it, and
    where there is no safe cut, a text longer than the first window is tokenized whole, which is counted.
    """
    window = WINDOW_BYTES_PER_ID * count
    end = window_end(text, window)
    is_short = end == len(text)
    searched = tokenized = 0
    has_cut = False
    while may_cut and end < len(text):
        cut = last_safe_cut(text, searched, end)
        if cut >= 0:
            has_cut = True
            head = text[:cut]
            ids = encode(head)
            tokenized += utf8_length(head)
            if len(ids) >= count:
                events.bounded(_estimated_length(text, window, end), tokenized)
                return ids[:count]
        searched = end - 2  # the next one begins with a letter there, at the earliest
        window *= 2
        end = window_end(text, window)
    if not (is_short or has_cut):
        events.fallback(NO_SAFE_CUT)
    ids = encode(text)
    whole = utf8_length(text)
    events.bounded(whole, tokenized + whole)
    return ids[:count]


def window_end(text: str, size: int) -> int:
    """Return how many characters of ``text`` fit into ``size`` UTF-8 bytes; costs ``size``, not the text."""
    if text.isascii():
        return min(len(text), size)
    opening = text[:size].encode("utf-8", "surrogatepass")
    if len(opening) <= size:
        return min(len(text), size)
    return len(opening[:size].decode("utf-8", "ignore"))


def utf8_length(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def _estimated_length(text: str, window: int, end: int) -> int:
    """The bytes of ``text`` if all of it is like its opening, ``end`` characters in ``window`` bytes.

    Exact for ASCII. Counting the rest would cost more than tokenizing the opening does.
    """
    return len(text) * window // end
