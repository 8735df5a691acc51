"""Being a child of the supervisor: birth, signals, and the link."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
from collections.abc import Iterable, Sequence
from typing import Any, Final

from meshd.control.board import BoardRow, ProcessBoard, Role, State
from meshd.control.manifest import Manifest
from meshd.errors import StartupError

_MESSAGE_BYTES: Final = 65536  # SOCK_SEQPACKET: one message is one datagram
_BEAT_S: Final = 0.5
_PR_SET_PDEATHSIG: Final = 1
_PR_SET_NAME: Final = 15
# The supervisor alone acts on these. Children start with them blocked: none may die before it ignores them.
SUPERVISOR_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2)
_SHORT_NAMES: Final = {
    Role.SUPERVISOR: "super",
    Role.IO: "io",
    Role.LEADER: "lead",
    Role.PREPARE: "prep",
    Role.CONTROLLER: "ctl",
    Role.BACKEND: "back",
}


class ChildLink:
    """A child's end of its SOCK_SEQPACKET pair with the supervisor; messages are small JSON objects.

    To the supervisor: ``{"t":"ready"}``. To the child: ``{"t":"drain","grace_s":…}`` (finish what runs, then
    exit 0), ``{"t":"quit"}`` (exit at once), ``{"t":"reopen_logs"}``. An I/O process hears ``{"t":"linger"}``
    when the node will soon end: every answer closes its connection. End of file: the supervisor is gone.

    In a rolling replacement (supervisor/replacement.py) the new process says ``{"t":"loaded"}`` instead of
    ready, and waits for ``{"t":"take_over"}``. The old one hears ``{"t":"hand_over"}`` (controller, leader:
    stop writing and exit 0, leave what lives on to the successor) or ``{"t":"retire","grace_s":…}`` (I/O
    process: take no new connections, serve the others to their end, then exit 0). When a node starts, its
    I/O processes say ``loaded`` and wait as well, until the others are ready.
    """

    def __init__(self, fd: int, row: BoardRow, cpus: Iterable[int] = ()) -> None:
        self._socket = socket.socket(fileno=fd)
        self._socket.setblocking(False)
        self._row = row
        self._cpus = cpus
        self.is_closed = False

    @classmethod
    def open(cls, manifest: Manifest, board: ProcessBoard) -> ChildLink:
        return cls(manifest.fds["link"], board.row(manifest.seat), manifest.cpus)

    def ready(self) -> None:
        """Take the CPUs that are meant for this process, enter READY on the board and tell the supervisor.

        Until then it runs where the supervisor does. At the start of a node that is on all CPUs: those for
        I/O would boot everyone while the others wait for jobs.
        """
        pin(self._cpus)
        self._row.beat()
        self._row.state = State.READY
        self.send({"t": "ready"})

    def send(self, message: dict[str, Any]) -> None:
        send_message(self._socket, message)

    def recv(self) -> list[dict[str, Any]]:
        """Return what has arrived, without waiting. ``is_closed`` turns true at end of file."""
        messages, self.is_closed = receive_messages(self._socket)
        return messages

    def fileno(self) -> int:
        return self._socket.fileno()

    def wait_to_take_over(self) -> bool:
        """Say that all is loaded and wait, beating, until the predecessor has handed over.

        Blocks: for processes whose event loop does not run yet. False: the supervisor wants no successor.
        """
        self.send({"t": "loaded"})
        poller = select.poll()  # select() knows no descriptor above 1023
        poller.register(self._socket, select.POLLIN)
        while not self.is_closed:
            self._row.beat()
            poller.poll(_BEAT_S * 1000)
            for message in self.recv():
                if message.get("t") == "take_over":
                    return True
                if message.get("t") in ("drain", "quit", "retire", "hand_over"):
                    return False
        return False


def send_message(link: socket.socket, message: dict[str, Any]) -> None:
    """Send one message; one that finds the peer gone or its queue full is dropped."""
    with contextlib.suppress(OSError):
        link.send(json.dumps(message).encode())


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
    """Become a proper child: read the manifest, die with the supervisor, take its name, ignore signals.

    ``argv``: the arguments after the module, ``--manifest-fd N``. Raises StartupError if started by hand.
    """
    if len(argv) != 2 or argv[0] != "--manifest-fd":
        raise StartupError("this module is started by the meshd supervisor, not by hand", 2)
    fd = int(argv[1])
    manifest = Manifest.from_memfd(fd)
    os.close(fd)
    die_with_parent(manifest.supervisor_pid)
    ignore_supervisor_signals()
    name_process(manifest.role, manifest.index)
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
    name_process_as(f"meshd:{_SHORT_NAMES[role]}{suffix}")


def name_process_as(text: str) -> None:
    """Set the name of a process that has no role; 15 bytes of it are shown."""
    name = ctypes.create_string_buffer(text.encode()[:15])
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
