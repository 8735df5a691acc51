"""How a child process is born, found on the board, and spoken to by the supervisor.

A child is started as ``python -m <module> --manifest-fd N``; the manifest is JSON on an inherited memfd and
names every other inherited descriptor. The child calls :func:`start_child` first, attaches the board, opens
its :class:`ChildLink`, builds itself, and says :meth:`ChildLink.ready`.

The board is one shared segment with one row a seat. A seat is a place for one process; a successor of a dead
process takes the same seat. Its life on the board::

    EMPTY ──spawn──> STARTING ──ready()──> READY ──drain──> DRAINING
                        └────────────────────┴──────────────────┴──death──> GONE ──spawn──> STARTING

``epoch`` counts the deaths in a seat and is written last, so whoever lent something to a seat keeps the epoch
beside it: another value means that borrower is dead, whatever the row says now.

Layout of the board (bytes; every word is an aligned u64 with one writer)::

       0  segment header                                                  memory.py
      64  node words of the supervisor    is_draining, drain_deadline_ns, supervisor_pid, started_ns
     128  node words of the controller    prepare_failed
     256  row 0, row 1, … 256 bytes each
          +0    role, index, pid, epoch, started_ns, restarts, leader_pid    who reaps the seat
          +64   state, heartbeat_ns, busy, job_deadline_ns, 4 free words          the process itself
          +128  CPU list as ASCII, NUL padded, 64 bytes                         who reaps the seat
          +192  unused

"Who reaps the seat" is the supervisor, and for PREPARE seats the leader that forked the worker; when that
leader is dead the supervisor inherits and reaps its orphans. The reaper also writes ``state`` while no
process lives in the seat (STARTING, GONE). Readers rely on x86-64 keeping stores in program order.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from enum import IntEnum, StrEnum
from typing import Any, Final, overload

from meshd.errors import StartupError
from meshd.memory import Segment

BOARD_KIND: Final = "board"
BOARD_VERSION: Final = 1
HEARTBEAT_LIMIT_NS: Final = 10_000_000_000  # an older heartbeat means hung: killed and replaced

_NODE_BYTES: Final = 256
_ROW_BYTES: Final = 256
_ROW_WORDS: Final = _ROW_BYTES // 8
_CPUS_OFFSET: Final = 128
_CPUS_BYTES: Final = 64
_MESSAGE_BYTES: Final = 65536  # SOCK_SEQPACKET: one message is one datagram
_PR_SET_PDEATHSIG: Final = 1
_PR_SET_NAME: Final = 15
# The supervisor alone acts on these. Children start with them blocked: none may die before it ignores them.
SUPERVISOR_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2)


class Role(StrEnum):
    """What a process is for."""

    SUPERVISOR = "supervisor"
    IO = "io"
    LEADER = "leader"
    PREPARE = "prepare"
    CONTROLLER = "controller"
    BACKEND = "backend"


_ROLES: Final = tuple(Role)  # the role word is the position plus one; 0 is an unused seat
_SHORT_NAMES: Final = {
    Role.SUPERVISOR: "super",
    Role.IO: "io",
    Role.LEADER: "lead",
    Role.PREPARE: "prep",
    Role.CONTROLLER: "ctl",
    Role.BACKEND: "back",
}


class State(IntEnum):
    """Where the process of a seat is in its life."""

    EMPTY = 0
    STARTING = 1
    READY = 2
    DRAINING = 3
    GONE = 4


# ---------------------------------------------------------------------------------------------- the board


class _Word:
    """One u64 of a row or of the node area, as an attribute."""

    __slots__ = ("_offset",)

    def __init__(self, byte_offset: int) -> None:
        self._offset = byte_offset // 8

    @overload
    def __get__(self, owner: None, kind: type[Any]) -> _Word: ...
    @overload
    def __get__(self, owner: _Words, kind: type[Any]) -> int: ...
    def __get__(self, owner: _Words | None, kind: type[Any]) -> int | _Word:
        return self if owner is None else owner.words[owner.base + self._offset]

    def __set__(self, owner: _Words, value: int) -> None:
        owner.words[owner.base + self._offset] = value


class _Words:
    """A run of words in the board that starts at word ``base``."""

    __slots__ = ("base", "words")

    def __init__(self, words: memoryview, base: int) -> None:
        self.words = words
        self.base = base


class BoardRow(_Words):
    """One seat. Reading an attribute reads shared memory, setting it is one store; writers: see above."""

    __slots__ = ("_bytes", "seat")

    index = _Word(8)
    pid = _Word(16)
    epoch = _Word(24)
    started_ns = _Word(32)
    restarts = _Word(40)
    leader_pid = _Word(48)  # PREPARE: the process that forked it, 0 once orphaned
    heartbeat_ns = _Word(72)
    busy = _Word(80)  # PREPARE: 1 while a job runs
    job_deadline_ns = _Word(88)  # PREPARE: CLOCK_MONOTONIC deadline of the running job, 0 for none
    aux0 = _Word(96)
    aux1 = _Word(104)
    aux2 = _Word(112)
    aux3 = _Word(120)
    _role = _Word(0)
    _state = _Word(64)

    def __init__(self, segment: Segment, seat: int) -> None:
        super().__init__(segment.words, (_NODE_BYTES + seat * _ROW_BYTES) // 8)
        self.seat = seat
        start = _NODE_BYTES + seat * _ROW_BYTES + _CPUS_OFFSET
        self._bytes = segment.bytes[start : start + _CPUS_BYTES]

    @property
    def role(self) -> Role | None:
        number = self._role
        return _ROLES[number - 1] if number else None

    @property
    def state(self) -> State:
        return State(self._state)

    @state.setter
    def state(self, state: State) -> None:
        self._state = int(state)

    @property
    def cpus(self) -> str:
        """The CPU list as text, such as ``0-3,8``."""
        return bytes(self._bytes).rstrip(b"\0").decode("ascii")

    @property
    def is_alive(self) -> bool:
        return State.STARTING <= self._state <= State.DRAINING

    def beat(self, now_ns: int | None = None) -> None:
        """Say "not hung". Every process calls it at least each second."""
        self.heartbeat_ns = time.monotonic_ns() if now_ns is None else now_ns

    def open(self, role: Role, index: int, pid: int, cpus: str, leader_pid: int = 0) -> None:
        """Enter a new process (the reaper of the seat, right after the spawn or fork)."""
        now_ns = time.monotonic_ns()
        self._role = _ROLES.index(role) + 1
        self.index = index
        self.leader_pid = leader_pid
        text = cpus.encode("ascii")[:_CPUS_BYTES]
        self._bytes[:] = text.ljust(_CPUS_BYTES, b"\0")
        self.started_ns = now_ns
        self.heartbeat_ns = now_ns
        self.busy = 0
        self.job_deadline_ns = 0
        if self._state == State.GONE:
            self.restarts += 1
        self._state = State.STARTING
        self.pid = pid

    def close(self) -> None:
        """Enter a death (the reaper of the seat). The epoch moves last: it is what readers watch."""
        self._state = State.GONE
        self.pid = 0
        self.busy = 0
        self.job_deadline_ns = 0
        self.epoch += 1

    def __repr__(self) -> str:
        return (
            f"<seat {self.seat} {self.role} {self.index} pid={self.pid} {self.state.name} epoch={self.epoch}>"
        )


class ProcessBoard(_Words):
    """All seats of one node, and the few words that concern the whole node."""

    __slots__ = ("_rows", "seats", "segment")

    is_draining = _Word(64)  # supervisor: 1 from the first SIGTERM on
    drain_deadline_ns = _Word(72)  # supervisor: when the grace period ends
    supervisor_pid = _Word(80)  # supervisor
    started_ns = _Word(88)  # supervisor
    prepare_failed = _Word(128)  # controller: 1 while the preparation pool counts as failed

    def __init__(self, segment: Segment) -> None:
        super().__init__(segment.words, 0)
        self.segment = segment
        self.seats = (segment.size - _NODE_BYTES) // _ROW_BYTES
        self._rows = tuple(BoardRow(segment, seat) for seat in range(self.seats))

    @staticmethod
    def segment_size(seats: int) -> int:
        return _NODE_BYTES + seats * _ROW_BYTES

    @classmethod
    def create(cls, seats: int) -> ProcessBoard:
        return cls(Segment.create(BOARD_KIND, cls.segment_size(seats), BOARD_VERSION))

    @classmethod
    def attach(cls, fd: int) -> ProcessBoard:
        return cls(Segment.attach(fd, BOARD_KIND, BOARD_VERSION))

    def row(self, seat: int) -> BoardRow:
        return self._rows[seat]

    def rows(self) -> Iterable[BoardRow]:
        """The seats that were ever used."""
        return (row for row in self._rows if row.role is not None)

    def __repr__(self) -> str:
        return f"<board {list(self.rows())}>"


# ---------------------------------------------------------------------------------- topology and manifest


@dataclass(frozen=True, kw_only=True)
class Topology:
    """Numbers fixed at start, the same for every process of the node.

    There are twice as many I/O and prepare seats as processes, so that a new process can be ready before the
    old one leaves. ``groups``: the prepare seats of each prepare group.
    """

    io_processes: int
    prepare_workers: int
    io_seats: int
    prepare_seats: int
    groups: tuple[tuple[int, ...], ...]
    metric_rows: int
    backends: int = 0
    max_upstreams: int = 1024
    listen_port: int = 0
    metrics_port: int = 0
    controller_socket: str = ""  # name in the abstract Unix namespace, starts with "\0"
    view_bytes: int = 8192
    body_memory_bytes: int = 256 << 20  # bound on the whole node
    slab_bytes: int = 512 << 20  # virtual size of one I/O process's body slab

    @classmethod
    def of(
        cls,
        io_processes: int,
        prepare_workers: int,
        groups: tuple[tuple[int, ...], ...] | None = None,
        backends: int = 0,
        **numbers: Any,
    ) -> Topology:
        """Derive the seats; ``groups`` defaults to one group of all; ``numbers`` are further fields."""
        groups = (tuple(range(prepare_workers)),) if groups is None else groups
        io_seats, prepare_seats = 2 * io_processes, 2 * prepare_workers
        return cls(
            io_processes=io_processes,
            prepare_workers=prepare_workers,
            io_seats=io_seats,
            prepare_seats=prepare_seats,
            groups=groups,
            metric_rows=io_seats + prepare_seats + 2 * len(groups) + 2 + backends,
            backends=backends,
            **numbers,
        )

    def board_io(self, seat: int) -> int:
        return seat

    def board_prepare(self, seat: int) -> int:
        return self.io_seats + seat

    def board_leader(self, group: int) -> int:
        return self.io_seats + self.prepare_seats + group

    @property
    def board_controller(self) -> int:
        return self.io_seats + self.prepare_seats + 2 * len(self.groups)

    @property
    def board_supervisor(self) -> int:
        return self.board_controller + 1

    def board_backend(self, number: int) -> int:
        return self.board_controller + 2 + number

    @property
    def board_seats(self) -> int:
        return self.board_controller + 2 + self.backends


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Everything a child is told at birth.

    ``index``: number among its role (I/O seat, prepare group). ``seat``: its row on the board.
    ``settings``: ``Settings.to_dict()``. ``fds``: inherited descriptors by name. ``cpus``: where it may run.
    ``prepare_cpus``: for a leader, the CPU list of each of its prepare seats, in the order of its group.
    """

    role: Role
    index: int
    seat: int
    supervisor_pid: int
    topology: Topology
    settings: dict[str, Any] = field(default_factory=dict)
    fds: dict[str, int] = field(default_factory=dict)
    cpus: tuple[int, ...] = ()
    prepare_cpus: tuple[tuple[int, ...], ...] = ()

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Manifest:
        raw = json.loads(data)
        topology = raw["topology"]
        topology["groups"] = tuple(tuple(group) for group in topology["groups"])
        raw["topology"] = Topology(**topology)
        raw["role"] = Role(raw["role"])
        raw["cpus"] = tuple(raw["cpus"])
        raw["prepare_cpus"] = tuple(tuple(cpus) for cpus in raw["prepare_cpus"])
        return cls(**raw)

    def to_memfd(self) -> int:
        """Write the manifest to a fresh memfd and return its descriptor, which the caller closes."""
        fd = os.memfd_create("meshd:manifest", os.MFD_CLOEXEC)
        os.write(fd, self.to_json())
        return fd


