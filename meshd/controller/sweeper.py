"""Clean up after dead processes, and judge the preparation pool; called some times a second.

Load rows of dead I/O processes are zeroed once for each death. Admission rows are never written from here:
the dead owner is named, and the row stops counting. Gauges need no cleaning: they count only in the rows of
living processes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from meshd.admission.cells import Cells
from meshd.control import ProcessBoard, State, Topology
from meshd.controller.pool_watch import PoolWatch
from meshd.log import Log
from meshd.routing.load import LoadTable

SWEEP_INTERVAL_S: Final = 0.25
POOL_LIMIT_NS: Final = 10_000_000_000  # no live prepare worker for so long: the pool has failed


class Sweeper:
    """``clock_ns``: CLOCK_MONOTONIC, injected for tests."""

    def __init__(
        self,
        board: ProcessBoard,
        topology: Topology,
        loads: LoadTable,
        admission: Cells,
        pool: PoolWatch,
        log: Log,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._board = board
        self._topology = topology
        self._loads = loads
        self._admission = admission
        self._pool = pool
        self._log = log
        self._clock_ns = clock_ns
        self._swept: dict[int, int] = {}  # I/O seat → epoch whose remains are gone
        self._last_alive_ns = clock_ns()

    def sweep(self) -> None:
        for seat in range(self._topology.io_seats):
            self._clear_load(seat)
            self._retire_tickets(seat)
        self._judge_pool()

    def _clear_load(self, seat: int) -> None:
        row = self._board.row(self._topology.board_io(seat))
        epoch = row.epoch
        if not row.is_alive and self._swept.get(seat) != epoch:  # a living successor has cleared it itself
            self._loads.clear_row(seat)
            self._swept[seat] = epoch

    def _retire_tickets(self, seat: int) -> None:
        # Owner before pid: a successor is on the board before it can take its rows, so an owner that is
        # not the process now on the board is one that died.
        owner = self._admission.owner(seat)
        pid = self._board.row(self._topology.board_io(seat)).pid
        if owner not in (0, pid) and self._admission.counts(seat):
            self._admission.retire(seat, owner)

    def _judge_pool(self) -> None:
        """Note in ``board.prepare_failed`` whether the pool has been dead for too long.

        A pool that has never been alive is still starting (a large tokenizer may take its time to load). One
        whose rings are broken has failed whoever lives, and stays so.
        """
        topology = self._topology
        rows = [self._board.row(topology.board_prepare(seat)) for seat in range(topology.prepare_seats)]
        now_ns = self._clock_ns()
        has_lived = any(row.epoch for row in rows)
        if any(row.state is State.READY for row in rows) or not has_lived:
            self._last_alive_ns = now_ns
        is_broken = self._pool.has_fault
        has_failed = is_broken or now_ns - self._last_alive_ns >= POOL_LIMIT_NS
        if has_failed != bool(self._board.prepare_failed):
            self._board.prepare_failed = int(has_failed)
            if has_failed:
                reason = "its rings are broken" if is_broken else "no live worker for 10 s"
                self._log.error("prepare_pool_failed", reason=reason)
            else:
                self._log.info("prepare_pool_alive")
