"""The leader's side of a prepare group: forks the workers of its seats, watches and replaces them.

A seat goes round like this; ``adopted`` is a worker that a dead leader of the same seats left behind::

    vacant ──fork──> held ──death──> settled ──(at once, or after the back-off)──> vacant
    adopted ──retired, exits──┘

*Settling* is what makes a death visible: the board row is closed, every descriptor that the worker had
claimed is answered DIED on its behalf, and all I/O processes are rung. Nobody but the leader does it, and
only after the worker is certainly gone, so each ring still has one producer at a time. A leader killed while
settling loses nothing: its successor goes on at the shared counters.

A new leader asks adopted workers to leave when it is ready to replace them. One that runs a job may end it,
until 5 s past the job's deadline; an idle one has 2 s. The supervisor inherits and reaps them; their seat is
taken over when the row shows it, or after a second.

Killed and replaced: a worker whose job is 5 s past its deadline, and an idle one without heartbeat for 10 s.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from meshd.control import HEARTBEAT_LIMIT_NS, BoardRow, ProcessBoard, Role, State, Topology, name_process, pin
from meshd.memory import Segment
from meshd.prepare.layout import RingsLayout, open_layout
from meshd.prepare.ring import WorkerEnd

_SECOND: Final = 1_000_000_000
_OVERTIME_NS: Final = 5 * _SECOND
_IDLE_LEAVE_NS: Final = 2 * _SECOND
_REAP_WAIT_NS: Final = _SECOND
_QUIT_NS: Final = _SECOND // 10  # an idle worker leaves in far less
_WATCH_MS: Final = 100  # how often deadlines and heartbeats are looked at
_START_MS: Final = 5  # the same until all workers are ready, and while anything is due


class Link(Protocol):
    """The leader's connection to the supervisor; ``control.ChildLink`` is one."""

    is_closed: bool

    def ready(self) -> None: ...
    def recv(self) -> list[dict[str, object]]: ...
    def fileno(self) -> int: ...


class Backoff:
    """When a dead worker may be replaced: at once, unless 5 died within 10 s; then after 1 s, 2 s … 30 s.

    A minute without a death resets it.
    """

    def __init__(self) -> None:
        self._deaths: deque[int] = deque(maxlen=5)
        self._delay_ns = 0

    def died(self, now_ns: int) -> int:
        """Count a death; return the nanoseconds to wait before the replacement."""
        if self._deaths and now_ns - self._deaths[-1] > 60 * _SECOND:
            self._deaths.clear()
            self._delay_ns = 0
        self._deaths.append(now_ns)
        if self._delay_ns:
            self._delay_ns = min(2 * self._delay_ns, 30 * _SECOND)
        elif len(self._deaths) == 5 and now_ns - self._deaths[0] <= 10 * _SECOND:
            self._delay_ns = _SECOND
        return self._delay_ns


class _Seat:
    """One prepare seat of the group."""

    __slots__ = (
        "cpus",
        "fork_at_ns",
        "gone_at_ns",
        "is_child",
        "is_killed",
        "kill_at_ns",
        "number",
        "pid",
        "pidfd",
        "row",
    )

    def __init__(self, number: int, row: BoardRow, cpus: tuple[int, ...]) -> None:
        self.number = number
        self.row = row
        self.cpus = cpus
        self.pid = 0
        self.pidfd = -1
        self.is_child = False
        self.is_killed = False
        self.fork_at_ns = 0
        self.kill_at_ns = 0  # asked to leave: patience ends here; 0 if not asked
        self.gone_at_ns = 0  # adopted and dead since, waits for the supervisor to reap it

    def __repr__(self) -> str:
        return f"_Seat({self.number}, pid={self.pid}, child={self.is_child}, {self.row!r})"


