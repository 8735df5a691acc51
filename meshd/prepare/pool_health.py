"""Whether the preparation pool can serve at all, as one I/O process sees it.

**No worker.** The pool has failed when none was alive for 10 s: by the controller's clock, which the health
routes go by, or by ours if there is no controller. It has recovered the moment that one lives.

**Broken layout.** Whoever sees a wrong sequence or check line sets the word ``fault`` of its cell. All I/O
processes look at all of them, and refuse every job until the node is started again.
"""

from __future__ import annotations

from typing import Final

from meshd.control import ProcessBoard
from meshd.memory import Segment
from meshd.prepare.lane import Lane
from meshd.prepare.layout import RingsLayout, has_fault

_NO_WORKER_LIMIT_NS: Final = 10_000_000_000
_LOOK_LIMIT_NS: Final = 1_000_000_000


class PoolHealth:
    """``lanes``: of the I/O process in ``seat``, of the ``rings`` that ``layout`` describes."""

    def __init__(
        self,
        lanes: tuple[Lane, ...],
        board: ProcessBoard,
        rings: Segment,
        layout: RingsLayout,
        seat: int,
        now_ns: int,
    ) -> None:
        self._lanes = lanes
        self._board = board
        self._rings = rings
        self._layout = layout
        self._fault_word = layout.fault_word(seat)
        self._has_fault = False
        self._looked_ns = now_ns
        self._without_worker_ns = 0

    @property
    def is_failed(self) -> bool:
        """Whether the layout is broken, or there was no live worker for 10 s, when last looked at."""
        return self._has_fault or (
            self._without_worker_ns > 0
            and (self._without_worker_ns > _NO_WORKER_LIMIT_NS or self._board.prepare_failed > 0)
        )

    def look(self, now_ns: int) -> bool:
        """Look at every worker and every fault word; return whether any worker is alive. O(workers)."""
        is_any_alive = False
        for lane in self._lanes:
            lane.look_at_board()
            is_any_alive = is_any_alive or lane.is_alive
        self._has_fault = self._has_fault or has_fault(self._rings, self._layout)
        # Time that this process slept through is no evidence: it could not have seen a worker.
        self._without_worker_ns += min(now_ns - self._looked_ns, _LOOK_LIMIT_NS)
        self._looked_ns = now_ns
        if is_any_alive:
            self._without_worker_ns = 0
        return is_any_alive

    def tell_fault(self) -> None:
        """Tell all I/O processes that the layout is broken."""
        self._has_fault = True
        self._rings.words[self._fault_word] = 1

    def __repr__(self) -> str:
        return f"PoolHealth(failed={self.is_failed}, fault={self._has_fault})"
