"""Bounded prefix tokenization: the ids that open a text, at a cost that depends on their number alone.

A *safe cut* is a place between an ASCII letter and one space that is followed by an ASCII letter: the text
before it is tokenized as it would be within the whole. Why that is so, and for which tokenizers, is the
matter of ``cut_proof``. Line ends are no such place: ``\\n\\n`` before a word splits differently at the end
of a text.
"""

from __future__ import annotations

import re
from typing import Final

from meshd.prepare.packed_engine import Pack
from meshd.prepare.tokenizer_events import NO_SAFE_CUT, TokenizerEvents

WINDOW_BYTES_PER_ID: Final = 16
"""Of the window that nearly every text has enough ids in."""
_FIRST_BYTES_PER_ID: Final = 6
"""Of a smaller one that is tried before it: of English, which has 5 bytes an id, the other has three times
as many ids as are asked for, and each is a place or two in a large vocabulary, which is in no cache."""
_ID_BYTES: Final = 4

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


def packed_head(text: str, count: int, pack: Pack, may_cut: bool, events: TokenizerEvents) -> bytes:
    """Return the first ``count`` ids of ``text``, at least 1, or all if there are fewer; packed.

    ``may_cut``: the tokenizer has passed the cut proof. Without it, and where there is no safe cut, a text
    longer than the window is tokenized whole, which is counted.
    """
    wanted = _ID_BYTES * count
    window = WINDOW_BYTES_PER_ID * count
    end = window_end(text, window)
    is_short = end == len(text)
    if not is_short and may_cut:
        window = _FIRST_BYTES_PER_ID * count
        end = window_end(text, window)
    searched = tokenized = 0
    has_cut = False
    while may_cut and end < len(text):
        cut = last_safe_cut(text, searched, end)
        if cut >= 0:
            has_cut = True
            head = text[:cut]
            packed = pack(head)
            tokenized += utf8_length(head)
            if len(packed) >= wanted:
                events.bounded(_estimated_length(text, window, end), tokenized)
                return packed[:wanted]
        searched = end - 2  # the next one begins with a letter there, at the earliest
        window = max(2 * window, WINDOW_BYTES_PER_ID * count)
        end = window_end(text, window)
    if not (is_short or has_cut):
        events.fallback(NO_SAFE_CUT)
    packed = pack(text)
    whole = utf8_length(text)
    events.bounded(whole, tokenized + whole)
    return packed[:wanted]


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