# ------------------------------------------------------------------------------------------- being a child


class ChildLink:
    """A child's end of its SOCK_SEQPACKET pair with the supervisor; messages are small JSON objects.

    To the supervisor: ``{"t":"ready"}``. To the child: ``{"t":"drain","grace_s":…}`` (finish what runs, then
    exit 0), ``{"t":"quit"}`` (exit at once), ``{"t":"reopen_logs"}``. End of file: the supervisor is gone.
    """

    def __init__(self, fd: int, row: BoardRow) -> None:
        self._socket = socket.socket(fileno=fd)
        self._socket.setblocking(False)
        self._row = row
        self.is_closed = False

    @classmethod
    def open(cls, manifest: Manifest, board: ProcessBoard) -> ChildLink:
        return cls(manifest.fds["link"], board.row(manifest.seat))

    def ready(self) -> None:
        """Enter READY on the board and tell the supervisor."""
        self._row.beat()
        self._row.state = State.READY
        self.send({"t": "ready"})

    def send(self, message: dict[str, Any]) -> None:
        """Send one message; one that finds the supervisor gone or its queue full is dropped."""
        with contextlib.suppress(OSError):
            self._socket.send(json.dumps(message).encode())

    def recv(self) -> list[dict[str, Any]]:
        """Return what has arrived, without waiting. ``is_closed`` turns true at end of file."""
        messages, self.is_closed = receive_messages(self._socket)
        return messages

    def fileno(self) -> int:
        return self._socket.fileno()


