"""One child: what belongs in a seat, and the process that sits there now."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from meshd.control import Role, send_message
from meshd.supervisor.backoff import Backoff


@dataclass(frozen=True, kw_only=True)
class ChildSpec:
    """What belongs in a seat. ``program`` follows the interpreter on the command line.

    ``post``: which of the node's duties it has among its role; the two seats of one I/O process have one post
    and two indexes. ``has_manifest`` false: an ordinary program (a demo upstream) that gets ``fds`` and
    nothing else from us; it counts as ready when it runs. ``may_be_forked``: those that start together with a
    node are forked from one process (nursery.py).
    """

    role: Role
    index: int
    seat: int
    program: tuple[str, ...]
    cpus: tuple[int, ...] = ()
    prepare_cpus: tuple[tuple[int, ...], ...] = ()
    fds: Mapping[str, int] = field(default_factory=dict)
    has_manifest: bool = True
    post: int = -1
    may_be_forked: bool = False

    @property
    def key(self) -> tuple[Role, int]:
        """Name what this seat is for: one process serves a key at a time."""
        return self.role, self.index if self.post < 0 else self.post


class Duty(Enum):
    """What a child is there for, and so what its death means."""

    SERVING = "serving"  # it is started again
    SUCCESSOR = "successor"  # it cannot take over: the replacement is given up
    RETIRING = "retiring"  # what it was asked for


class Adopted:
    """A process that another one forked for us, and that is our child since that one ended."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def wait(self) -> int:
        """Reap it; return its status as ``Popen`` does."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


class Child:
    """A seat and its process. ``failed_boots``: starts in a row that ended before ``ready``.

    ``predecessor``: whose end it waits for before it is told to take over. ``leave_by_ns``: a retiring one
    that is still there then is killed; 0: no limit.
    """

    def __init__(self, spec: ChildSpec, settings: Mapping[str, Any], duty: Duty = Duty.SERVING) -> None:
        self.spec = spec
        self.settings = settings
        self.duty = duty
        self.predecessor: Child | None = None
        self.process: subprocess.Popen[bytes] | Adopted | None = None
        self.pidfd = -1
        self.link: socket.socket | None = None
        self.is_loaded = False
        self.is_ready = False
        self.is_condemned = False  # killed for silence, not yet reaped
        self.has_lived = False
        self.failed_boots = 0
        self.started_ns = 0
        self.next_start_ns = 0
        self.leave_by_ns = 0
        self.backoff = Backoff()

    @property
    def is_alive(self) -> bool:
        return self.process is not None

    @property
    def name(self) -> str:
        return f"{self.spec.role}{self.spec.index}"

    def send(self, message: dict[str, Any]) -> None:
        if self.link is not None:
            send_message(self.link, message)

    def kill(self) -> None:
        if self.is_alive:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def __repr__(self) -> str:
        pid = self.process.pid if self.process else None
        return f"<child {self.spec.role} {self.spec.index} {self.duty.value} pid={pid} ready={self.is_ready}>"
