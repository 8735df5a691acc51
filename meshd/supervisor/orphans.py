"""Prepare workers whose leader died.

They go on serving until the next leader asks them to leave, which is its business. The supervisor is their
subreaper, so they are its children from the moment the leader is dead: it reaps them, clears their seats,
and kills those that hang, for while no leader can boot nobody else would.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from typing import Final

from meshd.control import HEARTBEAT_LIMIT_NS, BoardRow, ProcessBoard, Topology

# A leader kills its own after 5 s and 10 s; one second later it is clear that none did.
_OVERTIME_NS: Final = 6_000_000_000
_SILENCE_NS: Final = HEARTBEAT_LIMIT_NS + 1_000_000_000
_PR_SET_CHILD_SUBREAPER: Final = 36


class Orphans:
    """Watches orphaned prepare workers until their seats are free again."""

    def __init__(self, board: ProcessBoard, topology: Topology) -> None:
        seats = range(topology.prepare_seats)
        self._rows = [board.row(topology.board_prepare(seat)) for seat in seats]
        self._pids: dict[int, BoardRow] = {}

    def leader_died(self, leader_pid: int) -> None:
        """Take over the workers of a reaped leader.

        A worker that the leader had reaped without entering it is nobody's child: its seat is cleared here.
        """
        for row in self._rows:
            if not row.is_alive or row.leader_pid != leader_pid:
                continue
            if _is_child(row.pid):
                self._pids[row.pid] = row
            else:
                row.close()

    def bury(self, pid: int) -> None:
        """Clear the seat of an orphan that was reaped, unless its leader's successor did."""
        row = self._pids.pop(pid, None)
        if row is not None and row.pid == pid:
            row.close()

    def kill_hung(self, now_ns: int, awake_since_ns: int) -> None:
        """Kill who overran its job or stopped beating; silence before ``awake_since_ns`` is forgiven."""
        for pid, row in self._pids.items():
            deadline_ns = row.job_deadline_ns
            last_ns = max(deadline_ns or row.heartbeat_ns, awake_since_ns)
            if now_ns - last_ns > (_OVERTIME_NS if deadline_ns else _SILENCE_NS):
                self._kill(pid)

    def kill_all(self) -> None:
        for pid in self._pids:
            self._kill(pid)

    def _kill(self, pid: int) -> None:
        # Our own child, and not reaped while it is listed: the pid cannot be another's.
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    def __bool__(self) -> bool:
        return bool(self._pids)

    def __repr__(self) -> str:
        return f"<orphans {sorted(self._pids)}>"


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
