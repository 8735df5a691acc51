"""Ids of the openings of texts, kept so that a grown conversation costs its new turns.

A text is divided at safe cuts (``prefix_tokens``) into *pieces* of about ``PIECE`` characters. Where it is
divided depends on nothing behind the cut, so a grown text has the pieces of the shorter one and more. The ids
of a text are those of its pieces one after the other: that is what the cut proof lets us say, and why only
tokenizers that passed it come here.

The cache is a tree of pieces, held as one table: the key of a piece is the number of the piece before it and
its own characters. So equal openings share their pieces, and a hit is an equality of text, not of hashes.
A piece whose predecessor was dropped is not found again; it is dropped in its turn. Pieces of one text are
used last first, so that the end of a conversation goes before its beginning.

Sizes are counted as CPython lays them out, and hold for the 64-bit builds that meshd runs on.
"""

from __future__ import annotations

import sys
from array import array
from collections import OrderedDict
from itertools import count
from typing import Final

from meshd.prepare.engine_proof import Encode
from meshd.prepare.prefix_tokens import last_safe_cut

CACHE_BYTES: Final = 16 << 20
PIECE: Final = 2048
"""Characters between two places where a piece ends; what a grown text costs beyond its new turns."""

_LISTS_UP_TO: Final = 1 << 18  # characters of a text whose pieces are kept as lists

_INT_BYTES: Final = 32
_OVERHEAD_BYTES: Final = 400  # key, number, piece, their places in the table


class _Piece:
    __slots__ = ("ids", "number", "size")

    def __init__(self, number: int, ids: list[int] | array[int], size: int) -> None:
        self.number = number
        self.ids = ids
        self.size = size


class ConversationCache:
    """The pieces of one prepare worker, of all its tokenizers; least recently used first out.

    ``limit``: bytes of all that is kept.
    """

    def __init__(self, limit: int = CACHE_BYTES) -> None:
        self._limit = limit
        self._pieces: OrderedDict[tuple[int, str], _Piece] = OrderedDict()
        self._numbers = count()
        self.size = 0

    def __len__(self) -> int:
        return len(self._pieces)

    def new_root(self) -> int:
        """Return a number before the first piece of texts that share nothing with those of other roots."""
        return next(self._numbers)

    def encode(self, root: int, text: str, encode: Encode, is_slow: bool) -> list[int]:
        """Return the ids of ``text``, using and keeping those of its pieces.

        ``root``: of this tokenizer and engine. ``is_slow``: an id costs far more than 25 ns, the price of
        keeping it in 4 bytes and not, as a list does, in 40. A long text is kept in the small form anyway.
        """
        is_packed = is_slow or len(text) > _LISTS_UP_TO
        pieces = self._pieces
        ids: list[int] = []
        used: list[tuple[int, str]] = []
        left = self._limit // 2  # no text drives out all others
        number = root
        start = 0
        for cut in cuts_of(text):
            key = (number, text[start:cut])
            piece = pieces.get(key)
            if piece is None:
                piece = self._new_piece(key, encode(key[1]), is_packed)
            start = cut
            ids += piece.ids
            left -= piece.size
            if left < 0:
                break
            self._keep(key, piece)
            used.append(key)
            number = piece.number
        for key in reversed(used):
            pieces.move_to_end(key)
        ids += encode(text[start:])
        return ids

    def _new_piece(self, key: tuple[int, str], ids: list[int], is_packed: bool) -> _Piece:
        kept: list[int] | array[int] = array("I", ids) if is_packed else ids
        size = _OVERHEAD_BYTES + sys.getsizeof(key[1]) + sys.getsizeof(kept)
        if not is_packed:
            size += _INT_BYTES * len(ids)
        return _Piece(next(self._numbers), kept, size)

    def _keep(self, key: tuple[int, str], piece: _Piece) -> None:
        """Put the piece behind all others, and drop from the front until all is within the limit.

        What is dropped never belongs to the text at hand: its pieces fill half the table at most and were
        just put to the end.
        """
        pieces = self._pieces
        if key in pieces:
            pieces.move_to_end(key)
            return
        pieces[key] = piece
        self.size += piece.size
        while self.size > self._limit:
            _, dropped = pieces.popitem(last=False)
            self.size -= dropped.size


def cuts_of(text: str) -> list[int]:
    """Return where ``text`` is divided: the last safe cut in each full ``PIECE`` characters that has one."""
    cuts: list[int] = []
    for start in range(0, len(text) - PIECE + 1, PIECE):
        cut = last_safe_cut(text, start, start + PIECE)
        if cut >= 0:
            cuts.append(cut)
    return cuts
