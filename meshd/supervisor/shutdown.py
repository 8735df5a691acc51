"""The order in which a node ends, as a machine without clock, signals or processes.

::

    RUNNING ──signal──> LINGERING ──delay──> DRAINING ──no I/O process left──> CLOSING ──> KILLING ──> ENDED
                                                └─second signal─> CUTTING ────────┘

LINGERING: readiness fails, connections are still served, so that load balancers look elsewhere. DRAINING: I/O
processes finish what runs. CUTTING: they end it. CLOSING: what served them ends: leaders, controller, demo
upstreams. KILLING: whoever is left. A phase moves on when those it waits for are gone, at the latest at its
deadline. All allowances past the grace period stay below 2 s together, and those past a second signal below
3 s, so that a service manager and a person can be told a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

_SECOND: Final = 1_000_000_000
_REAP_S: Final = 0.2  # SIGKILL takes effect at once, but for a process stuck in the kernel


class Phase(Enum):
    RUNNING = "running"
    LINGERING = "lingering"
    DRAINING = "draining"
    CUTTING = "cutting"
    CLOSING = "closing"
    KILLING = "killing"
    ENDED = "ended"


class Act(Enum):
    """What the supervisor does next."""

    ANNOUNCE = "announce"  # is_draining on the board, STOPPING=1
    DRAIN_IO = "drain I/O"  # {"t":"drain"} with what is left of the grace period
    CUT_IO = "cut I/O"  # {"t":"quit"}
    KILL_IO = "kill I/O"
    CLOSE_REST = "close the rest"  # {"t":"quit"} to leaders and controller, demo upstreams killed
    KILL_ALL = "kill all"


@dataclass(frozen=True)
class Patience:
    """How long each phase may last. ``io_exit_s``: past the end of the grace period."""

    delay_s: float
    grace_s: float
    io_exit_s: float = 1.0
    cut_s: float = 1.5
    close_s: float = 0.8

    @classmethod
    def hurried(cls) -> Patience:
        """For a person who pressed Ctrl-C and watches: all over within 3 s, requests get 2 s of it."""
        return cls(delay_s=0, grace_s=2.0, io_exit_s=0.2, cut_s=0.5, close_s=0.4)


class Shutdown:
    """Where the node is on its way down. ``act`` is called after every event and timer."""

    def __init__(self) -> None:
        self.phase = Phase.RUNNING
        self.grace_end_ns = 0
        self.deadline_ns: int | None = None
        self._patience = Patience(0, 0)
        self._is_cut = False

    def signal(self, now_ns: int, patience: Patience) -> list[Act]:
        """Take SIGTERM or SIGINT; ``patience`` is that of the first one."""
        if self.phase is not Phase.RUNNING:
            self._is_cut = True
            return []
        self._patience = patience
        self.grace_end_ns = now_ns + _ns(patience.grace_s)
        self._enter(Phase.LINGERING, min(now_ns + _ns(patience.delay_s), self.grace_end_ns))
        return [Act.ANNOUNCE]

    def abort(self, now_ns: int) -> None:
        """Give up at once, without a word to anyone."""
        self._enter(Phase.CLOSING, now_ns)

    def next_acts(self, now_ns: int, *, has_io: bool, has_any: bool) -> list[Act]:
        """Take the transition that time and the living allow, if any; call again until nothing comes back."""
        is_due = self.deadline_ns is not None and now_ns >= self.deadline_ns
        match self.phase:
            case Phase.LINGERING if is_due or self._is_cut:
                self._enter(Phase.DRAINING, self.grace_end_ns + _ns(self._patience.io_exit_s))
                return [Act.DRAIN_IO]
            case Phase.DRAINING if self._is_cut and has_io:
                self._enter(Phase.CUTTING, now_ns + _ns(self._patience.cut_s))
                return [Act.CUT_IO]
            case Phase.DRAINING | Phase.CUTTING if is_due or not has_io:
                self._enter(Phase.CLOSING, now_ns + _ns(self._patience.close_s))
                return [Act.KILL_IO, Act.CLOSE_REST]
            case Phase.CLOSING if is_due or not has_any:
                self._enter(Phase.KILLING, now_ns + _ns(_REAP_S))
                return [Act.KILL_ALL]
            case Phase.KILLING if is_due or not has_any:
                self._enter(Phase.ENDED, None)
        return []

    def _enter(self, phase: Phase, deadline_ns: int | None) -> None:
        self.phase = phase
        self.deadline_ns = deadline_ns


def _ns(seconds: float) -> int:
    return int(seconds * _SECOND)
