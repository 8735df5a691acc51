"""The leader's side of a prepare group: forks the workers of its places, watches and replaces them.

A place is one worker's, and has two seats, so that a new worker can be ready before the old one leaves. A
seat goes round like this; ``adopted`` is a worker that another leader of the same group has left behind::

    vacant ──fork──> held ──death──> settled ──(at once, or after the back-off)──> vacant
    adopted ──retired, exits──┘

*Settling* is what makes a death visible: the board row is closed, every descriptor that the worker had
claimed is answered DIED on its behalf, and all I/O processes are rung. Nobody but the leader does it, and
only after the worker is certainly gone, so each ring still has one producer at a time. A leader killed while
settling loses nothing: its successor goes on at the shared counters.

An adopted worker is outdated, and so are all after ``renew``: what they were forked with is not in force any
more. They are replaced one at a time, idle ones first: the successor is forked into the other seat of the
place, and when it is ready the old worker is asked to leave. One that runs a job ends it, until 5 s past the
job's deadline; an idle one has 2 s. So there is never a worker less, and no request waits for a fork.
The supervisor inherits and reaps adopted workers; their seat is taken over when the row shows it, or after a
second.

Killed and replaced: a worker whose job is 5 s past its deadline, and an idle one without heartbeat for 10 s.

``turn`` is all of this, once, without waiting: a leader that is busy loading calls it from a timer, so that
its workers are looked after meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Protocol

from meshd.control import HEARTBEAT_LIMIT_NS, BoardRow, ProcessBoard, Role, State, Topology, name_process, pin
from meshd.memory import Segment
from meshd.prepare.layout import RingsLayout, open_layout
from meshd.prepare.places import Backoff, Place, Seat, open_worker, wait_for_row
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


class PrepareGroup:
    """Keeps one worker alive in each of its places. Built and run by a leader: one thread, no event loop.

    ``seats``: the first seat of each place. ``cpus``: by place; missing or empty: not pinned. ``io_bells``
    and ``bells``: by I/O seat and by prepare seat. ``run_worker`` runs in the forked child with its seat and
    returns when the worker has left. ``report``: event name and fields for the log. ``on_message`` gets what
    the supervisor says beyond drain, quit and hand_over. ``row``: the leader's own. ``on_renewed``: called
    each time that all workers are ready and none is outdated, before the supervisor hears of it.
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
        on_renewed: Callable[[], None] = lambda: None,
    ) -> None:
        self._layout: RingsLayout = open_layout(rings, topology.io_seats, topology.prepare_seats)
        self._rings = rings
        self._row = row
        self._on_message = on_message
        self._on_renewed = on_renewed
        self._turn_ns = self._awake_since_ns = clock()
        self._io_bells = io_bells
        self._bells = bells
        self._link = link
        self._run_worker = run_worker
        self._report = report
        self._clock = clock
        self._backoff = Backoff()
        self._poller = select.epoll()
        self._poller.register(link.fileno(), select.EPOLLIN)
        self._version = 0  # 0: nothing to fork with yet
        self._is_renewed = False
        self._is_ready = False
        self._has_handed_over = False
        self._drain_until_ns = 0
        spare = topology.prepare_workers
        self._places = [
            Place(
                (self._seat(number, topology, board), self._seat(number + spare, topology, board)),
                cpus[position] if position < len(cpus) else (),
            )
            for position, number in enumerate(seats)
        ]
        self._seats = [seat for place in self._places for seat in place.seats]

    def _seat(self, number: int, topology: Topology, board: ProcessBoard) -> Seat:
        pairs = [self._layout.pair(io_seat, number) for io_seat in range(topology.io_seats)]
        return Seat(
            number,
            board.row(topology.board_prepare(number)),
            [(pair.tail_word, pair.head_word) for pair in pairs],
        )

    def adopt(self) -> None:
        """Find what another leader left in these seats. Call it first: jobs of workers that died may wait."""
        for place in self._places:
            for seat in place.seats:
                pid = seat.row.pid
                pidfd = open_worker(pid, seat.number) if pid else None
                if pidfd is not None:
                    seat.pid, seat.pidfd = pid, pidfd
                    self._poller.register(pidfd, select.EPOLLIN)
                else:
                    place.died |= pid != 0 or seat.row.restart_at_ns != 0
                    self._settle(seat)

    def renew(self) -> None:
        """Fork workers from now on, and replace those that were forked before."""
        self._version += 1
        self._is_renewed = False

    def run(self, between_turns: Callable[[], None] = lambda: None) -> None:
        """Fork, watch, replace, until ``is_over``. ``between_turns`` may take long if it calls ``turn``."""
        while not self.is_over:
            self.turn(_WATCH_MS if self._is_renewed and not self._is_anyone_leaving() else _START_MS)
            between_turns()

    @property
    def is_over(self) -> bool:
        """Whether the supervisor has said drain or quit, or is gone, and all workers have left.

        Or another leader has their workers now.
        """
        return self._has_handed_over or (self._drain_until_ns != 0 and not any(s.pid for s in self._seats))

    def turn(self, timeout_ms: int = 0) -> None:
        """Do what is due, then wait for something to happen, ``timeout_ms`` at most, and take note of it."""
        now_ns = self._start_turn()
        if self._version and not self._drain_until_ns:
            self._fill_vacant(now_ns)
            self._renew_next(now_ns)
            self._note_renewed()
            self._answer_stragglers()
        ended = {fd for fd, _ in self._poller.poll(timeout_ms / 1000)}
        now_ns = self._clock()
        if self._link.fileno() in ended:
            self._hear(now_ns)
        for seat, place in self._held():
            if seat.pidfd in ended:
                self._on_exit(seat, place, now_ns)
            elif seat.gone_at_ns and (seat.row.pid != seat.pid or now_ns - seat.gone_at_ns > _REAP_WAIT_NS):
                self._vacate(seat, place, now_ns, 0)
            elif seat.pidfd >= 0:
                self._watch(seat, now_ns)

    def _start_turn(self) -> int:
        now_ns = self._clock()
        if now_ns - self._turn_ns > _SECOND:
            self._awake_since_ns = now_ns
        self._turn_ns = now_ns
        self._row.beat(now_ns)
        return now_ns

    def _held(self) -> Iterator[tuple[Seat, Place]]:
        return ((seat, place) for place in self._places for seat in place.held)

    def _is_anyone_leaving(self) -> bool:
        return any(seat.kill_at_ns or seat.gone_at_ns for seat in self._seats)

    # --- life ---

    def _fill_vacant(self, now_ns: int) -> None:
        for place in self._places:
            if not place.held and now_ns >= place.fork_at_ns:
                self._fork(place, place.latest, now_ns)

    def _renew_next(self, now_ns: int) -> None:
        """Go on with the place that is being renewed, or begin the next, if any."""
        if self._is_renewed:
            return
        begun: list[Place] = []
        outdated: list[Place] = []
        for place in self._places:
            old = [seat for seat in place.held if seat.version != self._version]
            if old:
                (begun if len(place.held) > 1 or old[0].kill_at_ns else outdated).append(place)
        if begun:
            self._make_room(begun[0], now_ns)
        elif outdated:
            place = min(outdated, key=lambda each: each.held[0].row.busy)
            vacant = place.vacant
            if vacant is not None and now_ns >= place.fork_at_ns:
                self._fork(place, vacant, now_ns)

    def _make_room(self, place: Place, now_ns: int) -> None:
        """Ask the old worker to leave once the new one is ready. Of two old ones, the first goes at once."""
        old = [seat for seat in place.held if seat.version != self._version]
        new = [seat for seat in place.held if seat.version == self._version]
        if not any(seat.kill_at_ns for seat in old) and (not new or new[0].row.state is State.READY):
            self._ask_to_leave(old[0], now_ns, _IDLE_LEAVE_NS)

    def _note_renewed(self) -> None:
        if self._is_renewed:
            return
        held = [seat for seat, _ in self._held()]
        is_current = all(seat.version == self._version and seat.row.state is State.READY for seat in held)
        if is_current and len(held) == len(self._places):
            self._is_renewed = True
            self._on_renewed()
            if not self._is_ready:
                self._is_ready = True
                self._link.ready()

    def _fork(self, place: Place, seat: Seat, now_ns: int) -> None:
        if len(os.listdir("/proc/self/task")) != 1:
            raise RuntimeError("a leader must not have threads when it forks")
        self._rings.words[self._layout.retire_word(seat.number)] = 0
        leader_pid = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:  # a limit on processes or memory: no worker is better than no leader
            place.fork_at_ns = seat.row.restart_at_ns = now_ns + max(self._backoff.died(now_ns), _SECOND)
            self._report("prepare_worker_not_forked", seat=seat.number, error=str(error))
            return
        if pid == 0:
            self._become_worker(seat, place, leader_pid)
        for each in place.seats:
            each.row.restart_at_ns = 0
        seat.pid, seat.is_child, seat.kill_at_ns, seat.version = pid, True, 0, self._version
        seat.pidfd = os.pidfd_open(pid)
        cpus = ",".join(map(str, place.cpus))
        seat.row.open(Role.PREPARE, seat.number, pid, cpus, leader_pid, is_restart=place.died)
        place.died = False
        self._poller.register(seat.pidfd, select.EPOLLIN)

    def _become_worker(self, seat: Seat, place: Place, leader_pid: int) -> None:
        """Never returns. The link is closed first: kept open, it would hide the leader's death."""
        code = 1
        try:
            self._poller.close()
            os.close(self._link.fileno())
            for other in self._seats:
                if other.pidfd >= 0:
                    os.close(other.pidfd)
            name_process(Role.PREPARE, seat.number)
            pin(place.cpus)
            if wait_for_row(seat.row, leader_pid):
                self._run_worker(seat.number)
                code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)

    def _on_exit(self, seat: Seat, place: Place, now_ns: int) -> None:
        self._poller.unregister(seat.pidfd)
        os.close(seat.pidfd)
        seat.pidfd = -1
        if not seat.is_child:
            seat.gone_at_ns = now_ns
            return
        _, status = os.waitpid(seat.pid, 0)
        is_orderly = status == 0 and seat.kill_at_ns != 0
        delay_ns = 0
        if not is_orderly:
            place.died = len(place.held) == 1  # else its successor is here, and the next fork is no restart
            code = os.waitstatus_to_exitcode(status)
            delay_ns = self._backoff.died(now_ns)
            died = {"seat": seat.number, "pid": seat.pid, "exit": code, "next_start_s": delay_ns / _SECOND}
            self._report("prepare_worker_died", **died)
        self._vacate(seat, place, now_ns, delay_ns)

    def _vacate(self, seat: Seat, place: Place, now_ns: int, delay_ns: int) -> None:
        if seat.row.pid == seat.pid:
            seat.row.close()
        seat.pid = seat.gone_at_ns = seat.kill_at_ns = 0
        seat.is_child = seat.is_killed = False
        place.fork_at_ns = now_ns + delay_ns
        if delay_ns:
            seat.row.restart_at_ns = place.fork_at_ns
        self._settle(seat)

    def _settle(self, seat: Seat) -> None:
        """Answer for a dead worker. The row is closed before: whoever sees DIED then finds the seat GONE.

        What it had not claimed never ran, and goes to another worker at once.
        """
        if seat.row.is_alive:
            seat.row.close()
        now_ns = self._clock()
        for io_seat, bell in enumerate(self._io_bells):
            end = WorkerEnd(self._rings, self._layout.pair(io_seat, seat.number))
            end.settle(now_ns)
            end.skip_all(now_ns)
            os.eventfd_write(bell, 1)

    def _answer_stragglers(self) -> None:
        """Answer what was pushed to a worker that had left by then: no one may come to that seat for long.

        The I/O process takes the job back by itself, but needs this to know that nobody reads its body.
        """
        words = self._rings.words
        for seat in self._seats:
            if not seat.pid:
                for io_seat, (tail_word, head_word) in enumerate(seat.ends):
                    if words[tail_word] != words[head_word]:
                        pair = self._layout.pair(io_seat, seat.number)
                        WorkerEnd(self._rings, pair).skip_all(self._clock())
                        os.eventfd_write(self._io_bells[io_seat], 1)

    def reopen_logs(self) -> None:
        """Ask all workers to reopen their log files; each does before its next job."""
        for seat, _ in self._held():
            self._rings.words[self._layout.log_turn_word(seat.number)] += 1
            os.eventfd_write(self._bells[seat.number], 1)

    # --- watching ---

    def _watch(self, seat: Seat, now_ns: int) -> None:
        row = seat.row
        deadline_ns = row.job_deadline_ns
        if deadline_ns:
            is_hung = now_ns > deadline_ns + _OVERTIME_NS
            if seat.kill_at_ns:  # its time to leave starts when the job has ended
                seat.kill_at_ns = max(seat.kill_at_ns, now_ns + _IDLE_LEAVE_NS)
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

    def _ask_to_leave(self, seat: Seat, now_ns: int, patience_ns: int) -> None:
        seat.kill_at_ns = now_ns + patience_ns
        self._rings.words[self._layout.retire_word(seat.number)] = seat.pid
        os.eventfd_write(self._bells[seat.number], 1)

    def _hear(self, now_ns: int) -> None:
        for message in self._link.recv():
            if message.get("t") == "quit":
                self._drain(now_ns, _QUIT_NS)
            elif message.get("t") == "drain":
                self._drain(now_ns, _OVERTIME_NS)
            elif message.get("t") == "hand_over":
                self._has_handed_over = True
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
