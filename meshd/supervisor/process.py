"""The supervisor's loop: one poll over signals and links, then bring the node to where it should be.

No event loop, no thread, no request: whatever happens to the traffic, this process stays able to replace what
broke. Everything it learns arrives as a readable descriptor or as a time that has come; each turn looks at
all of it again and repairs the differences, so no event has to be remembered.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Callable, Mapping
from typing import Final

from meshd.config import Settings
from meshd.config.sources import LoadResult
from meshd.control import Role, State, name_process, pin
from meshd.cpus import format_cpu_list
from meshd.log import Log
from meshd.supervisor.child import Child, Duty
from meshd.supervisor.children import Children
from meshd.supervisor.greeting import demo_text, listening_urls
from meshd.supervisor.node import Node, build_node
from meshd.supervisor.notify import Notifier
from meshd.supervisor.orphans import Orphans, become_subreaper
from meshd.supervisor.patience import choose_patience
from meshd.supervisor.reload import ConfigurationReload
from meshd.supervisor.renewal import Renewal
from meshd.supervisor.shutdown import Act, Patience, Phase, Shutdown
from meshd.supervisor.signals import SignalInbox

_SECOND: Final = 1_000_000_000
_TICK_NS: Final = _SECOND  # heartbeats and orphans are looked at this often
_BOOT_TICK_NS: Final = _SECOND // 50  # prepare workers become ready on the board alone, which wakes nobody
_OVERSLEPT_NS: Final = 3 * _SECOND  # a turn that late means that we were stopped, and probably all others too
_BOOTS: Final = 3  # failed boots in a row at start that end the node
_CANNOT_BOOT: Final = 3  # exit code
_LEAST_BOOTING: Final = 2  # successors that boot at once; above 8 CPUs a quarter of them, for traffic goes on


def run(
    settings: Settings,
    sources: Mapping[str, str],
    notify_socket: str | None = None,
    watchdog_usec: int = 0,
    reload: Callable[[], LoadResult] | None = None,
) -> int:
    """Run a node until it is told to end; return the exit code.

    ``notify_socket``, ``watchdog_usec``: the service manager's ``$NOTIFY_SOCKET`` and ``$WATCHDOG_USEC``.
    ``reload``: reads the configuration again from all its places. Raises StartupError before any child runs.
    """
    log = Log("supervisor", settings.log_level, settings.json_log, log_dir=settings.log_dir)
    _raise_descriptor_limit()
    node = build_node(settings, sources)
    for warning in node.warnings:
        log.warning("start", message=warning)
    pin(node.plan.cpus)
    notifier = Notifier(notify_socket, watchdog_usec)
    return supervise(
        node, log, notifier, ConfigurationReload(settings, reload, log), choose_patience(settings, sources)
    )


def supervise(
    node: Node, log: Log, notifier: Notifier, reload: ConfigurationReload, patience: Callable[[int], Patience]
) -> int:
    """Turn this process into the supervisor of a node until the node has ended; return the exit code."""
    name_process(Role.SUPERVISOR, 0)
    become_subreaper()
    inbox = SignalInbox()
    try:
        return Supervisor(node, log, inbox, notifier, reload, patience).run()
    finally:
        inbox.close()
        log.close()


class Supervisor:
    """One running node."""

    def __init__(
        self,
        node: Node,
        log: Log,
        inbox: SignalInbox,
        notifier: Notifier,
        reload: ConfigurationReload,
        patience: Callable[[int], Patience],
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._node = node
        self._log = log
        self._inbox = inbox
        self._notifier = notifier
        self._reload = reload
        self._patience = patience
        self._clock = clock
        self._board = node.memory.board
        self._orphans = Orphans(self._board, node.topology)
        self._children = Children(
            node.specs, self._board, node.topology, node.settings.to_dict(), self._orphans, log,
            node.memory.ring_all, clock,
        )  # fmt: skip
        self._renewal = Renewal(
            self._children, (*node.specs, *node.spares), reload.running, node.complete,
            max(_LEAST_BOOTING, len(node.plan.io_cpus) // 4), log, clock,
        )  # fmt: skip
        self._is_reload_open = False  # the service manager was told of a reload that has not ended
        self._shutdown = Shutdown()
        self._was_ready = False
        self._exit_code = 0
        self._turn_ns = self._awake_since_ns = clock()
        self._row = self._board.row(node.topology.board_supervisor)

    def run(self) -> int:
        """Turn until the node has ended."""
        self._enter_on_board()
        self._notifier.status("starting")
        self._children.start_due(self._is_wanted)
        try:
            while self._shutdown.phase is not Phase.ENDED:
                self._turn()
            self._log.info("ended", exit_code=self._exit_code)
            return self._exit_code
        finally:
            for child in self._children.living:  # only after a fault of our own
                child.kill()

    def _enter_on_board(self) -> None:
        cpus = format_cpu_list(self._node.plan.io_cpus)
        self._row.open(Role.SUPERVISOR, 0, os.getpid(), cpus)
        self._board.supervisor_pid = os.getpid()
        self._board.started_ns = self._clock()
        self._board.listen_port = self._node.topology.listen_port

    # ------------------------------------------------------------------------------------------- a turn

    def _turn(self) -> None:
        self._wait()
        now_ns = self._clock()
        if now_ns - self._turn_ns > _OVERSLEPT_NS:
            self._awake_since_ns = now_ns
        self._turn_ns = now_ns
        self._row.beat(now_ns)
        for number in self._inbox.take():
            self._take_signal(number)
        for child in self._children.living:
            self._children.receive(child)
        self._children.reap(is_ending=self._shutdown.phase not in (Phase.RUNNING, Phase.LINGERING))
        self._give_up_on_failed_boots()
        self._children.kill_hung(self._awake_since_ns)
        self._orphans.kill_hung(now_ns, self._awake_since_ns)
        self._advance_renewal(now_ns)
        self._advance_shutdown()
        self._children.start_due(self._is_wanted)
        self._let_traffic_in()
        self._announce_ready()
        self._notifier.watchdog(now_ns)

    def _wait(self) -> None:
        """Sleep until a signal or message comes or the next time is due."""
        poll = select.poll()
        poll.register(self._inbox, select.POLLIN)
        for child in self._children.living:
            if child.link is not None:
                poll.register(child.link, select.POLLIN)
        now_ns = self._clock()
        poll.poll(max(0, self._next_due_ns(now_ns) - now_ns) / 1e6)

    def _next_due_ns(self, now_ns: int) -> int:
        due = [now_ns + (_TICK_NS if self._was_ready else _BOOT_TICK_NS)]
        due += [at_ns for at_ns in (self._shutdown.deadline_ns, self._notifier.next_ns) if at_ns is not None]
        due += [
            child.next_start_ns
            for child in self._children.all
            if not child.is_alive and self._is_wanted(child)
        ]
        return min(due)

    # ------------------------------------------------------------------------------------------- targets

    def _is_wanted(self, child: Child) -> bool:
        """Say whether this seat should hold a process now."""
        if child.duty is not Duty.SERVING or child.predecessor is not None:
            return False
        phase = self._shutdown.phase
        is_wanted = phase in (Phase.RUNNING, Phase.LINGERING)
        return is_wanted or (phase is Phase.DRAINING and child.spec.role is not Role.IO)

    def _let_traffic_in(self) -> None:
        """At start, traffic waits in the listen queues until there is a registry and a prepare worker."""
        if self._children.is_traffic_held and self._shutdown.phase is Phase.RUNNING:
            others = (child for child in self._children.all if child.spec.role is not Role.IO)
            if all(other.is_ready for other in others):
                self._children.let_traffic_in()

    def _give_up_on_failed_boots(self) -> None:
        if self._was_ready or self._shutdown.phase is not Phase.RUNNING:
            return
        for child in self._children.all:
            if child.failed_boots >= _BOOTS:
                self._log.error(
                    "start_failed",
                    message=f"{child.spec.role} {child.spec.index} could not start {_BOOTS} times in a row",
                )
                self._exit_code = _CANNOT_BOOT
                self._notifier.stopping("a child process cannot start")
                self._shutdown.abort(self._clock())
                return

    def _announce_ready(self) -> None:
        if self._was_ready or self._shutdown.phase is not Phase.RUNNING or not self._is_everyone_ready():
            return
        self._was_ready = True
        pin(self._node.plan.io_cpus)  # successors of the children boot there: the other CPUs have jobs now
        self._row.state = State.READY
        settings, topology = self._node.settings, self._node.topology
        traffic, metrics = listening_urls(settings, topology)
        self._log.info(
            "ready",
            url=traffic,
            metrics=metrics,
            io_processes=topology.io_processes,
            prepare_workers=topology.prepare_workers,
            io_cpus=format_cpu_list(self._node.plan.io_cpus),
            prepare_cpus=format_cpu_list(self._node.plan.prepare_cpus),
        )
        self._notifier.ready(f"serving on {traffic}")
        if settings.demo:
            with contextlib.suppress(OSError):  # a closed stdout is no reason to end
                sys.stdout.write(demo_text(settings, topology))
                sys.stdout.flush()

    def _is_everyone_ready(self) -> bool:
        return self._children.are_ready and all(
            self._is_worker_ready(seat) for group in self._node.topology.groups for seat in group
        )

    def _is_worker_ready(self, seat: int) -> bool:
        """Look at both seats of a worker: one that was renewed early sits in the second."""
        topology = self._node.topology
        return any(
            self._board.row(topology.board_prepare(each)).state is State.READY
            for each in (seat, seat + topology.prepare_workers)
        )

    # ------------------------------------------------------------------------------------------- signals

    def _take_signal(self, number: int) -> None:
        match number:
            case signal.SIGTERM | signal.SIGINT:
                self._stop(number)
            case signal.SIGHUP:
                self._take_reload(everything=False)
            case signal.SIGUSR2:
                self._take_reload(everything=True)

    def _stop(self, number: int) -> None:
        patience = self._patience(number) if self._was_ready else Patience.hurried()
        is_first = self._shutdown.phase is Phase.RUNNING
        self._log.info(
            "stopping",
            signal=signal.Signals(number).name,
            phase=self._shutdown.phase.value,
            accepting_for_s=min(patience.delay_s, patience.grace_s) if is_first else None,
        )
        self._do(self._shutdown.signal(self._clock(), patience))
        self._renewal.stop()

    def _take_reload(self, *, everything: bool) -> None:
        """Take SIGHUP, or with ``everything`` SIGUSR2, which also replaces what no setting asks for."""
        if self._shutdown.phase is not Phase.RUNNING:
            return
        self._notifier.reloading()
        self._is_reload_open = True
        self._children.send({"t": "reopen_logs"}, Role.IO, Role.LEADER, Role.CONTROLLER)
        settings = self._renewal.wanted
        found = self._reload.take(settings)
        if found is not None:
            settings = found.settings
            self._patience = choose_patience(settings, found.sources)
            self._log.configure(settings.log_level, settings.json_log)
        self._renewal.want(settings, everything=everything)

    def _advance_renewal(self, now_ns: int) -> None:
        if not self._was_ready or self._shutdown.phase not in (Phase.RUNNING, Phase.LINGERING):
            return
        self._renewal.advance(now_ns)
        if self._is_reload_open and self._shutdown.phase is Phase.RUNNING and not self._renewal.is_pending:
            self._is_reload_open = False
            self._notifier.ready("serving")

    def _advance_shutdown(self) -> None:
        while True:
            has_io = any(child.is_alive for child in self._children.of(Role.IO))
            has_any = bool(self._children.living) or bool(self._orphans)
            before = self._shutdown.phase
            self._do(self._shutdown.next_acts(self._clock(), has_io=has_io, has_any=has_any))
            if self._shutdown.phase is before:
                return

    def _do(self, acts: list[Act]) -> None:
        for act in acts:
            self._act(act)

    def _act(self, act: Act) -> None:
        children, board = self._children, self._board
        match act:
            case Act.ANNOUNCE:
                # First: no answer may call the node draining and leave its connection open.
                children.send({"t": "linger"}, Role.IO)
                board.is_draining = 1
                self._row.state = State.DRAINING
                self._notifier.stopping("draining")
                self._node.memory.ring_all()
            case Act.DRAIN_IO:
                self._node.close_traffic()  # the I/O processes close theirs when nobody waits in the queue
                left_s = max(0, self._shutdown.grace_end_ns - self._clock()) / _SECOND
                children.send({"t": "drain", "grace_s": left_s}, Role.IO)
            case Act.CUT_IO:
                children.send({"t": "quit"}, Role.IO)
            case Act.KILL_IO:
                children.kill(Role.IO)
            case Act.CLOSE_REST:
                children.send({"t": "quit"}, Role.LEADER, Role.CONTROLLER)
                children.kill(Role.BACKEND)
                self._orphans.kill_all()
            case Act.KILL_ALL:
                children.kill(*Role)
                self._orphans.kill_all()


def _raise_descriptor_limit() -> None:
    """Take the hard limit: the soft one is 1024 on many systems for the sake of select(), unused here."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
