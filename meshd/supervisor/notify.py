"""The notification protocol of systemd (sd_notify(3)): datagrams of ``NAME=value`` lines to a Unix socket."""

from __future__ import annotations

import contextlib
import socket
import time


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
        """Send the sign of life if it is due."""
        if self._interval_ns and now_ns >= self._next_ns:
            self._next_ns = now_ns + self._interval_ns
            self._send("WATCHDOG=1")

    @property
    def next_ns(self) -> int | None:
        """When ``watchdog`` is due next."""
        return self._next_ns if self._interval_ns and self._socket else None

    def _send(self, *lines: str) -> None:
        # A manager that is gone or does not read must not hold up the children.
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.sendto("\n".join(lines).encode(), self._address)
