"""Accepts client connections on the socket that the supervisor shares with this process.

    OPEN ──(no room, or the event loop gave the socket up)──→ PAUSED ──(100 ms, and there is room)──→ OPEN
      └────────────────── close, close_when_empty ────────────────┴──→ CLOSED

The event loop reads the socket through a duplicate of its descriptor. A pause closes the duplicate alone: the
kernel goes on to queue connections, and none of them is refused. Left to itself the event loop would, out of
descriptors, close every waiting client unanswered, and at an error of the socket it would stop listening for
good without a word.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Callable
from typing import Final

BACKLOG: Final = 4096
PAUSE_SECS: Final = 0.1
_QUEUE_AT: Final = 24  # tcpi_unacked of struct tcp_info: of a listening socket, how many wait in its queue


class Listener:
    """``fd``: the shared listening socket; it stays the caller's. ``accept`` makes each client's protocol.

    ``has_room``: whether more connections may be held. ``descriptor_limit``: accepting pauses when all but
    2 % of so many descriptors are in use. ``on_error``: hears of each failure to accept.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        fd: int,
        accept: Callable[[], asyncio.BaseProtocol],
        *,
        has_room: Callable[[], bool],
        descriptor_limit: int,
        on_pause: Callable[[], None] = lambda: None,
        on_error: Callable[[], None] = lambda: None,
    ) -> None:
        self._loop = loop
        self._fd = fd
        self._accept = accept
        self._has_room = has_room
        self._highest_fd = max(8, descriptor_limit - max(8, descriptor_limit // 50))
        self._on_pause = on_pause
        self._on_error = on_error
        self._socket: socket.socket | None = None
        self._server: asyncio.Server | None = None
        self._opening: asyncio.Task[None] | None = None
        self._is_closed = False

    def __repr__(self) -> str:
        return f"Listener({'closed' if self._is_closed else 'open' if self._server else 'paused'})"

    async def open(self) -> None:
        """Start to accept."""
        listening = socket.socket(fileno=os.dup(self._fd))
        try:
            server = await self._loop.create_server(self._accepted, sock=listening, backlog=BACKLOG)
        except BaseException:
            listening.close()
            raise
        self._socket, self._server = listening, server
        if self._is_closed:
            self.close()

    def close(self) -> None:
        """Accept no more, for good; connections that there are go on."""
        self._is_closed = True
        self._release()

    async def close_when_empty(self, patience_s: float) -> None:
        """Take in whoever waits in the queue, then close the shared socket itself; ``patience_s`` at most.

        The kernel resets those that wait in the queue of a socket when its last holder closes it.
        """
        deadline = self._loop.time() + patience_s
        while self._server is not None and self._queue_length() and self._loop.time() < deadline:
            await asyncio.sleep(0.001)
        self.close()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _queue_length(self) -> int:
        if self._socket is None or self._socket.family == socket.AF_UNIX:
            return 0
        info = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _QUEUE_AT + 4)
        return int.from_bytes(info[_QUEUE_AT:], sys.byteorder)

    def check(self) -> None:
        """Notice that the event loop has given up the socket; call some times a second."""
        if self._socket is not None and self._socket.fileno() < 0:
            self._on_error()
            self._pause()

    def _accepted(self) -> asyncio.BaseProtocol:
        if not self._can_take_more():
            self._loop.call_soon(self._pause)  # not now: the event loop is still busy with this connection
        return self._accept()

    def _can_take_more(self) -> bool:
        """The kernel gives the lowest free descriptor: its number tells how many are in use, for 0.5 µs."""
        try:
            lowest = os.dup(self._fd)
        except OSError:
            return False
        os.close(lowest)
        return lowest < self._highest_fd and self._has_room()

    def _pause(self) -> None:
        if self._server is None:
            return
        self._release()
        self._on_pause()
        self._loop.call_later(PAUSE_SECS, self._try_open)

    def _try_open(self) -> None:
        if self._is_closed:
            return
        if self._can_take_more():
            self._opening = self._loop.create_task(self._open_again())
        else:
            self._loop.call_later(PAUSE_SECS, self._try_open)

    async def _open_again(self) -> None:
        try:
            await self.open()
        except OSError:  # the last descriptor went to somebody else
            self._on_error()
            self._loop.call_later(PAUSE_SECS, self._try_open)

    def _release(self) -> None:
        if self._server is not None:
            self._server.close()
        self._server = self._socket = None