def receive_messages(link: socket.socket) -> tuple[list[dict[str, Any]], bool]:
    """Read all waiting messages of a link; the flag says that the peer has closed it."""
    messages: list[dict[str, Any]] = []
    while True:
        try:
            data = link.recv(_MESSAGE_BYTES)
        except BlockingIOError:
            return messages, False
        except OSError:
            return messages, True
        if not data:
            return messages, True
        messages.append(json.loads(data))


def start_child(argv: Sequence[str]) -> Manifest:
    """Become a proper child: read the manifest, die with the supervisor, take name and CPUs, ignore signals.

    ``argv``: the arguments after the module, ``--manifest-fd N``. Raises StartupError if started by hand.
    """
    if len(argv) != 2 or argv[0] != "--manifest-fd":
        raise StartupError("this module is started by the meshd supervisor, not by hand", 2)
    fd = int(argv[1])
    manifest = Manifest.from_json(os.pread(fd, os.fstat(fd).st_size, 0))
    os.close(fd)
    die_with_parent(manifest.supervisor_pid)
    ignore_supervisor_signals()
    name_process(manifest.role, manifest.index)
    pin(manifest.cpus)
    for inherited in manifest.fds.values():
        os.set_inheritable(inherited, False)
    return manifest


def die_with_parent(parent_pid: int) -> None:
    """Be killed when the parent dies. Raises StartupError if it died before this took effect.

    The kernel ties this to the thread that forked us, so the parent must fork from its main thread; fork
    clears it in the child, exec keeps it.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        raise StartupError("the parent process ended during start-up")


def ignore_supervisor_signals() -> None:
    """Leave SIGINT, SIGTERM, SIGHUP and SIGUSR2 to the supervisor: a terminal sends them to every process."""
    for number in SUPERVISOR_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SUPERVISOR_SIGNALS)


def name_process(role: Role, index: int) -> None:
    """Set the name that ``ps`` and ``top`` show, such as ``meshd:io0``."""
    suffix = "" if role in (Role.CONTROLLER, Role.SUPERVISOR) else str(index)
    name = ctypes.create_string_buffer(f"meshd:{_SHORT_NAMES[role]}{suffix}".encode()[:15])
    _prctl(_PR_SET_NAME, ctypes.addressof(name))


def pin(cpus: Iterable[int]) -> None:
    """Run on these CPUs alone; a set that the kernel refuses (a cpuset shrank) leaves it unpinned."""
    wanted = set(cpus)
    if wanted:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, wanted)


def _prctl(option: int, argument: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(argument), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}): {os.strerror(number)}")
