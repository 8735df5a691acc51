"""A small HTTP/1.1 server for the controller's two listeners, on asyncio streams and h11.

Deliberately small: few connections, small bodies read whole, answers from memory, keep-alive without
overlap of requests. Everything is bounded: connections, head, body, and the time each step may take.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from email.utils import formatdate
from http import HTTPStatus
from typing import Final

import h11

from meshd.log import Log

MAX_CONNECTIONS: Final = 256
MAX_HEAD_BYTES: Final = 65536
MAX_BODY_BYTES: Final = 1 << 20
_READ_BYTES: Final = 65536
_LINGER_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class Request:
    """A whole request. ``path``: without the query; ``headers``: lower-case names, the last value wins."""

    method: str
    path: str
    query: str
    headers: dict[str, str]
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class Response:
    status: int
    body: bytes
    content_type: str = "application/json"
    headers: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds. ``idle_s``: for the next head; ``body_s``: for a whole body; ``write_s``: for an answer."""

    idle_s: float = 75.0
    body_s: float = 30.0
    write_s: float = 30.0


Handler = Callable[[Request], Awaitable[Response]]
Refuse = Callable[[int, str], Response]
"""Words an error that the server itself finds: status and a sentence."""
Admits = Callable[[int, int], bool]
"""Says whether the process with a pid and a user id may talk to this server over a Unix socket."""

_CREDENTIALS: Final = struct.Struct("3i")  # struct ucred: pid, uid, gid


class HttpServer:
    """Serves one handler on any number of listening sockets.

    ``admits``: asked of each peer on a Unix socket. A name in the abstract namespace has no file permissions:
    without it any process of the network namespace may connect.
    """

    def __init__(
        self,
        handler: Handler,
        refuse: Refuse,
        log: Log,
        timeouts: Timeouts | None = None,
        max_connections: int = MAX_CONNECTIONS,
        admits: Admits | None = None,
    ) -> None:
        self._admits = admits
        self._handler = handler
        self._refuse = refuse
        self._log = log
        self._timeouts = timeouts or Timeouts()
        self._max_connections = max_connections
        self._count = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self.busy = 0  # requests that are being answered
        self.is_closing = False  # every answer ends its connection

    async def listen(self, listener: socket.socket) -> asyncio.Server:
        """Accept on a bound socket, which the server owns from now on."""
        listener.setblocking(False)
        if listener.family == socket.AF_UNIX:
            return await asyncio.start_unix_server(self._accept, sock=listener, limit=MAX_HEAD_BYTES)
        return await asyncio.start_server(self._accept, sock=listener, limit=MAX_HEAD_BYTES)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a connection in a task of our own.

        One that asyncio makes out of a coroutine ends in a traceback in the log when it is cancelled (3.11),
        as those of idle connections are when the process ends.
        """
        task = asyncio.get_running_loop().create_task(self.serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection to its end; one over the bound is closed at once."""
        if self._count >= self._max_connections or not self._is_admitted(writer):
            writer.transport.abort()
            return
        self._count += 1
        try:
            await _Connection(reader, writer, self, self._handler, self._refuse, self._timeouts).run()
        except (OSError, TimeoutError, h11.LocalProtocolError) as exc:
            self._log.debug("connection_ended", reason=f"{type(exc).__name__}: {exc}")
        finally:
            self._count -= 1
            writer.transport.abort()

    def _is_admitted(self, writer: asyncio.StreamWriter) -> bool:
        peer = writer.get_extra_info("socket")
        if self._admits is None or peer.family != socket.AF_UNIX:
            return True
        pid, uid, _ = _CREDENTIALS.unpack(
            peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        )
        is_admitted = self._admits(pid, uid)
        if not is_admitted:
            self._log.warning("stranger_refused", pid=pid, uid=uid)
        return is_admitted


