"""The children: spawning, reaping, and what is known of each. Policy is elsewhere; this acts.

One :class:`Child` stands for a seat on the board, whatever process holds it now. While a replacement runs,
one key (child.py) has two: the serving one and its successor, or the serving one and a retiring one. Deaths
are found by reaping in a loop, since SIGCHLD coalesces; signals go through pidfds, since a pid may be
somebody else's by then.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

from meshd.control import (
    HEARTBEAT_LIMIT_NS,
    SUPERVISOR_SIGNALS,
    Manifest,
    ProcessBoard,
    Role,
    State,
    Topology,
    receive_messages,
)
from meshd.cpus import format_cpu_list
from meshd.log import Log
from meshd.supervisor.child import Adopted, Child, ChildSpec, Duty
from meshd.supervisor.nursery import Nursery
from meshd.supervisor.orphans import Orphans

# Imports on a loaded machine take seconds; leaders beat while they load.
_BOOT_LIMIT_NS: Final = 60_000_000_000


class Children:
    """All children of a node. ``on_death`` is called after the board says that a process is gone.

    ``is_traffic_held``: the first I/O processes load beside the others, and wait for ``let_traffic_in``.
    """

    def __init__(
        self,
        specs: Iterable[ChildSpec],
        board: ProcessBoard,
        topology: Topology,
        settings: Mapping[str, Any],
        orphans: Orphans,
        log: Log,
        on_death: Callable[[], None],
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.all = [Child(spec, dict(settings)) for spec in specs]
        self._board = board
        self._topology = topology
        self._log = log
        self._on_death = on_death
        self._clock = clock
        self._orphans = orphans
        self.is_traffic_held = True
        self._nursery: Nursery | None = None

    def of(self, *roles: Role) -> list[Child]:
        return [child for child in self.all if child.spec.role in roles]

    @property
    def living(self) -> list[Child]:
        return [child for child in self.all if child.is_alive]

    @property
    def are_ready(self) -> bool:
        """Whether everyone is ready who is to serve; not those on their way in or out."""
        return all(child.is_ready for child in self.all if child.duty is Duty.SERVING)

    def serving(self, key: tuple[Role, int]) -> Child:
        """Return the child that serves, or is to serve, a key."""
        return next(each for each in self.all if each.spec.key == key and each.duty is Duty.SERVING)

    def successor(self, key: tuple[Role, int]) -> Child | None:
        return next((each for each in self.all if each.spec.key == key and each.duty is Duty.SUCCESSOR), None)

    # ------------------------------------------------------------------------------------------- birth

    def start_due(self, wanted: Callable[[Child], bool]) -> None:
        """Start every wanted child that is not alive and whose back-off is over."""
        now_ns = self._clock()
        due = [
            each for each in self.all if not each.is_alive and each.next_start_ns <= now_ns and wanted(each)
        ]
        first = [
            each for each in due if each.spec.may_be_forked and not each.has_lived and self.is_traffic_held
        ]
        for child in due:
            if len(first) < 2 or child not in first:
                self._start([child], self._spawn)
        if len(first) > 1:
            self._start(first, self._spawn_together)

    def start_successor(self, spec: ChildSpec, settings: Mapping[str, Any]) -> None:
        """Start the one that is to follow whoever serves the key of ``spec``; its seat must be free."""
        child = Child(spec, settings, Duty.SUCCESSOR)
        self.all.append(child)
        self._start([child], self._spawn)

    def replace(self, key: tuple[Role, int], message: dict[str, Any], leave_by_ns: int) -> None:
        """Let the successor serve a key from now on, and ask the one before to leave.

        One that is not ready has nothing to end or to hand over, and hears nothing: it is killed.
        """
        former, successor = self.serving(key), self.successor(key)
        assert successor is not None
        former.duty, successor.duty = Duty.RETIRING, Duty.SERVING
        successor.predecessor = former
        if former.is_ready:
            former.leave_by_ns = leave_by_ns
            former.send(message)
        elif former.is_alive:
            former.kill()
        else:
            self.all.remove(former)

    def take_over(self, key: tuple[Role, int]) -> None:
        """Tell the successor of a key to begin."""
        child = self.successor(key) or self.serving(key)
        child.predecessor = None
        child.send({"t": "take_over"})

    def drop_successor(self, key: tuple[Role, int]) -> None:
        """Want the successor of a key no more; who serves it stays."""
        child = self.successor(key)
        if child is None:
            return
        child.duty = Duty.RETIRING
        child.kill()
        if not child.is_alive:
            self.all.remove(child)

    def let_traffic_in(self) -> None:
        """Tell the I/O processes to begin; those that are started later begin by themselves."""
        self.is_traffic_held = False
        self.send({"t": "take_over"}, Role.IO)

    def _start(self, children: list[Child], spawn: Callable[[list[Child]], None]) -> None:
        now_ns = self._clock()
        for child in children:
            spec = child.spec
            child.started_ns = now_ns
            child.is_condemned = False
            # Before the start: entered later it could overwrite the READY of a child quicker than us.
            row = self._board.row(spec.seat)
            row.open(spec.role, spec.index, 0, format_cpu_list(spec.cpus), is_restart=child.has_lived)
        try:
            spawn(children)
        except OSError as error:  # no process or memory to be had: the back-off also paces this
            for child in children:
                self._board.row(child.spec.seat).state = State.GONE
                child.next_start_ns = now_ns + max(child.backoff.after_death(0), 100_000_000)
                self._log.error("child_not_started", child=child.name, error=str(error))

    def _spawn(self, children: list[Child]) -> None:
        [child] = children
        spec = child.spec
        program = [sys.executable, *_path_flags(), *spec.program]
        if spec.has_manifest:
            with self._endowed(child) as (manifest_fd, passed):
                process = _popen([*program, "--manifest-fd", str(manifest_fd)], passed, is_quiet=False)
        else:
            process = _popen(program, list(spec.fds.values()), is_quiet=True)
        child.has_lived = True
        self._enter(child, process)
        if not spec.has_manifest:
            self._adopt_plain(child, process.pid)

    def _spawn_together(self, children: list[Child]) -> None:
        births, sending = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            with contextlib.ExitStack() as stack:
                endowed = [stack.enter_context(self._endowed(child)) for child in children]
                program = [sys.executable, *_path_flags(), *children[0].spec.program]
                program += ["--births-fd", str(sending), *(str(manifest_fd) for manifest_fd, _ in endowed)]
                passed = [fd for _, fds in endowed for fd in fds]
                process = _popen(program, [sending, *passed], is_quiet=False)
        except OSError:
            os.close(births)
            raise
        finally:
            os.close(sending)
        self._nursery = Nursery(process, births, children)
        for child in children:
            child.has_lived = True
            child.process, child.pidfd = process, os.pidfd_open(process.pid)

    @contextlib.contextmanager
    def _endowed(self, child: Child) -> Iterator[tuple[int, list[int]]]:
        """Yield the manifest of a child, and all that is passed to it; set our end of its link afterwards."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        manifest_fd = -1
        try:
            fds = {**child.spec.fds, "link": theirs.fileno()}
            manifest_fd = self._manifest(child, fds).to_memfd()
            yield manifest_fd, [*fds.values(), manifest_fd]
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
            if manifest_fd >= 0:
                os.close(manifest_fd)
        child.link = ours

    def _enter(self, child: Child, process: subprocess.Popen[bytes] | Adopted) -> None:
        child.pidfd = os.pidfd_open(process.pid)
        child.process = process
        self._board.row(child.spec.seat).pid = process.pid

    def _manifest(self, child: Child, fds: dict[str, int]) -> Manifest:
        spec = child.spec
        return Manifest(
            role=spec.role,
            index=spec.index,
            seat=spec.seat,
            supervisor_pid=os.getpid(),
            topology=self._topology,
            settings=dict(child.settings),
            fds=fds,
            cpus=spec.cpus,
            prepare_cpus=spec.prepare_cpus,
            takes_over=child.duty is Duty.SUCCESSOR or (self.is_traffic_held and spec.role is Role.IO),
        )

    def _adopt_plain(self, child: Child, pid: int) -> None:
        """Do for an ordinary program what ``start_child`` does for the others."""
        if child.spec.cpus:
            with contextlib.suppress(OSError):
                os.sched_setaffinity(pid, child.spec.cpus)
        self._board.row(child.spec.seat).state = State.READY
        child.is_ready = True

    # ------------------------------------------------------------------------------------------- life

    def receive(self, child: Child) -> None:
        """Take the messages of a child."""
        if child.link is None:
            return
        messages, is_closed = receive_messages(child.link)
        for message in messages:
            if message.get("t") == "loaded":
                child.is_loaded = True
            elif message.get("t") == "ready" and not child.is_ready:
                child.is_ready = child.is_loaded = True
                child.failed_boots = 0
                boot_s = (self._clock() - child.started_ns) / 1e9
                self._log.debug("child_ready", child=child.name, boot_s=boot_s)
        if is_closed:  # it died or closed its end; reaping tells which. A closed end would wake every poll.
            child.link.close()
            child.link = None

    def send(self, message: dict[str, Any], *roles: Role) -> None:
        for child in self.of(*roles):
            child.send(message)

    def kill(self, *roles: Role) -> None:
        for child in self.of(*roles):
            child.kill()

    def kill_hung(self, awake_since_ns: int) -> None:
        """Kill who did not beat for 10 s; silence before ``awake_since_ns`` is held against nobody."""
        now_ns = self._clock()
        for child in self.living:
            if not child.spec.has_manifest or child.is_condemned:
                continue
            last_ns = max(self._board.row(child.spec.seat).heartbeat_ns, awake_since_ns)
            limit_ns = HEARTBEAT_LIMIT_NS if child.is_ready else _BOOT_LIMIT_NS
            if now_ns - last_ns > limit_ns:
                self._log.error("child_killed", child=child.name, silent_s=(now_ns - last_ns) / 1e9)
            elif 0 < child.leave_by_ns < now_ns:
                self._log.error("child_killed", child=child.name, message="it did not leave in time")
            else:
                continue
            child.is_condemned = True
            child.kill()

    # ------------------------------------------------------------------------------------------- death

    def reap(self, *, is_ending: bool = False) -> list[Child]:
        """Reap all that died, enter it on the board, and return the children among them.

        ``is_ending``: the node goes down, so an end is no news.
        """
        dead = []
        has_died = False
        while (pid := _next_dead_pid()) is not None:
            has_died = True
            if self._nursery is not None and self._nursery.pid == pid:
                dead += self._leave(self._nursery, is_ending)
                continue
            child = next((each for each in self.living if each.process and each.process.pid == pid), None)
            if child is None:
                os.waitpid(pid, 0)
                self._orphans.bury(pid)
            else:
                self._bury(child, is_ending)
                dead.append(child)
        if has_died:
            self._on_death()
        return dead

    def _leave(self, nursery: Nursery, is_ending: bool) -> list[Child]:
        """Take the children of a nursery that has ended; return those that it did not bring forth."""
        self._nursery = None
        dead = []
        for child, pid in zip(nursery.children, nursery.reap(), strict=True):
            of_nursery = child.pidfd
            try:
                self._enter(child, Adopted(pid))
            except OSError:  # never born, or dead and reaped already
                self._bury(child, is_ending)
                dead.append(child)
            else:
                os.close(of_nursery)
                child.is_condemned = False  # it was the nursery that was killed
        return dead

    def _bury(self, child: Child, is_ending: bool) -> None:
        assert child.process is not None
        pid, status = child.process.pid, child.process.wait()
        now_ns = self._clock()
        lived_ns = now_ns - child.started_ns
        if child.link is not None:
            self.receive(child)  # it may have said ready in its last breath
        if child.link is not None:
            child.link.close()
        os.close(child.pidfd)
        if not child.is_ready:
            child.failed_boots += 1
        delay_ns = child.backoff.after_death(lived_ns)
        child.next_start_ns = now_ns + delay_ns
        ended = {
            "child": child.name,
            "pid": pid,
            "status": describe_status(status),
            "lived_s": lived_ns / 1e9,
        }
        if is_ending:
            self._log.debug("child_ended", **ended)
        elif child.duty is Duty.RETIRING and status == 0:
            self._log.info("child_retired", **ended)
        elif child.duty is Duty.SERVING:
            self._log.warning("child_ended", **ended, next_start_s=delay_ns / 1e9)
        else:
            self._log.warning("child_ended", **ended)
        child.process, child.link, child.pidfd = None, None, -1
        child.is_ready = child.is_loaded = False
        if child.duty is Duty.RETIRING:
            self.all.remove(child)
        row = self._board.row(child.spec.seat)
        row.close()
        if delay_ns and child.duty is Duty.SERVING and not is_ending:
            row.restart_at_ns = child.next_start_ns
        if child.spec.role is Role.LEADER:
            self._orphans.leader_died(pid)


