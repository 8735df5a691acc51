"""Prepare workers whose leader died: they finish their job and leave; who does not is killed.

The supervisor is their subreaper, so they are its children from the moment the leader is dead.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from typing import Final

from meshd.control import BoardRow, ProcessBoard, Topology

_SECOND: Final = 1_000_000_000
_IDLE_NS: Final = 2 * _SECOND  # an idle worker sees its leader's end at once
_STUCK_NS: Final = 5 * _SECOND  # what a job may run past its deadline (prepare pool, deadlines)
_JOB_NS: Final = 10 * _SECOND  # for a job that shows no deadline
_PR_SET_CHILD_SUBREAPER: Final = 36


class Orphans:
    """Watches orphaned prepare workers until their seats are free again."""

    def __init__(self, board: ProcessBoard, topology: Topology) -> None:
        seats = range(topology.prepare_seats)
        self._rows = [board.row(topology.board_prepare(seat)) for seat in seats]
        self._kill_at_ns: dict[int, int] = {}

    def leader_died(self, leader_pid: int, now_ns: int) -> None:
        """Take over the workers of a reaped leader.

        A worker that the leader had reaped without entering it is nobody's child: its seat is cleared here.
        """
        for row in self._rows:
            if not row.is_alive or row.leader_pid != leader_pid:
                continue
            if _is_child(row.pid):
                self._kill_at_ns[row.pid] = self._deadline_ns(row, now_ns)
            else:
                row.close()

    def bury(self, pid: int) -> None:
        """Clear the seat of an orphan that was reaped."""
        self._kill_at_ns.pop(pid, None)
        for row in self._rows:
            if row.pid == pid and row.is_alive:
                row.close()

    def kill_overdue(self, now_ns: int) -> None:
        for pid, at_ns in self._kill_at_ns.items():
            if now_ns >= at_ns:
                self._kill(pid)

    def kill_all(self) -> None:
        for pid in self._kill_at_ns:
            self._kill(pid)

    def _kill(self, pid: int) -> None:
        # Our own child, and not reaped while it is listed: the pid cannot be another's.
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    def _deadline_ns(self, row: BoardRow, now_ns: int) -> int:
        if not row.busy:
            return now_ns + _IDLE_NS
        return max(row.job_deadline_ns or now_ns + _JOB_NS, now_ns) + _STUCK_NS

    def __bool__(self) -> bool:
        return bool(self._kill_at_ns)

    def __repr__(self) -> str:
        return f"<orphans {sorted(self._kill_at_ns)}>"


def become_subreaper() -> None:
    """Inherit orphaned descendants, as process 1 would. Raises OSError on a kernel without it."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(1), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def _is_child(pid: int) -> bool:
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True
