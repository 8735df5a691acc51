"""One prepare seat as an I/O process sees it: its end of the rings and the descriptors it waits for."""

from __future__ import annotations

from typing import Final

from meshd.control import BoardRow, State
from meshd.prepare.job import Job, JobState
from meshd.prepare.layout import DEPTH
from meshd.prepare.ring import FULL, IoEnd

_READY: Final = int(State.READY)


class Entry:
    """One descriptor that is not answered yet."""

    __slots__ = ("index", "is_live", "is_stacked", "job", "lane", "pushed_ns", "sequence")

    def __init__(
        self, lane: Lane, job: Job, index: int, sequence: int, pushed_ns: int, is_stacked: bool
    ) -> None:
        self.lane = lane
        self.job = job
        self.index = index
        self.sequence = sequence
        self.pushed_ns = pushed_ns
        self.is_live = True  # the worker spends or will spend time on it
        self.is_stacked = is_stacked  # it was pushed behind other work and is not known to be claimed

    @property
    def is_claimed(self) -> bool:
        return self.index < self.lane.end.claimed


class Lane:
    """The rings of one prepare seat and what is on them.

    ``live``, ``live_bytes``: those of them that are not withdrawn, and their bodies.
    ``stacked``: those that count as waiting. ``is_alive``: whether the board said READY when last asked.
    """

    __slots__ = (
        "_board",
        "_busy_word",
        "_places",
        "_state_word",
        "bell",
        "end",
        "is_alive",
        "is_dirty",
        "live",
        "live_bytes",
        "row",
        "stacked",
    )

    def __init__(self, end: IoEnd, row: BoardRow, bell: int) -> None:
        self.end = end
        self.row = row
        self.bell = bell
        self._board = row.words
        self._busy_word = row.busy_word
        self._state_word = row.state_word
        self._places: list[Entry | None] = [None] * DEPTH  # of descriptor n, while it is not answered: n % 16
        self.live = 0
        self.live_bytes = 0
        self.stacked = 0
        self.is_alive = False
        self.is_dirty = False

    @property
    def entries(self) -> list[Entry]:
        """Unanswered descriptors in ring order, which is the order of their completions."""
        end = self.end
        found = [self._places[index % DEPTH] for index in range(end.taken, end.tail)]
        return [entry for entry in found if entry is not None]

    @property
    def busy(self) -> int:
        """What the worker says of itself on the board, see layout.py."""
        return self._board[self._busy_word]

    @property
    def is_free(self) -> bool:
        """Whether a job pushed now would start at once, as far as one can tell."""
        return self.is_alive and self.live == 0 and self.end.has_room and not self.busy

    def look_at_board(self) -> None:
        self.is_alive = self._board[self._state_word] == _READY

    def push(self, job: Job, sequence: int, now_ns: int, is_stacked: bool) -> None:
        """Submit the job's descriptor; the caller has looked that there is room."""
        length = job.body_length
        index = self.end.push(
            sequence,
            job.slot.place,
            length,
            job.start_by_ns,
            job.endpoint_number | job.needs << 16 | job.deaths << 32,  # layout.job_word, without the call
            job.finish_by_ns,
        )
        if index == FULL:
            raise RuntimeError(f"no room on {self!r}")
        job.entry = entry = Entry(self, job, index, sequence, now_ns, is_stacked)
        job.state = JobState.OUT
        job.open_descriptors += 1
        self._places[index % DEPTH] = entry
        self.live += 1
        self.live_bytes += length
        if is_stacked:
            self.stacked += 1

    def adopt(self, job: Job, index: int, sequence: int) -> None:
        """Wait for the answer to a descriptor that a dead predecessor pushed."""
        entry = Entry(self, job, index, sequence, 0, False)
        entry.is_live = False
        job.open_descriptors += 1
        self._places[index % DEPTH] = entry

    def take_answered(self) -> Entry:
        """Return the entry of the completion that was popped last, once; it counts no more."""
        place = (self.end.taken - 1) % DEPTH
        entry = self._places[place]
        assert entry is not None
        self._places[place] = None
        self.forget(entry)
        return entry

    def withdraw(self, entry: Entry) -> None:
        """Mark the descriptor: not claimed, it will be skipped; claimed, its job stops between stages."""
        self.end.withdraw(entry.index, entry.sequence)
        if not entry.is_claimed:
            self.forget(entry)

    def try_recall(self, entry: Entry) -> bool:
        """Withdraw the descriptor unless it is claimed; True if its job may be dispatched again.

        One that is claimed in this very moment then costs a second run of the job, never a wrong result
        (client.py).
        """
        if entry.is_claimed:
            return False
        self.withdraw(entry)
        return True

    def forget(self, entry: Entry) -> None:
        """Count the entry no more."""
        if entry.is_live:
            entry.is_live = False
            self.live -= 1
            self.live_bytes -= entry.job.body_length
        if entry.is_stacked:
            entry.is_stacked = False
            self.stacked -= 1

    def unclaimed(self) -> list[Entry]:
        """Live entries that are not claimed as far as one can tell, oldest first."""
        if not self.live:
            return []
        claimed = self.end.claimed
        return [entry for entry in self.entries if entry.index >= claimed and entry.is_live]

    def discount_claimed(self) -> None:
        """Let no entry count as waiting that is claimed by now."""
        if self.stacked:
            claimed = self.end.claimed
            for entry in self.entries:
                if entry.index >= claimed:
                    break
                if entry.is_stacked:
                    entry.is_stacked = False
                    self.stacked -= 1

    def __repr__(self) -> str:
        return (
            f"Lane({self.end!r}, live={self.live}/{self.live_bytes}B, stacked={self.stacked},"
            f" alive={self.is_alive})"
        )
