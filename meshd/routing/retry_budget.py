"""The retry budget of the node: over the last ten seconds, retries stay a share of first attempts.

Each I/O process counts first attempts and retries in cells of its own, by the second; the sums over all
processes decide. The cells of one row::

    slot (second mod 16): second + 1 | first attempts | retries | –        32 bytes, 16 slots

A retry is announced before it is judged: it is counted, a fence is passed, and then the sums are taken; one
that does not fit is taken back. So two processes never both take the last retry (the argument is that of
admission/limits.py), at the price that both may be refused.

Seconds are whole, the window is not: retries are summed over the present second and the ten before it, first
attempts over the present one and the nine before it. So the bound holds for every window of ten seconds, and
up to a second's worth of the allowance is not used. What a dead process counted goes on counting: it was
sent.
"""

from __future__ import annotations

from typing import Final

from meshd.memory import HEADER_BYTES, Fence, Segment

SEGMENT_KIND: Final = "retries"
WINDOW_S: Final = 10

_SLOTS: Final = 16
_SLOT_WORDS: Final = 4
_ROW_WORDS: Final = _SLOTS * _SLOT_WORDS
_SECOND: Final = 0
_FIRST: Final = 1
_RETRIES: Final = 2


def segment_bytes(rows: int) -> int:
    """Return the size of a segment for ``rows`` I/O seats."""
    return HEADER_BYTES + rows * _ROW_WORDS * 8


class RetryBudget:
    """The budget as one I/O process uses it. Times are seconds of CLOCK_MONOTONIC, one for all processes.

    ``ratio``: retries for each first attempt; ``least``: retries that are always allowed.
    """

    def __init__(self, segment: Segment, row: int, rows: int, ratio: float, least: int) -> None:
        if segment.size < segment_bytes(rows):
            raise ValueError(f"the retry segment has {segment.size} bytes, too few for {rows} rows")
        first = HEADER_BYTES // 8
        self._all = segment.words[first : first + rows * _ROW_WORDS]
        self._own = segment.words[first + row * _ROW_WORDS : first + (row + 1) * _ROW_WORDS]
        self._rows = rows
        self._ratio = ratio
        self._least = least
        self._fence = Fence()
        self._second = -1
        self._second_ends_s = 0.0
        self._firsts = 0  # in that second, as the cell has it
        self._at = 0

    def note_first(self, now_s: float) -> None:
        """Count a first attempt."""
        if now_s >= self._second_ends_s:
            self._enter(int(now_s))
        self._firsts += 1
        self._own[self._at + _FIRST] = self._firsts

    def try_retry(self, now_s: float) -> bool:
        """Count a retry if the budget has room for it. O(I/O seats)."""
        second = int(now_s)
        if second != self._second:
            self._enter(second)
        place = self._at + _RETRIES
        self._own[place] += 1
        self._fence()
        firsts = self._sum(_FIRST, second - WINDOW_S + 1, second)
        if self._sum(_RETRIES, second - WINDOW_S, second) <= max(self._least, self._ratio * firsts):
            return True
        self._own[place] -= 1
        return False

    def _enter(self, second: int) -> None:
        """Begin to count in the slot of ``second``, which may be a predecessor's in this row."""
        self._second = second
        self._second_ends_s = second + 1.0
        self._at = second % _SLOTS * _SLOT_WORDS
        own, at = self._own, self._at
        if own[at + _SECOND] != second + 1:
            own[at + _SECOND] = 0  # counts nowhere until it is empty
            own[at + _FIRST] = 0
            own[at + _RETRIES] = 0
            own[at + _SECOND] = second + 1
        self._firsts = own[at + _FIRST]

    def _sum(self, cell: int, first: int, last: int) -> int:
        words, total = self._all, 0
        for row in range(0, self._rows * _ROW_WORDS, _ROW_WORDS):
            for at in range(row, row + _ROW_WORDS, _SLOT_WORDS):
                if first <= words[at + _SECOND] - 1 <= last:
                    total += words[at + cell]
        return total

    def __repr__(self) -> str:
        second = self._second
        firsts = self._sum(_FIRST, second - WINDOW_S + 1, second)
        retries = self._sum(_RETRIES, second - WINDOW_S, second)
        return f"RetryBudget(retries={retries}, first={firsts})"
