"""Send one request to an upstream for the controller: a connection of its own, bounded in time and size.

Redirects are not followed: an upstream that redirects its health route is not healthy.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import socket
import ssl
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import h11

from meshd.errors import StartupError
from meshd.routing.registry import Upstream

LOOKUP_THREADS: Final = 128
_READ_BYTES: Final = 65536
_HEAD_BYTES: Final = 65536
_ERROR_NUMBER: Final = re.compile(r"\[Errno (\d+)\]")


class FetchError(Exception):
    """No whole answer arrived: the network, TLS, the clock, a bound, or the protocol. Text for operators."""


@dataclass(slots=True)
class Room:
    """Bytes that the bodies of several answers may have together, those still arriving included."""

    left: int

    def take(self, count: int) -> None:
        """Raises FetchError if there is no room for ``count`` more bytes; they are taken all the same."""
        self.left -= count
        if self.left < 0:
            raise FetchError("the answers of all are too large together")

    def give_back(self, count: int) -> None:
        self.left += count


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    body: bytes

    @property
    def is_success(self) -> bool:
        return 200 <= self.status < 300


class UpstreamClient:
    """Asks upstreams with their own keys. ``tls`` gives the context of each https connection."""

    def __init__(self, tls: Callable[[], ssl.SSLContext] = ssl.create_default_context) -> None:
        self._tls = tls

    async def get(self, upstream: Upstream, path: str, timeout_s: float, max_body_bytes: int) -> Answer:
        """GET ``path`` below the base URL. Raises FetchError, after ``timeout_s`` at the latest."""
        return await self.send("GET", upstream, path, timeout_s, max_body_bytes)

    async def send(
        self,
        method: str,
        upstream: Upstream,
        path: str,
        timeout_s: float,
        max_body_bytes: int,
        room: Room | None = None,
    ) -> Answer:
        """Send a request without a body; otherwise like ``get``.

        ``room``: what answers may have together; that of the answer returned is the caller's to give back.
        """
        try:
            async with asyncio.timeout(timeout_s):
                return await self._send(method, upstream, path, max_body_bytes, room)
        except TimeoutError as timeout:
            raise FetchError(f"no answer within {timeout_s:g} s") from timeout
        except (OSError, ValueError, h11.RemoteProtocolError, StartupError) as exc:
            # ValueError: a name that cannot be looked up. StartupError: files of --ca-cert-paths and so on.
            raise FetchError(_words(exc)) from exc

    async def _send(
        self, method: str, upstream: Upstream, path: str, max_body_bytes: int, room: Room | None
    ) -> Answer:
        tls = self._tls() if upstream.is_tls else None
        reader, writer = await asyncio.open_connection(upstream.host, upstream.port, ssl=tls)
        try:
            connection = h11.Connection(h11.CLIENT, max_incomplete_event_size=_HEAD_BYTES)
            writer.write(connection.send(_request(method, upstream, path)) or b"")
            writer.write(connection.send(h11.EndOfMessage()) or b"")
            return await _read_answer(connection, reader, max_body_bytes, room)
        finally:
            # Closed hard: a server that does not read its last bytes must not keep the controller waiting.
            writer.transport.abort()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


def give_lookups_threads(loop: asyncio.AbstractEventLoop) -> None:
    """Let many names be looked up at a time.

    A name whose servers are silent holds its thread for half a minute; with the handful that an event loop
    has by itself a few such names would keep all others from being probed, and so from being used.
    """
    loop.set_default_executor(ThreadPoolExecutor(LOOKUP_THREADS, "lookup"))


def _words(exc: Exception) -> str:
    """Say what went wrong; "Connection refused" rather than asyncio's list of each address it tried."""
    if isinstance(exc, socket.gaierror):
        return f"the host name cannot be looked up: {exc.strerror}"
    numbers = dict.fromkeys(_ERROR_NUMBER.findall(str(exc))) if isinstance(exc, OSError) else ()
    return ", ".join(os.strerror(int(number)) for number in numbers) or f"{type(exc).__name__}: {exc}"


def _request(method: str, upstream: Upstream, path: str) -> h11.Request:
    authority = upstream.base_url.split("://", 1)[1].split("/", 1)[0]
    headers = [("host", authority), ("user-agent", "meshd"), ("accept", "*/*"), ("connection", "close")]
    if upstream.api_key:
        headers.append(("authorization", f"Bearer {upstream.api_key}"))
    if method != "GET":
        headers.append(("content-length", "0"))
    return h11.Request(method=method, target=upstream.base_path + path, headers=headers)


async def _read_answer(
    connection: h11.Connection, reader: asyncio.StreamReader, max_body_bytes: int, room: Room | None
) -> Answer:
    body = bytearray()
    try:
        status = await _read_into(body, connection, reader, max_body_bytes, room)
    except BaseException:  # a cancellation too
        if room is not None:
            room.give_back(len(body))
        raise
    return Answer(status, bytes(body))


async def _read_into(
    body: bytearray,
    connection: h11.Connection,
    reader: asyncio.StreamReader,
    max_body_bytes: int,
    room: Room | None,
) -> int:
    """Read an answer to its end, its body into ``body``; return its status."""
    status = 0
    while True:
        event = connection.next_event()
        if event is h11.NEED_DATA:
            connection.receive_data(await reader.read(_READ_BYTES))
        elif isinstance(event, h11.Response):
            status = event.status_code
        elif isinstance(event, h11.Data):
            body += event.data
            if room is not None:
                room.take(len(event.data))
            if len(body) > max_body_bytes:
                raise FetchError(f"the answer is longer than {max_body_bytes} bytes")
        elif isinstance(event, h11.EndOfMessage):
            return status
        elif not isinstance(event, h11.InformationalResponse):
            raise FetchError("the connection was closed before the answer was complete")
