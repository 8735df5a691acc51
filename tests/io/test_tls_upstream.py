"""Upstream connections over TLS, against real https servers on the loopback."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
import uvloop

from meshd.io.chunked import ChunkedDecoder
from meshd.io.http1 import ResponseHead
from meshd.io.pool import Address, UpstreamPool
from meshd.io.upstream import UpstreamConnection, UpstreamFailure
from meshd.tls import client_context
from tests.fakes.asked import asked, attached
from tests.fakes.certificates import Authority

REQUEST = b"POST /x HTTP/1.1\r\nhost: u\r\ncontent-length: %d\r\n\r\n"
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
TILL_END = b"HTTP/1.1 200 OK\r\n\r\nbody"

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Sink:
    def __init__(self) -> None:
        self.data = b""
        self.ended: asyncio.Future[UpstreamFailure | None] = asyncio.get_running_loop().create_future()

    def pass_chunks(self, data: bytes, decoder: ChunkedDecoder) -> bool:
        return False

    def body_data(self, data: bytes) -> None:
        self.data += data

    def body_end(self) -> None:
        self.ended.set_result(None)

    def body_failed(self, failure: UpstreamFailure) -> None:
        self.ended.set_result(failure)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


def pool_with(context: ssl.SSLContext, connect_timeout_s: float = 5.0) -> UpstreamPool:
    return UpstreamPool(
        asyncio.get_running_loop(),
        idle_timeout_s=4.0,
        connect_timeout_s=connect_timeout_s,
        tls=lambda: context,
    )


@asynccontextmanager
async def serving(
    serve: Serve, context: ssl.SSLContext | None, host: str = "127.0.0.1"
) -> AsyncIterator[Address]:
    writers: list[asyncio.StreamWriter] = []

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        try:
            await serve(reader, writer)
        except (OSError, asyncio.IncompleteReadError):
            pass

    server = await asyncio.start_server(accept, "127.0.0.1", 0, ssl=context)
    port = server.sockets[0].getsockname()[1]
    try:
        yield Address(f"https://{host}:{port}", host, port, is_tls=True)
    finally:
        for writer in writers:
            writer.transport.abort()
        server.close()


async def answer_ok(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while True:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(OK)


async def ask(connection: UpstreamConnection, body: bytes = b"") -> tuple[ResponseHead, Sink]:
    sink = Sink()
    head = await asked(connection, "POST", REQUEST % len(body), [memoryview(body)] if body else ())
    attached(connection, sink)
    return head, sink


def play(run: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(20):
            await run()

    uvloop.run(main())


def test_exchange_over_tls_leaves_a_connection_that_is_used_again(authority: Authority) -> None:
    async def run() -> None:
        async with serving(answer_ok, authority.server_context()) as address:
            pool = pool_with(client_context((authority.path,)))
            connection = await pool.connect(address)
            for _ in range(2):
                head, sink = await ask(connection)
                assert (head.status, sink.data) == (200, b"ok")
                assert connection.is_sent
                pool.release(connection)
                assert pool.try_idle(address) is connection
            assert connection.transport is not None
            assert connection.transport.get_extra_info("ssl_object").version() == "TLSv1.3"
            pool.close_all()

    play(run)


@pytest.mark.parametrize(
    ("names", "host", "problem"),
    [
        ((), "localhost", ""),
        (("llm.internal",), "127.0.0.1", "IP address mismatch"),
        (("::1",), "localhost", "mismatch"),
    ],
)
def test_the_name_of_the_url_must_be_in_the_certificate(
    authority: Authority, names: tuple[str, ...], host: str, problem: str
) -> None:
    async def run() -> None:
        async with serving(answer_ok, authority.server_context(*names), host) as address:
            pool = pool_with(client_context((authority.path,)))
            if not problem:
                assert (await ask(await pool.connect(address)))[0].status == 200
            else:
                with pytest.raises(UpstreamFailure, match=problem) as caught:
                    await pool.connect(address)
                assert caught.value.code == "upstream_connection_failed"
            pool.close_all()

    play(run)


def test_a_certificate_of_an_unknown_authority_is_refused(authority: Authority) -> None:
    async def run() -> None:
        async with serving(answer_ok, authority.server_context()) as address:
            with pytest.raises(UpstreamFailure, match="unable to get local issuer") as caught:
                await pool_with(client_context(())).connect(address)
            assert caught.value.code == "upstream_connection_failed"

    play(run)


def test_an_upstream_that_speaks_no_tls_is_never_spoken_to_in_plain(authority: Authority) -> None:
    seen: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(await reader.read(1000))
        writer.write(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n")

    async def run() -> None:
        async with serving(serve, None) as address:
            with pytest.raises(UpstreamFailure) as caught:
                await pool_with(client_context((authority.path,))).connect(address)
            assert caught.value.code == "upstream_connection_failed"
        assert b"HTTP" not in seen[0]

    play(run)


@pytest.mark.parametrize("leaves", [True, False])
def test_a_handshake_that_does_not_end_is_a_failure_and_leaves_nothing_open(
    authority: Authority, leaves: bool
) -> None:
    ended: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if leaves:
            writer.close()
        await reader.read()
        ended.append(b"")

    async def run() -> None:
        async with serving(serve, None) as address:
            pool = pool_with(client_context((authority.path,)), connect_timeout_s=5.0 if leaves else 0.05)
            with pytest.raises(UpstreamFailure) as caught:
                await pool.connect(address)
            assert caught.value.code == (
                "upstream_connection_failed" if leaves else "upstream_connect_timeout"
            )
            while not ended:
                await asyncio.sleep(0)
            assert repr(pool) == "UpstreamPool(open=0 idle=0 busy=0)"

    play(run)


@pytest.mark.parametrize("name", ["a" * 70 + ".example", ".example"])
def test_a_name_that_cannot_be_is_a_failure_to_connect(authority: Authority, name: str) -> None:
    async def run() -> None:
        with pytest.raises(UpstreamFailure) as caught:
            await pool_with(client_context((authority.path,))).connect(Address("x", name, 9, is_tls=True))
        assert caught.value.code == "upstream_connection_failed"

    play(run)


def test_a_large_body_arrives_whole_from_an_upstream_that_reads_slowly(authority: Authority) -> None:
    body = bytes(position * 31 % 251 for position in range(1_000_003)) * 9
    received: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        left = len(body)
        while left:
            received.append(await reader.read(50_000))
            left -= len(received[-1])
            await asyncio.sleep(0)
        writer.write(OK)

    async def run() -> None:
        async with serving(serve, authority.server_context()) as address:
            pool = pool_with(client_context((authority.path,)))
            head, sink = await ask(await pool.connect(address), body)
            assert (head.status, sink.data) == (200, b"ok")
            assert b"".join(received) == body
            pool.close_all()

    play(run)


def test_what_the_upstream_has_not_taken_counts_as_unsent(authority: Authority) -> None:
    may_read = asyncio.Event()
    body = bytes(30 << 20)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        await may_read.wait()
        writer.write(b"HTTP/1.1 413 Too Large\r\ncontent-length: 2\r\n\r\nno")

    async def run() -> None:
        async with serving(serve, authority.server_context()) as address:
            pool = pool_with(client_context((authority.path,)))
            connection = await pool.connect(address)
            waiting = asked(connection, "POST", REQUEST % len(body), [memoryview(body)])
            size = -1
            transport = connection.transport
            assert transport is not None
            while transport.get_write_buffer_size() != size:  # until the kernel takes no more
                size = transport.get_write_buffer_size()
                await asyncio.sleep(0.05)
            assert size > 10 << 20
            assert not connection.is_sent
            may_read.set()
            head = await waiting
            attached(connection, Sink())
            assert head.status == 413
            # An early answer stands, but the rest of that body must not run into a next request.
            assert not connection.is_reusable
            pool.release(connection)
            assert repr(pool) == "UpstreamPool(open=0 idle=0 busy=0)"
            assert transport.get_write_buffer_size() < 1 << 20  # ciphertext at most, of the body nothing

    play(run)


@pytest.mark.parametrize("is_true_end", [True, False])
def test_a_body_that_ends_with_the_connection_is_whole_only_with_close_notify(
    authority: Authority, is_true_end: bool
) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(TILL_END)
        await writer.drain()
        if is_true_end:
            writer.close()
        else:
            with socket.socket(fileno=os.dup(writer.get_extra_info("socket").fileno())) as sock:
                sock.shutdown(socket.SHUT_WR)  # what anybody on the path can do

    async def run() -> None:
        async with serving(serve, authority.server_context()) as address:
            pool = pool_with(client_context((authority.path,)))
            _, sink = await ask(await pool.connect(address))
            failure = await sink.ended
            assert sink.data == b"body"
            assert (failure is None) is is_true_end
            if failure is not None:
                assert failure.code == "upstream_connection_failed"
            pool.close_all()

    play(run)


def test_closing_a_connection_reaches_the_upstream_at_once_though_a_body_is_unsent(
    authority: Authority,
) -> None:
    async def run() -> None:
        gone = asyncio.get_running_loop().create_future()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            try:
                while await reader.read(1 << 16):
                    pass
            except OSError:
                pass
            gone.set_result(None)

        async with serving(serve, authority.server_context()) as address:
            pool = pool_with(client_context((authority.path,)))
            connection = await pool.connect(address)
            waiting = asked(connection, "POST", REQUEST % (64 << 20), [memoryview(bytes(64 << 20))])
            connection.close()
            await gone
            waiting.cancel()
            assert repr(pool) == "UpstreamPool(open=0 idle=0 busy=0)"

    play(run)


def test_our_certificate_opens_an_upstream_that_asks_for_one(authority: Authority) -> None:
    async def run() -> None:
        async with serving(answer_ok, authority.server_context(asks_for_certificate=True)) as address:
            pair = authority.issue("meshd.internal")
            pool = pool_with(client_context((authority.path,), pair.cert, pair.key))
            assert (await ask(await pool.connect(address)))[0].status == 200
            pool.close_all()
            # Without one TLS 1.3 tells it only after the handshake, on the first exchange.
            pool = pool_with(client_context((authority.path,)))
            with pytest.raises(UpstreamFailure) as caught:
                await ask(await pool.connect(address))
            assert caught.value.code == "upstream_connection_failed"
            pool.close_all()

    play(run)
