"""The notification protocol of systemd (sd_notify(3)): datagrams of ``NAME=value`` lines to a Unix socket.

The socket's queue is short: ten datagrams on many systems, which a manager that is busy for a few seconds
lets fill up. A sign of life that finds it full is dropped, another follows; anything else is kept and sent in
order on a later turn, for a READY that is lost would end a healthy node at the manager's start-up limit.
"""

from __future__ import annotations

import socket
import time
from collections import deque
from typing import Final

_KEPT: Final = 16  # more states than a life has; the oldest goes first


class Notifier:
    """Talks to the service manager; does nothing when there is none.

    ``address``: the value of ``$NOTIFY_SOCKET``; "@" stands for the abstract namespace.
    ``watchdog_usec``: the value of ``$WATCHDOG_USEC``; a sign of life goes out at half of it.
    """

    def __init__(self, address: str | None, watchdog_usec: int = 0) -> None:
        self._socket: socket.socket | None = None
        self._address = ""
        self._interval_ns = watchdog_usec * 1000 // 2
        self._next_ns = 0
        self._unsent: deque[bytes] = deque(maxlen=_KEPT)
        if address:
            self._address = "\0" + address[1:] if address.startswith("@") else address
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
            self._socket.setblocking(False)

    def ready(self, status: str) -> None:
        self._send("READY=1", f"STATUS={status}")

    def status(self, status: str) -> None:
        self._send(f"STATUS={status}")

    def reloading(self) -> None:
        """Say that a reload runs; ``ready`` ends it. Type=notify-reload compares the time stamp."""
        self._send("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def stopping(self, status: str) -> None:
        self._send("STOPPING=1", f"STATUS={status}")

    def watchdog(self, now_ns: int) -> None:
        """Send what could not be sent before, and the sign of life if it is due. Call it on every turn."""
        self._flush()
        if self._interval_ns and now_ns >= self._next_ns:
            self._next_ns = now_ns + self._interval_ns
            if not self._unsent:
                self._try_send(b"WATCHDOG=1")

    @property
    def next_ns(self) -> int | None:
        """When ``watchdog`` is due next."""
        return self._next_ns if self._interval_ns and self._socket else None

    def _send(self, *lines: str) -> None:
        if self._socket is not None:
            self._unsent.append("\n".join(lines).encode())
            self._flush()

    def _flush(self) -> None:
        while self._unsent and self._try_send(self._unsent[0]):
            self._unsent.popleft()

    def _try_send(self, message: bytes) -> bool:
        """Return False if the queue is full: a manager that does not read must not hold up the children."""
        if self._socket is None:
            return True
        try:
            self._socket.sendto(message, self._address)
        except BlockingIOError:
            return False
        except OSError:  # the manager is gone; nobody will ever read this
            return True
        return True
