"""What a leader keeps of its workers: where each is to be, who is there, and when the next may be forked."""

from __future__ import annotations

import contextlib
import os
import select
from collections import deque
from collections.abc import Sequence
from typing import Final

from meshd.control import BoardRow

_SECOND: Final = 1_000_000_000


class Backoff:
    """When a dead worker may be replaced: at once, unless 5 died within 10 s; then after 1 s, 2 s … 30 s.

    A minute of life without a death resets it; the wait before that life is no part of the minute.
    """

    def __init__(self) -> None:
        self._deaths: deque[int] = deque(maxlen=5)
        self._delay_ns = 0

    def died(self, now_ns: int) -> int:
        """Count a death; return the nanoseconds to wait before the replacement."""
        if self._deaths and now_ns - self._deaths[-1] - self._delay_ns > 60 * _SECOND:
            self._deaths.clear()
            self._delay_ns = 0
        self._deaths.append(now_ns)
        if self._delay_ns:
            self._delay_ns = min(2 * self._delay_ns, 30 * _SECOND)
        elif len(self._deaths) == 5 and now_ns - self._deaths[0] <= 10 * _SECOND:
            self._delay_ns = _SECOND
        return self._delay_ns


class Seat:
    """One prepare seat of the group."""

    __slots__ = (
        "ends",
        "gone_at_ns",
        "is_child",
        "is_killed",
        "kill_at_ns",
        "number",
        "pid",
        "pidfd",
        "row",
        "version",
    )

    def __init__(self, number: int, row: BoardRow, ends: Sequence[tuple[int, int]]) -> None:
        self.number = number
        self.row = row
        self.ends = ends  # by I/O seat: indexes of the tail and head words of its submission ring
        self.pid = 0
        self.pidfd = -1
        self.is_child = False
        self.is_killed = False
        self.version = 0  # of the group when it was forked; 0: adopted
        self.kill_at_ns = 0  # asked to leave: patience ends here; 0 if not asked
        self.gone_at_ns = 0  # adopted and dead since, waits for the supervisor to reap it

    def __repr__(self) -> str:
        return f"Seat({self.number}, pid={self.pid}, version={self.version}, {self.row!r})"


class Place:
    """Where one worker is to be: two seats, and when the next may be forked. ``died``: the last one did."""

    __slots__ = ("cpus", "died", "fork_at_ns", "seats")

    def __init__(self, seats: tuple[Seat, ...], cpus: tuple[int, ...]) -> None:
        self.seats = seats
        self.cpus = cpus
        self.fork_at_ns = 0
        self.died = False

    @property
    def held(self) -> list[Seat]:
        return [seat for seat in self.seats if seat.pid]

    @property
    def latest(self) -> Seat:
        """The seat that was used last, by another leader maybe: the successor of a dead worker sits there."""
        return max(self.seats, key=lambda seat: seat.row.started_ns)

    @property
    def vacant(self) -> Seat | None:
        return next((seat for seat in self.seats if not seat.pid), None)


def open_worker(pid: int, number: int) -> int | None:
    """Open the process if it is the worker of that seat and no stranger that got its pid since."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    with contextlib.suppress(OSError), open(f"/proc/{pid}/comm", encoding="ascii") as comm:
        if comm.read().strip() == f"meshd:prep{number}" and not _has_ended(pidfd):
            return pidfd
    os.close(pidfd)
    return None


def _has_ended(pidfd: int) -> bool:
    poller = select.poll()  # select() knows no descriptor above 1023
    poller.register(pidfd, select.POLLIN)
    return bool(poller.poll(0))


def wait_for_row(row: BoardRow, leader_pid: int) -> bool:
    """Wait until the leader has entered us on the board; False if it died before that."""
    while row.pid != os.getpid():
        if os.getppid() != leader_pid:
            return False
        select.select([], [], [], 0.001)
    return True
