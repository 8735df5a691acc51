"""The shared words of admission: one row for each I/O process, written by that process alone.

::

    64-byte segment header
    row 0   held | waiting | body bytes | body waiting | granted | owner | – | –     64 bytes
    row 1   …
    end     retired owner of row 0, of row 1, …                     written by the controller alone

``owner`` is the process id that the row's counts belong to. When that process is dead the controller
names it in the row's retired word, and from then on the row counts as zero. The controller never writes a
count: a successor that starts in the row while the controller is still slow to retire its predecessor
would lose counts it really holds, and the bound would be exceeded. ``granted`` only grows and is kept from
owner to owner.
"""

from __future__ import annotations

from typing import Final

from meshd.memory import HEADER_BYTES, Segment

SEGMENT_KIND: Final = "gate"

HELD: Final = 0
WAITING: Final = 1
BODY_BYTES: Final = 2
BODY_WAITING: Final = 3
GRANTED: Final = 4
_OWNER: Final = 5

_ROW_WORDS: Final = 8  # a cache line: no two processes write one
_FIRST: Final = HEADER_BYTES // 8


def segment_size(rows: int) -> int:
    """Return the size of a segment for ``rows`` I/O processes."""
    return HEADER_BYTES + rows * (_ROW_WORDS + 1) * 8


class Cells:
    """The words as one process sees them; ``row``: its own, ``None`` for the controller."""

    def __init__(self, segment: Segment, row: int | None, rows: int, owner: int = 0) -> None:
        if segment.size < segment_size(rows):
            raise ValueError(f"the admission segment has {segment.size} bytes, too few for {rows} rows")
        if row is not None and not (0 <= row < rows and owner > 0):
            raise ValueError(f"there is no admission row {row} among {rows}, or it has no owner")
        self.row = row
        self.rows = rows
        self._words = segment.words
        end = _FIRST + rows * _ROW_WORDS
        self._owners = self._words[_FIRST + _OWNER : end : _ROW_WORDS]
        self._retired = self._words[end : end + rows]
        if row is not None:
            self._take_row(row, owner)

    def column(self, cell: int) -> memoryview:
        """Return the words of ``cell`` over all rows, rows of dead processes included."""
        return self._words[_FIRST + cell : _FIRST + self.rows * _ROW_WORDS : _ROW_WORDS]

    def counts(self, row: int) -> bool:
        """Say whether the row belongs to a process that is not known to be dead."""
        return self._owners[row] != self._retired[row]

    def owner(self, row: int) -> int:
        """Return the process id whose counts the row holds; 0 if it was never used."""
        return int(self._owners[row])

    def retire(self, row: int, owner: int) -> None:
        """Stop counting what the dead process ``owner`` left in ``row``; for the controller alone.

        Harmless if a successor has the row already.
        """
        self._retired[row] = owner

    def _take_row(self, row: int, owner: int) -> None:
        if self._retired[row] == owner:
            raise ValueError("a process cannot take the row of its own dead self")
        for cell in (HELD, WAITING, BODY_BYTES, BODY_WAITING):
            self.column(cell)[row] = 0
        self._owners[row] = owner  # last: zeros first, or the predecessor's counts would be the new owner's
