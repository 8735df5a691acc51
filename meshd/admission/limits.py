"""Bounds that hold over all processes without a lock: announce, then look.

To take an amount a process first stores its raised count, passes a fence, and only then sums the counts of
all rows. If the sum is within the bound it keeps what it announced, else it withdraws.

Why the bound is never exceeded. Suppose more than the bound were held at one moment. Take the holder that
announced last. When it summed, every other holder had announced, and none had released yet, since all of
them hold now. Its sum was at least everything held now, above the bound, so it withdrew: a contradiction.
The fence is what makes "had announced" mean "was seen"; each count has one writer; the death of a holder
only leaves a count too high until the controller retires the row.

The price: two processes that race for the last place may both withdraw. Each then looks again a few times;
if they still collide, both are told that it is full, and whoever waits asks again at the next poll. A
place may so stay free for one poll, 50 ms at most, and never the other way round.

Dropped: shares of the bound lent from process to process. They never overshoot either, and need no
fence, but a dead process takes its share with it, and taking it back safely is harder than all of this.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Final

from meshd.admission.cells import Cells

_ATTEMPTS: Final = 4  # a collision needs two processes inside the same microsecond, again and again

_WINDOW_NS: Final = 10_000_000_000
_STEP_NS: Final = 1_000_000_000
_MAX_ADVICE_S: Final = 60


class SharedBound:
    """An amount held over all processes, at most ``bound``; ``None``: counted, but without bound."""

    def __init__(self, cells: Cells, cell: int, bound: int | None, fence: Callable[[], None]) -> None:
        assert cells.row is not None, "only an I/O process takes and gives"
        self.bound = bound
        self.own = 0
        self._cells = cells
        self._row = cells.row
        self._column = cells.column(cell)
        self._fence = fence

    def try_take(self, amount: int = 1) -> bool:
        """Take ``amount`` if the bound allows it; O(rows) with a bound, one store without."""
        wanted = self.own + amount
        if self.bound is None:
            self.own = self._column[self._row] = wanted
            return True
        for _ in range(_ATTEMPTS):
            if self._exceeds(self.bound - amount):
                return False
            self._column[self._row] = wanted
            self._fence()
            if not self._exceeds(self.bound):
                self.own = wanted
                return True
            self._column[self._row] = self.own
        return False

    def give(self, amount: int = 1) -> None:
        """Give ``amount`` back; ``RuntimeError`` if this process does not hold as much."""
        if amount > self.own:
            raise RuntimeError(f"{amount} given back where {self.own} is held")
        self.own -= amount
        self._column[self._row] = self.own

    def total(self) -> int:
        """Return what living processes hold, announcements that may be withdrawn included."""
        return sum(count for row, count in enumerate(self._column) if count and self._cells.counts(row))

    def ever(self) -> int:
        """Return the sum over all rows, dead ones included: for a count that only grows."""
        return sum(self._column)

    def holders(self) -> list[int]:
        """Return the rows of living processes that hold something."""
        return [row for row, count in enumerate(self._column) if count and self._cells.counts(row)]

    def is_held_elsewhere(self) -> bool:
        """Say whether another process holds something; one that is dead counts until it is retired."""
        return sum(self._column) > self.own and self.total() > self.own

    def _exceeds(self, limit: int) -> bool:
        # The plain sum first: it is at least the total, and much cheaper.
        return sum(self._column) > limit and self.total() > limit

    def __repr__(self) -> str:
        return f"SharedBound(own={self.own}, total={self.total()}, bound={self.bound})"


class GrantRate:
    """Advice when to come again: what waits, divided by the grants of the last ten seconds."""

    def __init__(self) -> None:
        self._seen: deque[tuple[int, int]] = deque()

    def note(self, granted: int, now_ns: int) -> None:
        """Note the number of grants so far, over all processes; looked at once a second."""
        seen = self._seen
        if not seen or now_ns - seen[-1][0] >= _STEP_NS:
            seen.append((now_ns, granted))
        while now_ns - seen[0][0] > _WINDOW_NS:
            seen.popleft()

    def retry_after_s(self, waiting: int, granted: int, now_ns: int) -> int:
        """Return whole seconds, 1 to 60; 1 without data."""
        if not self._seen:
            return 1
        since_ns, before = self._seen[0]
        if granted <= before or now_ns <= since_ns:
            return 1
        per_s = (granted - before) / ((now_ns - since_ns) / 1e9)
        return min(max(math.ceil(waiting / per_s), 1), _MAX_ADVICE_S)