def describe_status(status: int) -> str:
    """Say how a process ended, from the return code that subprocess gives."""
    if status >= 0:
        return f"exit code {status}"
    with contextlib.suppress(ValueError):
        return f"killed by {signal.Signals(-status).name}"
    return f"killed by signal {-status}"


def _popen(program: list[str], passed: list[int], *, is_quiet: bool) -> subprocess.Popen[bytes]:
    """Start a program with the supervisor's signals blocked, so that Ctrl-C cannot kill it while it boots.

    ``is_quiet``: what it says on stdout is for people who start it by hand.
    """
    stdout = subprocess.DEVNULL if is_quiet else None
    signal.pthread_sigmask(signal.SIG_BLOCK, SUPERVISOR_SIGNALS)
    try:
        return subprocess.Popen(program, stdin=subprocess.DEVNULL, stdout=stdout, pass_fds=passed)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SUPERVISOR_SIGNALS)


def _path_flags() -> list[str]:
    """Let a child search the working directory for modules only if we do: ``-m`` alone would add it."""
    return [] if "" in sys.path or os.getcwd() in sys.path else ["-P"]


def _next_dead_pid() -> int | None:
    """Find a dead child without reaping it, so that whoever holds its handle can."""
    try:
        found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    return found.si_pid if found else None
