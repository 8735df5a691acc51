"""Ids of the openings of texts, kept so that a grown conversation costs its new turns.

A text is divided at safe cuts (``prefix_tokens``) into *pieces* of some KiB. Where it is divided depends on
nothing behind the cut, so a grown text has the pieces of the shorter one and more. The ids of a text are
those of its pieces one after the other: that is what the cut proof lets us say, and why only tokenizers that
passed it come here.

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
from dataclasses import dataclass
from itertools import count
from typing import Final

from meshd.prepare.engine_proof import Encode
from meshd.prepare.prefix_tokens import last_safe_cut

CACHE_BYTES: Final = 16 << 20

_INT_BYTES: Final = 32
_OVERHEAD_BYTES: Final = 400  # key, number, piece, their places in the table


@dataclass(frozen=True, slots=True)
class Form:
    """How pieces are kept. ``piece``: characters between two places where one ends.

    ``is_packed``: in 4 bytes an id, which makes 25 ns of work for each at a hit; as a list it is 40 bytes and
    2 ns. ``share``: one text keeps no more than the ``share``-th part of all there is.
    """

    piece: int
    is_packed: bool
    share: int


FOR_SLOW: Final = Form(2048, True, 2)
"""For an engine that takes microseconds an id: whatever is kept pays."""

FOR_FAST: Final = Form(32768, False, 4)
"""For one that takes 25 ns an id, most of it the making of the list.

Measured on English with a vocabulary of 129,000, as parts of an encode without the cache: a text that is new
costs 1.05 to 1.3, one that has grown by 2 KiB 0.2 to 0.7, so one hit pays for two misses. In pieces of 8 KiB
a new one costs 1.3 to 1.6, and packed nothing is saved. Shorter texts are left alone. Of a mebibyte a hit
saves nothing, and with all of it kept its first encode takes three times as long: hence the share.
"""


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

    def encode(self, root: int, text: str, encode: Encode, form: Form) -> list[int]:
        """Return the ids of ``text``, using and keeping those of its pieces; ``root``: of this tokenizer."""
        pieces = self._pieces
        ids: list[int] = []
        used: list[tuple[int, str]] = []
        left = self._limit // form.share
        number = root
        start = 0
        for cut in cuts_of(text, form.piece):
            key = (number, text[start:cut])
            piece = pieces.get(key)
            if piece is None:
                piece = self._new_piece(key, encode(key[1]), form.is_packed)
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


def cuts_of(text: str, piece: int) -> list[int]:
    """Return where ``text`` is divided: the last safe cut in each full ``piece`` characters that has one."""
    cuts: list[int] = []
    for start in range(0, len(text) - piece + 1, piece):
        cut = last_safe_cut(text, start, start + piece)
        if cut >= 0:
            cuts.append(cut)
    return cuts
