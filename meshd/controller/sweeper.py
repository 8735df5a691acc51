"""Clean up after dead processes, and judge the preparation pool; called some times a second.

What a dead I/O process left in its shared rows (load) is zeroed once for each death. Its gauges need no
cleaning: gauges count only in the rows of living processes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final

from meshd.control import ProcessBoard, State, Topology
from meshd.log import Log

SWEEP_INTERVAL_S: Final = 0.25
POOL_LIMIT_NS: Final = 10_000_000_000  # no live prepare worker for so long: the pool has failed


class Sweeper:
    """``clear_row``: each zeroes one kind of shared row of an I/O seat. ``clock_ns``: CLOCK_MONOTONIC."""

    def __init__(
        self,
        board: ProcessBoard,
        topology: Topology,
        clear_row: Sequence[Callable[[int], None]],
        log: Log,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._board = board
        self._topology = topology
        self._clear_row = tuple(clear_row)
        self._log = log
        self._clock_ns = clock_ns
        self._swept: dict[int, int] = {}  # I/O seat → epoch whose remains are gone
        self._last_alive_ns = clock_ns()

    def sweep(self) -> None:
        self._clear_rows()
        self._judge_pool()

    def _clear_rows(self) -> None:
        for seat in range(self._topology.io_seats):
            row = self._board.row(self._topology.board_io(seat))
            epoch = row.epoch
            if row.is_alive or self._swept.get(seat) == epoch:
                continue  # a successor that is alive already has cleared the row itself
            for clear in self._clear_row:
                clear(seat)
            self._swept[seat] = epoch

    def _judge_pool(self) -> None:
        """Note in ``board.prepare_failed`` whether the pool has been dead for too long.

        A pool that has never been alive is still starting (a large tokenizer may take its time to load).
        """
        topology = self._topology
        rows = [self._board.row(topology.board_prepare(seat)) for seat in range(topology.prepare_seats)]
        now_ns = self._clock_ns()
        has_lived = any(row.epoch for row in rows)
        if any(row.state is State.READY for row in rows) or not has_lived:
            self._last_alive_ns = now_ns
        has_failed = now_ns - self._last_alive_ns >= POOL_LIMIT_NS
        if has_failed != bool(self._board.prepare_failed):
            self._board.prepare_failed = int(has_failed)
            if has_failed:
                self._log.error("prepare_pool_failed", reason="no live prepare worker for 10 s")
            else:
                self._log.info("prepare_pool_alive")
