"""What the controller sees of the preparation pool: its rings, and the job counts of I/O processes.

**Jobs of dead I/O processes** count as cancelled, each once, whoever dies when. For each I/O seat there is
one number that only grows: the jobs that processes in this seat submitted and took with them uncounted. While
the seat is empty, or its new process has not attached, that is the open balance of its metric row, in which
nothing moves. From then on it is the word ``lost``, into which the new process stored that same balance
before it attached. So the number can be asked for at any time, by any controller.
"""

from __future__ import annotations

from meshd.control import ProcessBoard, Topology
from meshd.memory import Segment
from meshd.metrics.job_balance import JobBalance
from meshd.prepare.layout import has_fault, open_layout
from meshd.prepare.ring import has_job


class PoolWatch:
    """Reads only. Raises ``StartupError`` if the segment ``rings`` has another layout."""

    def __init__(self, topology: Topology, board: ProcessBoard, rings: Segment, balance: JobBalance) -> None:
        self._layout = open_layout(rings, topology.io_seats, topology.prepare_seats)
        self._rings = rings
        self._balance = balance
        self._io_rows = [board.row(topology.board_io(seat)) for seat in range(topology.io_seats)]
        self._prepare_rows = [
            board.row(topology.board_prepare(seat)) for seat in range(topology.prepare_seats)
        ]

    @property
    def has_fault(self) -> bool:
        """Whether some process has found the rings broken; for the rest of the node's life."""
        return has_fault(self._rings, self._layout)

    def lost_jobs(self) -> int:
        """Return how many jobs ended with their I/O process; never less than before. O(I/O seats)."""
        return sum(self._lost_in(seat) for seat in range(len(self._io_rows)))

    def reserved_workers(self) -> int:
        """Return how many living prepare workers have a job, dispatched or running. O(pairs of seats)."""
        return sum(row.is_alive and self._has_job(seat) for seat, row in enumerate(self._prepare_rows))

    def _lost_in(self, seat: int) -> int:
        words, row = self._rings.words, self._io_rows[seat]
        epoch_word, lost_word = self._layout.epoch_word(seat), self._layout.lost_word(seat)
        while True:
            attached = words[epoch_word]
            if attached == row.epoch:
                return words[lost_word]
            balance = self._balance.open_jobs(row.seat)
            if words[epoch_word] == attached:  # nobody has attached meanwhile
                return balance

    def _has_job(self, prepare_seat: int) -> bool:
        return any(
            has_job(self._rings, self._layout.pair(io_seat, prepare_seat))
            for io_seat in range(len(self._io_rows))
        )
