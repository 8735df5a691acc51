"""The process board: one shared segment with one row a seat, and a few words for the whole node.

A seat is a place for one process; a successor of a dead process takes the same seat. Its life on the board::

    EMPTY ──spawn──> STARTING ──ready()──> READY ──drain──> DRAINING
                        └────────────────────┴──────────────────┴──death──> GONE ──spawn──> STARTING

``epoch`` counts the deaths in a seat and is written last, so whoever lent something to a seat keeps the epoch
beside it: another value means that borrower is dead, whatever the row says now.

Layout of the board (bytes; every word is an aligned u64 with one writer)::

       0  segment header                                                  memory.py
      64  node words of the supervisor    is_draining, supervisor_pid, started_ns, listen_port
     128  node words of the controller    prepare_failed
     256  row 0, row 1, … 256 bytes each
          +0    role, index, pid, epoch, started_ns, restarts, leader_pid, restart_at_ns   who reaps the seat
          +64   state, heartbeat_ns, busy, job_deadline_ns, 4 free words          the process itself
          +128  CPU list as ASCII, NUL padded, 64 bytes                         who reaps the seat
          +192  unused

"Who reaps the seat" is the supervisor, and for PREPARE seats the leader that forked the worker; when that
leader is dead the supervisor inherits and reaps its orphans. The reaper also writes ``state`` while no
process lives in the seat (STARTING, GONE). Readers rely on x86-64 keeping stores in program order.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from enum import IntEnum, StrEnum
from typing import Any, Final, overload

from meshd.memory import Segment

BOARD_KIND: Final = "board"
BOARD_VERSION: Final = 2
HEARTBEAT_LIMIT_NS: Final = 10_000_000_000  # an older heartbeat means hung: killed and replaced

_NODE_BYTES: Final = 256
_ROW_BYTES: Final = 256
_CPUS_OFFSET: Final = 128
_CPUS_BYTES: Final = 64


class Role(StrEnum):
    """What a process is for."""

    SUPERVISOR = "supervisor"
    IO = "io"
    LEADER = "leader"
    PREPARE = "prepare"
    CONTROLLER = "controller"
    BACKEND = "backend"


_ROLES: Final = tuple(Role)  # the role word is the position plus one; 0 is an unused seat


class State(IntEnum):
    """Where the process of a seat is in its life."""

    EMPTY = 0
    STARTING = 1
    READY = 2
    DRAINING = 3
    GONE = 4


class _Word:
    """One u64 of a row or of the node area, as an attribute."""

    __slots__ = ("offset",)

    def __init__(self, byte_offset: int) -> None:
        self.offset = byte_offset // 8

    @overload
    def __get__(self, owner: None, kind: type[Any]) -> _Word: ...
    @overload
    def __get__(self, owner: _Words, kind: type[Any]) -> int: ...
    def __get__(self, owner: _Words | None, kind: type[Any]) -> int | _Word:
        return self if owner is None else owner.words[owner.base + self.offset]

    def __set__(self, owner: _Words, value: int) -> None:
        owner.words[owner.base + self.offset] = value


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
    restart_at_ns = _Word(56)  # while nobody lives here: when the back-off ends; 0 for none
    heartbeat_ns = _Word(72)
    busy = _Word(80)  # PREPARE: not 0 while a job runs
    job_deadline_ns = _Word(88)  # PREPARE: CLOCK_MONOTONIC deadline of the running job, 0 for none
    _role = _Word(0)
    _state = _Word(64)

    def __init__(self, segment: Segment, seat: int) -> None:
        super().__init__(segment.words, (_NODE_BYTES + seat * _ROW_BYTES) // 8)
        self.seat = seat
        start = _NODE_BYTES + seat * _ROW_BYTES + _CPUS_OFFSET
        self._bytes = segment.bytes[start : start + _CPUS_BYTES]

    @property
    def busy_word(self) -> int:
        """Return which of ``words`` is ``busy``: to read it so costs a quarter of the attribute."""
        return self.base + BoardRow.busy.offset

    @property
    def job_deadline_word(self) -> int:
        return self.base + BoardRow.job_deadline_ns.offset

    @property
    def heartbeat_word(self) -> int:
        return self.base + BoardRow.heartbeat_ns.offset

    @property
    def epoch_word(self) -> int:
        return self.base + BoardRow.epoch.offset

    @property
    def state_word(self) -> int:
        return self.base + BoardRow._state.offset

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

    def open(
        self, role: Role, index: int, pid: int, cpus: str, leader_pid: int = 0, *, is_restart: bool = True
    ) -> None:
        """Enter a new process (the reaper of the seat, right after the spawn or fork).

        ``is_restart``: it stands in for one that died here; not so after an orderly replacement.
        """
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
        self.restart_at_ns = 0
        if self._state == State.GONE and is_restart:
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
    supervisor_pid = _Word(72)  # supervisor
    started_ns = _Word(80)  # supervisor
    listen_port = _Word(88)  # supervisor: of the traffic listener
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
