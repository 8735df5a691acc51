"""Signals as bytes on a socket: handlers do nothing, the loop reads what came."""

from __future__ import annotations

import signal
import socket
from types import FrameType
from typing import Final

_HANDLED: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2, signal.SIGCHLD)


class SignalInbox:
    """Collects the supervisor's signals; readable (``fileno``) while some wait."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        # A full buffer only means that many SIGCHLD wait already; the loop reaps all on any of them.
        self._former_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._former = {number: signal.signal(number, _leave_to_loop) for number in _HANDLED}

    def fileno(self) -> int:
        return self._reader.fileno()

    def take(self) -> list[int]:
        """Return the numbers of the signals that came, in order."""
        try:
            return list(self._reader.recv(4096))
        except BlockingIOError:
            return []

    def close(self) -> None:
        """Put back what was there before."""
        for number, handler in self._former.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._former_fd)
        self._reader.close()
        self._writer.close()


def _leave_to_loop(number: int, frame: FrameType | None) -> None:
    """Exist, so that Python writes the number to the wake-up descriptor."""
