"""One client connection: bytes to requests, one exchange at a time, and the end of the connection.

An end-of-file of the client counts as leaving: what is pending is dropped at once and counted as aborted.
Requests that arrive early (pipelining) wait in order, and reading pauses meanwhile.
"""

from __future__ import annotations

import asyncio
import fcntl
import socket
import struct
import termios
import time
from collections import deque
from typing import Final, cast

import httptools

from meshd.backend.reply import Dialect, RequestError, error_reply
from meshd.backend.sending import Ending, is_immediate, send
from meshd.backend.service import Exchange, Service
from meshd.backend.state import Request
from meshd.backend.wire import CONTINUE, DateLine, framing_of, render_head, render_reply

RESET_WAITS: Final = 500  # of 1 ms each: how long a reset waits for the peer's kernel to take what was sent


class Connection(asyncio.Protocol):
    """An asyncio protocol; ``dates`` is shared by all connections of a process."""

    def __init__(self, service: Service, dates: DateLine, loop: asyncio.AbstractEventLoop) -> None:
        self._service = service
        self._dates = dates
        self._loop = loop
        self._parser = httptools.HttpRequestParser(self)
        self._waiting: deque[Request] = deque()
        self._exchange: Exchange | None = None
        self._task: asyncio.Task[None] | None = None
        self._idle_timer: asyncio.TimerHandle | None = None
        self._room: asyncio.Future[None] | None = None
        self._is_lost = False
        self._start_request()

    # --- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one, but does not inherit it
        self._number = self._service.stats.open_connection()
        self._arm_idle_timer()

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._refuse()
            return
        self._serve_waiting()

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_lost = True
        self._stop_idle_timer()
        self._service.stats.close_connection()
        if self._exchange is not None:
            self._end_exchange(self._exchange, is_aborted=True)
        if self._task is not None:
            self._task.cancel()

    def pause_writing(self) -> None:
        self._room = self._loop.create_future()

    def resume_writing(self) -> None:
        if self._room is not None and not self._room.done():
            self._room.set_result(None)
        self._room = None

    # --- httptools

    def on_message_begin(self) -> None:
        self._stop_idle_timer()
        self._start_request()

    def on_url(self, url: bytes) -> None:
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._is_head_done:  # later fields are trailers
            self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        self._is_head_done = True
        expects = any(n.lower() == b"expect" and v.lower() == b"100-continue" for n, v in self._headers)
        if expects and self._exchange is None and not self._waiting:
            self._transport.write(CONTINUE)

    def on_body(self, data: bytes) -> None:
        self._chunks.append(data)

    def on_message_complete(self) -> None:
        is_http_10 = self._parser.get_http_version() == "1.0"
        request = Request(
            method=self._parser.get_method().decode(),
            target=self._target.decode("latin-1"),
            headers=tuple(self._headers),
            body=b"".join(self._chunks),
            connection=self._number,
            is_keep_alive=not is_http_10 and self._parser.should_keep_alive(),
            is_http_10=is_http_10,
        )
        self._start_request()
        self._waiting.append(request)

    # --- sending.Outlet

    def write(self, data: bytes) -> None:
        self._transport.write(data)

    async def drain(self) -> None:
        if self._room is not None:
            await self._room

    # --- exchanges

    def _start_request(self) -> None:
        self._target = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._chunks: list[bytes] = []
        self._is_head_done = False

    def _serve_waiting(self) -> None:
        while self._waiting and self._exchange is None and not self._transport.is_closing():
            self._serve(self._waiting.popleft())
        if self._transport.is_closing():
            return
        if self._waiting:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def _serve(self, request: Request) -> None:
        exchange = self._service.begin(request)
        self._exchange = exchange
        head = render_head(
            request, exchange.reply, self._dates.at(time.time()), is_keep_alive=self._stays(request)
        )
        if is_immediate(exchange):
            framing = framing_of(request, exchange.reply)
            self._transport.write(render_reply(head, framing, exchange.reply))
            self._finish(exchange, Ending.COMPLETE)
        else:
            self._task = self._loop.create_task(self._send(exchange, head))

    async def _send(self, exchange: Exchange, head: bytes) -> None:
        ending = await send(exchange, head, framing_of(exchange.request, exchange.reply), self)
        if ending is Ending.RESET:
            await self._wait_until_taken()
        self._task = None
        self._finish(exchange, ending)
        self._serve_waiting()

    def _finish(self, exchange: Exchange, ending: Ending) -> None:
        self._end_exchange(exchange, is_aborted=False)
        if ending is Ending.RESET:
            self._reset()
        elif ending is not Ending.COMPLETE or not self._stays(exchange.request):
            self._transport.close()
        else:
            self._arm_idle_timer()

    def _end_exchange(self, exchange: Exchange, *, is_aborted: bool) -> None:
        self._exchange = None
        self._service.end(exchange, is_aborted=is_aborted)

    def _stays(self, request: Request) -> bool:
        return request.is_keep_alive and self._service.options.keepalive_s > 0

    def _refuse(self) -> None:
        """Answer a head that is no HTTP, unless another answer is under way, and close."""
        if self._exchange is None and not self._waiting and not self._transport.is_closing():
            error = RequestError(400, "malformed_request", "The request is not valid HTTP/1.1.")
            request = Request("GET", "", (), b"", self._number, is_keep_alive=False)
            reply = error_reply(error, Dialect.OPENAI)
            head = render_head(request, reply, self._dates.at(time.time()), is_keep_alive=False)
            self._transport.write(head + reply.body)
        self._transport.close()

    # --- the connection's end

    def _arm_idle_timer(self) -> None:
        self._stop_idle_timer()
        seconds = self._service.options.keepalive_s
        if seconds > 0:
            self._idle_timer = self._loop.call_later(seconds, self._transport.close)

    def _stop_idle_timer(self) -> None:
        if self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None

    async def _wait_until_taken(self) -> None:
        """Wait until the peer has acknowledged all bytes: a reset throws away what is still queued here."""
        taken = struct.pack("i", 0)
        sock = self._transport.get_extra_info("socket")
        for _ in range(RESET_WAITS):
            queued = fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, taken)
            if not self._transport.get_write_buffer_size() and queued == taken:
                return
            await asyncio.sleep(0.001)

    def _reset(self) -> None:
        sock = self._transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._transport.abort()
