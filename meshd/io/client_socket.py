"""The bytes of a client connection: their flow both ways, and the ways to end it; no requests.

A class of its own for its size; it exists as a `DownstreamConnection` alone, which makes no call more for it.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Final, cast

WRITE_HIGH: Final = 262144
WRITE_LOW: Final = 65536

_LINGER_RESET: Final = struct.pack("ii", 1, 0)  # SO_LINGER of zero seconds: close sends a reset


class ClientSocket(asyncio.BufferedProtocol):
    """``peer``: address and port of the client, empty if it has none. All methods: on the event loop."""

    __slots__ = ("_unsent", "is_read_paused", "is_write_paused", "peer", "transport", "write_paused_at")

    def __init__(self) -> None:
        self._unsent = 0  # response bytes in the transport when last looked at
        self.transport: asyncio.Transport | None = None
        self.is_read_paused = False
        self.is_write_paused = False
        self.write_paused_at = 0.0
        self.peer = ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.Transport, transport)  # uvloop's own class is not registered as one
        self.transport = transport
        transport.set_write_buffer_limits(high=WRITE_HIGH, low=WRITE_LOW)
        peer = transport.get_extra_info("peername")
        self.peer = f"{peer[0]}:{peer[1]}" if isinstance(peer, tuple) else ""

    def _pause_reading(self) -> None:
        if not self.is_read_paused and self.transport is not None:
            self.is_read_paused = True
            self.transport.pause_reading()

    def _resume_reading(self) -> None:
        if self.is_read_paused and self.transport is not None and not self.transport.is_closing():
            self.is_read_paused = False
            self.transport.resume_reading()

    def _has_taken_bytes(self) -> bool:
        """Whether the client took response bytes since this was asked last."""
        before = self._unsent
        self._unsent = self._count_unsent()
        return self._unsent != before

    def _count_unsent(self) -> int:
        return self.transport.get_write_buffer_size() if self.transport is not None else 0

    def _is_stuck(self, now: float, patience_s: float) -> bool:
        """Whether the client, which makes us wait, has taken no byte for longer than ``patience_s``."""
        if self._has_taken_bytes():
            self.write_paused_at = now
            return False
        return now - self.write_paused_at > patience_s

    def _try_shut_down(self) -> bool:
        """Say that nothing more follows what was written; False if this transport cannot."""
        assert self.transport is not None
        self._unsent = self._count_unsent()
        if not self.transport.can_write_eof():
            return False
        self.transport.write_eof()
        return True

    def _cut(self, resets: bool) -> None:
        """Close at once, without what was written and not sent; ``resets``: by a TCP reset."""
        assert self.transport is not None
        if resets:
            sock = self.transport.get_extra_info("socket")
            if sock is not None:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_RESET)
        self.transport.abort()