class _Refused(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class _Connection:
    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        server: HttpServer,
        handler: Handler,
        refuse: Refuse,
        timeouts: Timeouts,
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._server = server
        self._handler = handler
        self._refuse = refuse
        self._timeouts = timeouts
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD_BYTES)

    async def run(self) -> None:
        while True:
            try:
                request = await self._read_request()
            except _Refused as exc:
                await self._send(self._refuse(exc.status, str(exc)), is_head=False, is_closing=True)
                break
            if request is None:
                break
            self._server.busy += 1
            try:
                answer = await self._handler(request)
                await self._send(answer, request.method == "HEAD", self._server.is_closing)
            finally:
                self._server.busy -= 1
            if self._http.our_state is h11.MUST_CLOSE:
                break
            self._http.start_next_cycle()
        await self._finish()

    async def _read_request(self) -> Request | None:
        """Return the next request, None when the client has gone or has been silent for too long."""
        try:
            async with asyncio.timeout(self._timeouts.idle_s):
                head = await self._next_event()
        except TimeoutError:
            return None
        if not isinstance(head, h11.Request):
            return None
        try:
            async with asyncio.timeout(self._timeouts.body_s):
                body = await self._read_body()
        except TimeoutError as exc:
            raise _Refused(408, "The request body did not arrive in time.") from exc
        return _request(head, body) if body is not None else None

    async def _read_body(self) -> bytes | None:
        body = bytearray()
        while not isinstance(event := await self._next_event(), h11.EndOfMessage):
            if not isinstance(event, h11.Data):
                return None
            body += event.data
            if len(body) > MAX_BODY_BYTES:
                raise _Refused(413, f"The request body is larger than {MAX_BODY_BYTES} bytes.")
        return bytes(body)

    async def _next_event(self) -> h11.Event | None:
        """Return the next event, None at the end of the connection."""
        try:
            while True:
                event = self._http.next_event()
                if event is not h11.NEED_DATA:
                    break
                if self._http.they_are_waiting_for_100_continue:
                    interim = h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue")
                    await self._write(self._http.send(interim))
                data = await self._reader.read(_READ_BYTES)
                if not data and self._http.their_state is h11.IDLE:
                    return None
                self._http.receive_data(data)
        except h11.RemoteProtocolError as exc:
            raise _Refused(exc.error_status_hint, "The request is not valid HTTP.") from exc
        return event if isinstance(event, h11.Event) and not isinstance(event, h11.ConnectionClosed) else None

    async def _send(self, response: Response, is_head: bool, is_closing: bool = False) -> None:
        headers = [
            ("content-type", response.content_type),
            ("content-length", str(len(response.body))),
            ("date", formatdate(usegmt=True)),
            ("server", "meshd"),
            *response.headers,
        ]
        if is_closing:
            headers.append(("connection", "close"))
        reason = HTTPStatus(response.status).phrase
        head = h11.Response(status_code=response.status, headers=headers, reason=reason.encode())
        data = self._http.send(head) or b""
        if not is_head:
            data += self._http.send(h11.Data(data=response.body)) or b""
        await self._write(data + (self._http.send(h11.EndOfMessage()) or b""))

    async def _write(self, data: bytes | None) -> None:
        self._writer.write(data or b"")
        async with asyncio.timeout(self._timeouts.write_s):
            await self._writer.drain()

    async def _finish(self) -> None:
        """End the stream and give the client a moment to read the answer; the caller aborts after it.

        A close with unread bytes of a refused body would reset the connection under the answer.
        """
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(_LINGER_S):
                self._writer.write_eof()
                while await self._reader.read(_READ_BYTES):
                    pass


def _request(head: h11.Request, body: bytes) -> Request:
    target = head.target.decode("latin-1")
    if target.startswith(("http://", "https://")):  # absolute form, RFC 9112 §3.2.2
        target = "/" + target.split("://", 1)[1].partition("/")[2]
    path, _, query = target.partition("?")
    headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in head.headers}
    return Request(head.method.decode("latin-1"), path, query, headers, body)
