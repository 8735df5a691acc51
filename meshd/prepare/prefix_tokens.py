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
FIRST_BYTES_PER_ID: Final = 6
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
    if window_end(text, WINDOW_BYTES_PER_ID * count) < len(text):
        packed = packed_opening(text, count, pack, events) if may_cut else None
        if packed is not None:
            return packed
        if not may_cut or last_safe_cut(text, 0, len(text)) < 0:
            events.fallback(NO_SAFE_CUT)
    whole = utf8_length(text)
    events.bounded(whole, whole)
    return pack(text)[: _ID_BYTES * count]


def packed_opening(
    text: str, count: int, pack: Pack, events: TokenizerEvents, text_bytes: int = 0
) -> bytes | None:
    """Return the first ``count`` ids of a text, packed; ``None`` where no safe cut of ``text`` has so many.

    ``text``: all of it, or its beginning; then ``text_bytes`` is how long it is.
    """
    wanted = _ID_BYTES * count
    window = FIRST_BYTES_PER_ID * count
    end = window_end(text, window)
    searched = tokenized = 0
    while end < len(text):
        cut = last_safe_cut(text, searched, end)
        if cut >= 0:
            head = text[:cut]
            packed = pack(head)
            tokenized += utf8_length(head)
            if len(packed) >= wanted:
                events.bounded(text_bytes or _estimated_length(text, window, end), tokenized)
                return packed[:wanted]
        searched = end - 2  # the next one begins with a letter there, at the earliest
        window = max(2 * window, WINDOW_BYTES_PER_ID * count)
        end = window_end(text, window)
    events.bounded(0, tokenized)
    return None


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
