"""Client connections over TLS: real sockets, a real handshake, and the ordinary connection behind it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import hashlib
import os
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from mmap import mmap

import pytest
import uvloop

from meshd.errors import MeshError
from meshd.io.client_socket import WRITE_HIGH, WRITE_LOW
from meshd.io.downstream import DownstreamConnection
from meshd.io.http1 import RequestHead, parse_request_head
from meshd.io.tls_downstream import TlsDownstreamConnection
from meshd.io.tls_greeter import TlsGreeter
from meshd.io.tls_transport import TlsTransport
from meshd.tls import server_context
from tests.fakes.begun import begun
from tests.fakes.certificates import Authority

CHUNK = bytes(32768)


class Room:
    """Room of a fixed size, filled with bytes that no body here consists of."""

    def __init__(self, size: int) -> None:
        self.body = memoryview(bytearray(b"\xff" * size))

    def fill(self, data: bytes) -> None:
        self.body[: len(data)] = data

    def grow(self, body_bytes: int) -> bool:
        return False


class Exchange:
    """Receives the body and answers with its digest; a GET is answered by the test."""

    def __init__(self, server: Server, connection: DownstreamConnection, head: RequestHead) -> None:
        self.server, self.connection, self.head = server, connection, head
        self.gone: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.is_paused = False
        server.exchanges.put_nowait(self)
        if head.method == "POST":
            self._task = asyncio.ensure_future(self._answer())

    async def _answer(self) -> None:
        length = self.head.content_length or 0
        room = Room(length)
        ready = begun(self.connection, room, length)
        if ready is not None:
            await ready
        digest = hashlib.sha256(room.body).hexdigest().encode()
        closes = not self.head.keeps_alive
        self.connection.write(b"HTTP/1.1 200 OK\r\ncontent-length: 64\r\n\r\n" + digest)
        self.connection.finish(closes)

    def client_gone(self, cause: str) -> None:
        self.gone.set_result(cause)

    def client_paused(self) -> None:
        self.is_paused = True

    def client_resumed(self) -> None:
        self.is_paused = False


class Server:
    """What a connection needs of its process, and what a test wants to know."""

    header_timeout_s = 30.0
    body_timeout_s = 60.0
    idle_timeout_s = 75.0
    write_timeout_s = 300.0
    max_head_bytes = 8192
    is_draining = False

    def __init__(self) -> None:
        self.scratch_map = mmap(-1, 65536)
        self.scratch = self.head_scratch = memoryview(self.scratch_map)
        self.now = asyncio.get_running_loop().time
        self.connections: set[DownstreamConnection] = set()
        self.exchanges: asyncio.Queue[Exchange] = asyncio.Queue()
        self.ends: asyncio.Queue[str] = asyncio.Queue()
        self.port = 0

    def opened(self, connection: DownstreamConnection) -> None:
        assert isinstance(connection.transport, TlsTransport)
        self.connections.add(connection)

    def closed(self, connection: DownstreamConnection) -> None:
        self.connections.remove(connection)

    def parse_head(self, raw: bytes) -> RequestHead:
        return parse_request_head(raw, self.max_head_bytes, 64)

    def start_exchange(self, connection: DownstreamConnection, head: RequestHead) -> Exchange:
        return Exchange(self, connection, head)

    def refuse(self, connection: DownstreamConnection, error: MeshError, head: bytes) -> bytes:
        return b"HTTP/1.1 %d x\r\ncontent-length: 0\r\nconnection: close\r\n\r\n" % error.status


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@asynccontextmanager
async def serving(authority: Authority, handshake_timeout_s: float = 10.0) -> AsyncIterator[Server]:
    loop = asyncio.get_running_loop()
    it = Server()
    pair = authority.issue()
    context = server_context(pair.cert, pair.key)

    def connect() -> DownstreamConnection:
        return TlsDownstreamConnection(it)  # type: ignore[arg-type]

    listening = await loop.create_server(
        lambda: TlsGreeter(loop, context, connect, handshake_timeout_s, it.ends.put_nowait), "127.0.0.1", 0
    )
    it.port = listening.sockets[0].getsockname()[1]
    try:
        yield it
    finally:
        listening.close()
        for connection in list(it.connections):
            connection.abort()
        while it.connections:
            await asyncio.sleep(0)


async def dial(
    it: Server, context: ssl.SSLContext | None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", it.port, ssl=context)


def post(body: bytes, extra: bytes = b"") -> bytes:
    return b"POST /x HTTP/1.1\r\nhost: m\r\n%bcontent-length: %d\r\n\r\n%b" % (extra, len(body), body)


def numbered(length: int) -> bytes:
    return (bytes(position * 31 % 251 for position in range(65521)) * (length // 65521 + 1))[:length]


async def digest_of_answer(reader: asyncio.StreamReader) -> bytes:
    await reader.readuntil(b"\r\n\r\n")
    return await reader.readexactly(64)


def cut_tcp(writer: asyncio.StreamWriter) -> None:
    """End the sending side of TCP below TLS, without close_notify."""
    with socket.socket(fileno=os.dup(writer.get_extra_info("socket").fileno())) as sock:
        sock.shutdown(socket.SHUT_WR)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0)


def play(run: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(30):
            await run()

    uvloop.run(main())


def test_bodies_of_all_sizes_land_in_their_room_as_they_were_sent(authority: Authority) -> None:
    async def run() -> None:
        async with serving(authority) as it:
            reader, writer = await dial(it, authority.client_context())
            for length in (1, 16383, 16384, 16385, 65536, 1_000_003, 20_000_000):
                body = numbered(length)
                writer.write(post(body))
                assert await digest_of_answer(reader) == hashlib.sha256(body).hexdigest().encode()
            # Bytes behind a body in the same TLS record are the next request's.
            first, second = numbered(70_000), numbered(3)
            writer.write(post(first) + post(second))
            for body in (first, second):
                assert await digest_of_answer(reader) == hashlib.sha256(body).hexdigest().encode()
            assert it.ends.get_nowait() == ""
            writer.close()

    play(run)


def test_many_clients_at_once_get_their_own_bodies(authority: Authority) -> None:
    async def run() -> None:
        async with serving(authority) as it:

            async def client(number: int) -> None:
                reader, writer = await dial(it, authority.client_context())
                body = b"%d" % number * 100_000
                writer.write(post(body))
                assert await digest_of_answer(reader) == hashlib.sha256(body).hexdigest().encode()
                writer.close()

            await asyncio.gather(*(client(number) for number in range(20)))

    play(run)


@pytest.mark.parametrize(
    "first_bytes", [b"GET / HTTP/1.1\r\nhost: m\r\n\r\n", b"\x16\x03\x01\x00\x02ab", b"\x00" * 64]
)
def test_what_is_not_tls_is_closed_without_an_answer(authority: Authority, first_bytes: bytes) -> None:
    async def run() -> None:
        async with serving(authority, handshake_timeout_s=0.5) as it:  # a part of a record waits for more
            reader, writer = await dial(it, None)
            writer.write(first_bytes)
            try:
                assert await reader.read() == b""
            except ConnectionError:
                pass
            assert await it.ends.get() != ""
            assert not it.connections
            assert it.exchanges.empty()
            writer.close()

    play(run)


def test_a_handshake_that_does_not_come_ends_by_time(authority: Authority) -> None:
    async def run() -> None:
        async with serving(authority, handshake_timeout_s=0.05) as it:
            reader, writer = await dial(it, None)
            assert await reader.read() == b""
            assert "handshake is taking longer" in await it.ends.get()
            writer.close()

    play(run)


def test_a_client_that_leaves_before_the_handshake_is_told_once(authority: Authority) -> None:
    async def run() -> None:
        async with serving(authority) as it:
            for first_bytes in (b"", b"\x16\x03\x01"):
                _, writer = await dial(it, None)
                writer.write(first_bytes)
                writer.close()
                assert await it.ends.get() != ""
            await asyncio.sleep(0.01)
            assert it.ends.empty()
            assert not it.connections

    play(run)


@pytest.mark.parametrize("how", ["close_notify", "end of TCP", "reset"])
def test_a_client_that_leaves_while_it_waits_is_gone_at_once(authority: Authority, how: str) -> None:
    async def run() -> None:
        async with serving(authority) as it:
            _, writer = await dial(it, authority.client_context())
            writer.write(b"GET /x HTTP/1.1\r\nhost: m\r\n\r\n")
            exchange = await it.exchanges.get()
            if how == "close_notify":
                writer.close()
            elif how == "end of TCP":
                cut_tcp(writer)
            else:
                writer.transport.abort()
            await exchange.gone
            writer.transport.abort()
            await until(lambda: not it.connections)

    play(run)


def test_a_client_that_leaves_in_mid_stream_is_gone_though_answers_are_unsent(authority: Authority) -> None:
    async def run() -> None:
        async with serving(authority) as it:
            _, writer = await dial(it, authority.client_context())
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            writer.write(b"GET /x HTTP/1.1\r\nhost: m\r\n\r\n")
            exchange = await it.exchanges.get()
            while not exchange.is_paused:
                exchange.connection.write(CHUNK)
                await asyncio.sleep(0)
            writer.transport.abort()
            await exchange.gone
            await until(lambda: not it.connections)

    play(run)


def test_a_client_that_reads_nothing_bounds_what_is_unsent_and_resumes_when_it_reads(
    authority: Authority,
) -> None:
    async def run() -> None:
        async with serving(authority) as it:
            reader, writer = await dial(it, authority.client_context())
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            writer.write(b"GET /x HTTP/1.1\r\nhost: m\r\n\r\n")
            exchange = await it.exchanges.get()
            transport = exchange.connection.transport
            assert transport is not None
            written = 0
            largest = 0
            while not exchange.is_paused or written < 1 << 20:
                if not exchange.is_paused:
                    exchange.connection.write(CHUNK)
                    written += len(CHUNK)
                    largest = max(largest, transport.get_write_buffer_size())
                await asyncio.sleep(0)
                if exchange.is_paused and written < 1 << 20:
                    break
            assert WRITE_HIGH // 2 <= largest <= WRITE_HIGH + WRITE_LOW + 2 * len(CHUNK)
            writer.transport.resume_reading()  # type: ignore[attr-defined]
            assert len(await reader.readexactly(written)) == written
            await until(lambda: not exchange.is_paused)
            assert transport.get_write_buffer_size() == 0
            writer.close()

    play(run)


def test_a_last_answer_reaches_a_client_whose_request_was_not_read(authority: Authority) -> None:
    async def run() -> None:
        async with serving(authority) as it:
            reader, writer = await dial(it, authority.client_context())
            writer.write(b"not http at all\r\n\r\n" + bytes(3_000_000))
            answer = await reader.read()
            assert answer.startswith(b"HTTP/1.1 400 ")
            assert answer.endswith(b"\r\n\r\n")
            writer.close()
            await until(lambda: not it.connections)

    play(run)


def test_a_closing_answer_ends_with_close_notify_and_an_aborted_one_does_not(authority: Authority) -> None:
    async def run() -> None:
        async with serving(authority) as it:
            reader, writer = await dial(it, authority.client_context())
            writer.write(post(b"x", b"connection: close\r\n"))
            assert len(await reader.read()) > 64  # asyncio would raise at an end without close_notify
            writer.close()
            reader, writer = await dial(it, authority.client_context())
            writer.write(b"GET /x HTTP/1.1\r\nhost: m\r\n\r\n")
            await it.exchanges.get()
            exchange = await it.exchanges.get()
            exchange.connection.write(b"HTTP/1.1 200 OK\r\n\r\nhalf of it")
            assert await reader.readexactly(29) == b"HTTP/1.1 200 OK\r\n\r\nhalf of it"
            exchange.connection.abort(resets=True)
            with pytest.raises(ConnectionResetError):
                await reader.read()
            writer.close()

    play(run)


@pytest.mark.parametrize("how", ["close_notify", "end of TCP", "reset", "our close"])
def test_a_closed_connection_is_freed_without_a_collection(authority: Authority, how: str) -> None:
    def tls_layers() -> int:
        found = sum(type(each).__name__ == "SSLProtocol" for each in gc.get_objects())
        return found - others  # other tests may have left some

    async def run() -> None:
        loop = asyncio.get_running_loop()
        async with serving(authority) as it:
            client = authority.client_context().wrap_socket(
                socket.socket(), server_hostname="127.0.0.1", do_handshake_on_connect=True
            )
            await loop.run_in_executor(None, client.connect, ("127.0.0.1", it.port))
            await until(lambda: bool(it.connections))
            assert tls_layers() == 1
            if how == "close_notify":
                client.setblocking(False)
                with contextlib.suppress(ssl.SSLError):
                    client.unwrap()
            elif how == "end of TCP":
                client.shutdown(socket.SHUT_WR)
            elif how == "reset":
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            else:
                next(iter(it.connections)).close()
            client.close()
            await until(lambda: not it.connections)
            await until(lambda: not tls_layers())

    gc.collect()
    others = 0
    others = tls_layers()
    gc.disable()
    try:
        play(run)
    finally:
        gc.enable()