class PrepareGroup:
    """Keeps one worker alive in each of ``seats``. Built and run by a leader: one thread, no event loop.

    ``cpus``: by position in ``seats``; missing or empty: not pinned. ``io_bells`` and ``bells``: by I/O seat
    and by prepare seat. ``run_worker`` runs in the forked child with its seat and returns when the worker
    has left. ``report``: event name and fields for the log. ``on_message`` gets what the supervisor says
    beyond drain and quit. ``row``: the leader's own.
    """

    def __init__(
        self,
        topology: Topology,
        seats: Sequence[int],
        cpus: Sequence[tuple[int, ...]],
        rings: Segment,
        board: ProcessBoard,
        row: BoardRow,
        io_bells: Sequence[int],
        bells: Sequence[int],
        link: Link,
        run_worker: Callable[[int], None],
        report: Callable[..., None],
        on_message: Callable[[dict[str, object]], None],
        clock: Callable[[], int],
    ) -> None:
        self._layout: RingsLayout = open_layout(rings, topology.io_seats, topology.prepare_seats)
        self._rings = rings
        self._row = row
        self._on_message = on_message
        self._turn_ns = self._awake_since_ns = clock()
        self._io_bells = io_bells
        self._bells = bells
        self._link = link
        self._run_worker = run_worker
        self._report = report
        self._clock = clock
        self._backoff = Backoff()
        self._poller = select.epoll()
        self._is_ready = False
        self._drain_until_ns = 0
        self._seats = [
            _Seat(number, board.row(topology.board_prepare(number)), cpus[place] if place < len(cpus) else ())
            for place, number in enumerate(seats)
        ]

    def adopt(self) -> None:
        """Find what a dead leader left in these seats. Call it first: jobs of workers that died may wait."""
        for seat in self._seats:
            pid = seat.row.pid
            pidfd = _open_worker(pid, seat.number) if pid else None
            if pidfd is not None:
                seat.pid, seat.pidfd = pid, pidfd
                self._poller.register(pidfd, select.EPOLLIN)
            else:
                self._settle(seat)

    def run(self) -> None:
        """Fork, watch, replace, until the supervisor says drain or quit or is gone."""
        now_ns = self._clock()
        self._poller.register(self._link.fileno(), select.EPOLLIN)
        for seat in self._seats:
            if seat.pid:
                self._ask_to_leave(seat, now_ns, _IDLE_LEAVE_NS)
        while not (self._drain_until_ns and all(seat.pid == 0 for seat in self._seats)):
            now_ns = self._start_turn()
            self._fill_vacant(now_ns)
            self._say_ready()
            is_busy = not self._is_ready or any(seat.kill_at_ns or seat.gone_at_ns for seat in self._seats)
            timeout_ms = _START_MS if is_busy else _WATCH_MS
            ended = {fd for fd, _ in self._poller.poll(timeout_ms / 1000)}
            now_ns = self._clock()
            if self._link.fileno() in ended:
                self._hear(now_ns)
            for seat in self._seats:
                if seat.pidfd in ended:
                    self._on_exit(seat, now_ns)
                elif seat.gone_at_ns and (
                    seat.row.pid != seat.pid or now_ns - seat.gone_at_ns > _REAP_WAIT_NS
                ):
                    self._vacate(seat, now_ns, 0)
                elif seat.pidfd >= 0:
                    self._watch(seat, now_ns)

    def _start_turn(self) -> int:
        now_ns = self._clock()
        if now_ns - self._turn_ns > _SECOND:
            self._awake_since_ns = now_ns
        self._turn_ns = now_ns
        self._row.beat(now_ns)
        return now_ns

    # --- life ---

    def _fill_vacant(self, now_ns: int) -> None:
        for seat in self._seats:
            if seat.pid == 0 and now_ns >= seat.fork_at_ns and not self._drain_until_ns:
                self._fork(seat, now_ns)

    def _fork(self, seat: _Seat, now_ns: int) -> None:
        if len(os.listdir("/proc/self/task")) != 1:
            raise RuntimeError("a leader must not have threads when it forks")
        self._rings.words[self._layout.retire_word(seat.number)] = 0
        leader_pid = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:  # a limit on processes or memory: no worker is better than no leader
            seat.fork_at_ns = now_ns + max(self._backoff.died(now_ns), _SECOND)
            self._report("prepare_worker_not_forked", seat=seat.number, error=str(error))
            return
        if pid == 0:
            self._become_worker(seat, leader_pid)
        seat.pid, seat.is_child, seat.kill_at_ns = pid, True, 0
        seat.pidfd = os.pidfd_open(pid)
        seat.row.open(Role.PREPARE, seat.number, pid, ",".join(map(str, seat.cpus)), leader_pid)
        self._poller.register(seat.pidfd, select.EPOLLIN)

    def _become_worker(self, seat: _Seat, leader_pid: int) -> None:
        """Never returns. The link is closed first: kept open, it would hide the leader's death."""
        code = 1
        try:
            self._poller.close()
            os.close(self._link.fileno())
            for other in self._seats:
                if other.pidfd >= 0:
                    os.close(other.pidfd)
            name_process(Role.PREPARE, seat.number)
            pin(seat.cpus)
            if _wait_for_row(seat.row, leader_pid):
                self._run_worker(seat.number)
                code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)

    def _on_exit(self, seat: _Seat, now_ns: int) -> None:
        self._poller.unregister(seat.pidfd)
        os.close(seat.pidfd)
        seat.pidfd = -1
        if not seat.is_child:
            seat.gone_at_ns = now_ns
            return
        _, status = os.waitpid(seat.pid, 0)
        is_orderly = status == 0 and seat.kill_at_ns != 0
        if not is_orderly:
            code = os.waitstatus_to_exitcode(status)
            self._report("prepare_worker_died", seat=seat.number, pid=seat.pid, exit=code)
        self._vacate(seat, now_ns, 0 if is_orderly else self._backoff.died(now_ns))

    def _vacate(self, seat: _Seat, now_ns: int, delay_ns: int) -> None:
        if seat.row.pid == seat.pid:
            seat.row.close()
        seat.pid = seat.gone_at_ns = seat.kill_at_ns = 0
        seat.is_child = seat.is_killed = False
        seat.fork_at_ns = now_ns + delay_ns
        self._settle(seat)

    def _settle(self, seat: _Seat) -> None:
        """Answer for a dead worker. The row is closed before: whoever sees DIED then finds the seat GONE."""
        if seat.row.is_alive:
            seat.row.close()
        now_ns = self._clock()
        for io_seat, bell in enumerate(self._io_bells):
            WorkerEnd(self._rings, self._layout.pair(io_seat, seat.number)).settle(now_ns)
            os.eventfd_write(bell, 1)

    # --- watching ---

    def _watch(self, seat: _Seat, now_ns: int) -> None:
        row = seat.row
        deadline_ns = row.job_deadline_ns
        if deadline_ns:
            is_hung = now_ns > deadline_ns + _OVERTIME_NS
        else:
            # The silence of a worker that was frozen together with us is held against nobody.
            is_hung = now_ns > max(row.heartbeat_ns, self._awake_since_ns) + HEARTBEAT_LIMIT_NS
            is_hung |= bool(seat.kill_at_ns) and now_ns > seat.kill_at_ns
        is_overdue = self._drain_until_ns != 0 and now_ns > self._drain_until_ns
        if (is_hung or is_overdue) and not seat.is_killed:
            seat.is_killed = True
            self._report("prepare_worker_killed", seat=seat.number, pid=seat.pid)
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(seat.pidfd, signal.SIGKILL)

    def _ask_to_leave(self, seat: _Seat, now_ns: int, patience_ns: int) -> None:
        seat.kill_at_ns = now_ns + patience_ns
        self._rings.words[self._layout.retire_word(seat.number)] = seat.pid
        os.eventfd_write(self._bells[seat.number], 1)

    def _say_ready(self) -> None:
        if not self._is_ready and all(s.is_child and s.row.state is State.READY for s in self._seats):
            self._is_ready = True
            self._link.ready()

    def _hear(self, now_ns: int) -> None:
        for message in self._link.recv():
            if message.get("t") == "quit":
                self._drain(now_ns, _QUIT_NS)
            elif message.get("t") == "drain":
                self._drain(now_ns, _OVERTIME_NS)
            else:
                self._on_message(message)
        if self._link.is_closed:
            self._poller.unregister(self._link.fileno())
            self._drain(now_ns, _OVERTIME_NS)

    def _drain(self, now_ns: int, patience_ns: int) -> None:
        self._drain_until_ns = now_ns + patience_ns
        for seat in self._seats:
            if seat.pidfd >= 0:
                self._ask_to_leave(seat, now_ns, patience_ns)


def _open_worker(pid: int, number: int) -> int | None:
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
    return bool(select.select([pidfd], [], [], 0)[0])


def _wait_for_row(row: BoardRow, leader_pid: int) -> bool:
    """Wait until the leader has entered us on the board; False if it died before that."""
    while row.pid != os.getpid():
        if os.getppid() != leader_pid:
            return False
        select.select([], [], [], 0.001)
    return True
