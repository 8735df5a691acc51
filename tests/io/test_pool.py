"""The pool of upstream connections, against real sockets on the loopback."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import uvloop

from meshd.io.chunked import ChunkedDecoder
from meshd.io.pool import MAX_IDLE_LOCAL, MAX_IDLE_PER_ORIGIN, Address, UpstreamPool, address_of, authority_of
from meshd.io.resolver import look_up
from meshd.io.upstream import UpstreamConnection, UpstreamFailure
from meshd.routing.upstream import Upstream
from tests.fakes.asked import asked, attached
from tests.fakes.transport import FakeClock

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
REQUEST = b"GET /x HTTP/1.1\r\nhost: u\r\n\r\n"


class Nothing:
    def pass_chunks(self, data: bytes, decoder: ChunkedDecoder) -> bool:
        return False

    def body_data(self, data: bytes) -> None: ...

    def body_end(self) -> None: ...

    def body_failed(self, failure: UpstreamFailure) -> None: ...


class Scene:
    """A pool, and a server that answers each request head with ``answer``."""

    def __init__(self, answer: bytes, connect_timeout_s: float = 5.0) -> None:
        self.answer = answer
        self.names: dict[str, list[str]] = {}
        self.clock = FakeClock()
        self.counts: list[int] = []
        self.accepted: list[asyncio.StreamWriter] = []
        self.pool = UpstreamPool(
            asyncio.get_running_loop(),
            idle_timeout_s=4.0,
            connect_timeout_s=connect_timeout_s,
            on_count=self.counts.append,
            lookup=lambda name: self.names[name] if name in self.names else look_up(name),
            clock=self.clock,
        )
        self.address = Address("none")

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted.append(writer)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                await reader.readuntil(b"\r\n\r\n")
                writer.write(self.answer)

    async def take(self) -> UpstreamConnection:
        return self.pool.try_idle(self.address) or await self.pool.connect(self.address)

    async def exchange(self, connection: UpstreamConnection) -> None:
        await asked(connection, "GET", REQUEST)
        attached(connection, Nothing())

    async def used(self) -> UpstreamConnection:
        connection = await self.take()
        await self.exchange(connection)
        return connection

    @property
    def open(self) -> int:
        return sum(self.counts)


@contextlib.asynccontextmanager
async def scene(answer: bytes = OK, **options: float) -> AsyncIterator[Scene]:
    it = Scene(answer, **options)
    server = await asyncio.start_server(it.serve, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    it.address = Address(f"http://{host}:{port}", host, port)
    try:
        yield it
    finally:
        it.pool.close_all()
        for writer in it.accepted:
            writer.transport.abort()
        server.close()


def play(run: Callable[[], Awaitable[None]]) -> None:
    """Run on the loop that meshd runs on: transports differ in what they say at the end."""

    async def main() -> None:
        await run()

    uvloop.run(main())


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0)


def test_most_recently_used_idle_connection_is_taken_first():
    async def run() -> None:
        async with scene() as it:
            first, second = await it.used(), await it.used()
            assert first is not second
            it.pool.release(first)
            it.pool.release(second)
            assert repr(it.pool) == "UpstreamPool(open=2 idle=2 busy=0)"
            assert await it.take() is second
            assert await it.take() is first
            assert it.pool.try_idle(it.address) is None
            assert len(it.accepted) == 2

    play(run)


def test_connection_is_reused_for_a_second_exchange():
    async def run() -> None:
        async with scene() as it:
            connection = await it.used()
            it.pool.release(connection)
            assert await it.used() is connection
            assert connection.is_reusable and len(it.accepted) == 1

    play(run)


def test_idle_connection_is_not_used_after_its_time():
    async def run() -> None:
        async with scene() as it:
            it.pool.release(await it.used())
            it.clock.advance(3.9)
            connection = it.pool.try_idle(it.address)
            assert connection is not None
            await it.exchange(connection)
            it.pool.release(connection)
            it.clock.advance(4.0)
            assert it.pool.try_idle(it.address) is None
            assert connection.is_closed and it.open == 0

    play(run)


def test_sweep_closes_what_is_too_old_and_keeps_the_rest():
    async def run() -> None:
        async with scene() as it:
            old, young = await it.take(), await it.take()
            await it.exchange(old)
            it.pool.release(old)
            it.clock.advance(3)
            await it.exchange(young)
            it.pool.release(young)
            it.clock.advance(1)
            it.pool.sweep()
            assert old.is_closed and not young.is_closed and it.open == 1
            it.clock.advance(3)
            it.pool.sweep()
            assert young.is_closed and it.open == 0

    play(run)


def test_idle_connection_whose_end_was_seen_is_never_handed_out():
    async def run() -> None:
        async with scene() as it:
            first, second = await it.used(), await it.used()
            it.pool.release(first)
            it.pool.release(second)
            it.accepted[1].close()
            await until(lambda: second.is_closed)
            assert it.pool.try_idle(it.address) is first
            assert it.open == 1

    play(run)


def test_idle_connection_that_got_data_is_never_handed_out():
    async def run() -> None:
        async with scene() as it:
            connection = await it.used()
            it.pool.release(connection)
            it.accepted[0].write(b"HTTP/1.1 408 Request Timeout\r\n\r\n")
            await until(lambda: connection.is_closed)
            assert it.pool.try_idle(it.address) is None and it.open == 0

    play(run)


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok",
        b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok!",
        b"HTTP/1.1 200 OK\r\nContent-Length: 20\r\n\r\nok",
    ],
)
def test_connection_that_is_not_clean_is_closed(answer):
    async def run() -> None:
        async with scene(answer) as it:
            connection = await it.used()
            it.pool.release(connection)
            assert connection.is_closed and it.open == 0
            assert it.pool.try_idle(it.address) is None

    play(run)


@pytest.mark.parametrize("what", [b"HTTP/1.1 408 Request Timeout\r\n\r\n", b""])
def test_idle_connection_is_not_used_when_the_kernel_knows_more_of_it_than_the_loop(what):
    """Data, or an end, that has come since the loop last looked."""

    async def run() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            async with scene() as it:
                it.address = Address("x", *listener.getsockname())
                connection = await it.pool.connect(it.address)
                peer, _ = listener.accept()
                with peer:
                    peer.sendall(OK)
                    await it.exchange(connection)
                    it.pool.release(connection)
                    if what:
                        peer.sendall(what)
                    else:
                        peer.shutdown(socket.SHUT_WR)
                    # No turn of the loop in between.
                    assert not connection.is_closed
                    assert it.pool.try_idle(it.address) is None
                    assert connection.is_closed and it.open == 0

    play(run)


def test_zero_idle_time_never_reuses():
    async def run() -> None:
        async with scene() as it:
            it.pool._idle_timeout_s = 0
            connection = await it.used()
            it.pool.release(connection)
            assert connection.is_closed and it.open == 0

    play(run)


def test_idle_connections_of_an_origin_are_bounded():
    async def run() -> None:
        async with scene() as it:
            connections = await asyncio.gather(*(it.used() for _ in range(MAX_IDLE_PER_ORIGIN + 3)))
            for connection in connections:
                it.pool.release(connection)
            assert f"open={MAX_IDLE_PER_ORIGIN} idle={MAX_IDLE_PER_ORIGIN} busy=0" in repr(it.pool)

    play(run)


def test_origins_do_not_share_idle_connections():
    async def run() -> None:
        async with scene() as it:
            it.pool.release(await it.used())
            assert it.pool.try_idle(Address("http://other", it.address.host, it.address.port)) is None
            it.pool.close_idle(it.address.key)
            assert it.pool.try_idle(it.address) is None and it.open == 0

    play(run)


def test_refused_connect_is_a_connection_failure():
    async def run() -> None:
        async with scene() as it:
            with socket.socket() as unused:  # bound and not listening: nobody else gets the port
                unused.bind(("127.0.0.1", 0))
                with pytest.raises(UpstreamFailure) as caught:
                    await it.pool.connect(Address("x", *unused.getsockname()))
            assert caught.value.code == "upstream_connection_failed"
            assert not caught.value.was_sent and not caught.value.has_response_bytes
            assert it.open == 0

    play(run)


def test_unresolvable_name_is_a_connection_failure():
    async def run() -> None:
        async with scene() as it:
            with pytest.raises(UpstreamFailure) as caught:
                await it.pool.connect(Address("x", "name.invalid", 80))
            assert caught.value.code == "upstream_connection_failed" and it.open == 0

    play(run)


def closed_port(address: str) -> tuple[socket.socket, int]:
    """Return a port of ``address`` that refuses; nobody else gets it while the socket is open."""
    unused = socket.socket()
    unused.bind((address, 0))
    return unused, unused.getsockname()[1]


def test_addresses_of_a_name_are_tried_in_order_and_the_one_that_answers_comes_first_from_then_on():
    async def run() -> None:
        async with scene() as it:
            it.names["name"] = ["127.0.0.9", "::1", it.address.host]  # the server listens at the last alone
            it.address = Address("x", "name", it.address.port)
            connection = await it.used()
            assert (connection.name, connection.remote) == ("name", "127.0.0.1")
            assert it.pool._resolver.known("name") == ("127.0.0.1", "127.0.0.9", "::1")

    play(run)


def test_name_with_no_address_that_answers_is_a_connection_failure():
    async def run() -> None:
        async with scene() as it:
            unused, port = closed_port("127.0.0.1")
            it.names["name"] = ["127.0.0.1", "127.0.0.9"]
            with unused, pytest.raises(UpstreamFailure) as caught:
                await it.pool.connect(Address("x", "name", port))
            assert caught.value.code == "upstream_connection_failed" and it.open == 0

    play(run)


class Unanswered:
    """A listener that completes no further connection: the queue of those it has not accepted is full."""

    def __init__(self, address: str, port: int = 0) -> None:
        self._listener = socket.socket()
        self._listener.bind((address, port))
        self._listener.listen(0)
        self.port = self._listener.getsockname()[1]
        self._fill = []
        for _ in range(4):
            sock = socket.socket()
            sock.setblocking(False)
            sock.connect_ex((address, self.port))
            self._fill.append(sock)

    def close(self) -> None:
        for sock in (self._listener, *self._fill):
            sock.close()


def test_address_that_never_answers_leaves_time_for_the_next():
    async def run() -> None:
        async with scene(connect_timeout_s=2.0) as it:
            silent = Unanswered("127.0.0.9", it.address.port)
            try:
                it.names["name"] = ["127.0.0.9", "127.0.0.1"]
                connection = await it.pool.connect(Address("x", "name", it.address.port))
                assert connection.remote == "127.0.0.1"
                it.names["silent"] = ["127.0.0.9"]
                pool = it.pool
                pool._connect_timeout_s = 0.2
                with pytest.raises(UpstreamFailure) as caught:
                    await pool.connect(Address("x", "silent", it.address.port))
                assert caught.value.code == "upstream_connect_timeout"
            finally:
                silent.close()

    play(run)


def test_name_that_moves_is_followed_by_a_busy_pool():
    """Its connections are used all the time, so that none ever expires."""

    async def run() -> None:
        async with scene() as it:
            it.names["name"] = ["127.0.0.1"]
            port = it.address.port
            it.address = Address("x", "name", port)
            idle, busy = await it.used(), await it.used()
            it.pool.release(idle)
            it.names["name"] = ["127.0.0.2"]
            second = await asyncio.start_server(it.serve, "127.0.0.2", port)
            for _ in range(3):
                it.clock.advance(3)
                assert await it.used() is idle  # the answer is not 10 s old yet
                it.pool.release(idle)
                it.pool.sweep()
            it.clock.advance(1)
            it.pool.sweep()  # the lookup begins
            await until(lambda: idle.is_closed)
            it.pool.release(busy)
            assert busy.is_closed and it.pool.try_idle(it.address) is None
            assert (await it.used()).remote == "127.0.0.2"
            second.close()

    play(run)


def test_name_that_cannot_be_looked_up_for_a_while_keeps_its_connections():
    async def run() -> None:
        async with scene() as it:
            it.names["name"] = ["127.0.0.1"]
            it.address = Address("x", "name", it.address.port)
            connection = await it.take()
            it.clock.advance(11)
            await it.exchange(connection)
            it.names["name"] = []
            with pytest.raises(UpstreamFailure) as caught:
                await it.pool.connect(it.address)
            assert caught.value.code == "upstream_connection_failed"
            it.pool.release(connection)
            assert it.pool.try_idle(it.address) is connection

    play(run)


def test_connect_that_is_not_answered_in_time_is_a_connect_timeout():
    async def run() -> None:
        async with scene(connect_timeout_s=0.0) as it:
            with pytest.raises(UpstreamFailure) as caught:
                await it.pool.connect(it.address)
            assert caught.value.code == "upstream_connect_timeout" and it.open == 0

    play(run)


def test_cancelled_connect_leaves_nothing_open():
    async def run() -> None:
        async with scene() as it:
            for turns in range(12):
                task = asyncio.ensure_future(it.pool.connect(it.address))
                for _ in range(turns):
                    await asyncio.sleep(0)
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    it.pool.release(await task)
                assert it.open == 0, turns

    play(run)


def test_abandoned_exchanges_leave_no_busy_connection():
    async def run() -> None:
        async with scene(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n") as it:
            for _ in range(100):
                connection = await it.used()
                connection.close()
                it.pool.release(connection)
            assert repr(it.pool) == "UpstreamPool(open=0 idle=0 busy=0)"
            assert it.open == 0 and it.pool.busy() == []

    play(run)


class EndsAtOnce:
    """A loop whose connections see the end of the stream before anybody holds them."""

    async def create_connection(self, factory: Callable[[], UpstreamConnection], host: str, port: int):
        transport, connection = await asyncio.get_running_loop().create_connection(factory, host, port)
        connection.eof_received()
        return transport, connection


def test_connection_that_ends_at_once_is_a_failure_and_is_not_kept():
    async def run() -> None:
        async with scene() as it:
            pool = UpstreamPool(EndsAtOnce(), idle_timeout_s=15.0, connect_timeout_s=5.0)
            with pytest.raises(UpstreamFailure) as caught:
                await pool.connect(it.address)
            assert (caught.value.code, caught.value.cause) == ("upstream_connection_failed", "closed at once")
            assert repr(pool) == "UpstreamPool(open=0 idle=0 busy=0)"

    play(run)


@pytest.mark.parametrize("how", ["eof", "reset"])
def test_upstream_that_leaves_mid_request_gets_no_more_of_it(how):
    """The rest must not be flushed out of a slot that another request may have by then."""

    async def run() -> None:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen()
            listener.setblocking(False)
            async with scene() as it:
                loop = asyncio.get_running_loop()
                connection = await it.pool.connect(Address("x", *listener.getsockname()))
                peer, _ = await loop.sock_accept(listener)
                waiting = asked(connection, "POST", REQUEST, [memoryview(bytes(16 << 20))])
                await until(lambda: not connection.is_sent)
                if how == "eof":
                    peer.shutdown(socket.SHUT_WR)
                else:
                    peer.close()  # with unread data: a reset
                with pytest.raises(UpstreamFailure) as caught:
                    await waiting
                assert caught.value.code == "upstream_connection_failed" and not caught.value.was_sent
                assert connection.is_closed
                await until(lambda: it.open == 0)
                peer.close()

    play(run)


def test_unix_socket_is_an_address_too():
    async def run() -> None:
        async with scene() as it:
            sock = socket.socket(socket.AF_UNIX)
            sock.bind("")  # the system picks an abstract name
            path = "\0" + sock.getsockname()[1:].decode()
            server = await asyncio.start_unix_server(it.serve, sock=sock)
            it.address = Address("controller", unix_path=path)
            connection = await it.used()
            it.pool.release(connection)
            assert await it.used() is connection
            connection.close()
            assert it.counts == [], "it is no connection to an upstream"
            server.close()
            missing = Address("gone", unix_path="\0meshd-test-no-such-socket")
            with pytest.raises(UpstreamFailure) as caught:
                await it.pool.connect(missing)
            assert caught.value.code == "upstream_connection_failed"

    play(run)


def test_few_idle_connections_to_the_controller_are_kept():
    async def run() -> None:
        async with scene() as it:
            sock = socket.socket(socket.AF_UNIX)
            sock.bind("")
            path = "\0" + sock.getsockname()[1:].decode()
            server = await asyncio.start_unix_server(it.serve, sock=sock)
            it.address = Address("controller", unix_path=path)
            used = [await it.used() for _ in range(20)]
            for connection in used:
                it.pool.release(connection)
            assert sum(not connection.is_closed for connection in used) == MAX_IDLE_LOCAL
            server.close()

    play(run)


@pytest.mark.parametrize(
    ("url", "authority"),
    [
        ("http://h", "h"),
        ("http://h:80", "h"),
        ("http://h:8080", "h:8080"),
        ("https://h:443", "h"),
        ("https://h:80", "h:80"),
        ("http://[::1]:8080", "[::1]:8080"),
        ("http://[::1]", "[::1]"),
    ],
)
def test_authority_leaves_out_the_default_port(url, authority):
    assert authority_of(Upstream(0, "a", url)) == authority


def test_ranks_of_an_origin_share_an_address():
    first, second = (Upstream(n, "a", "http://h:1", dp_rank=n) for n in range(2))
    assert address_of(first) == address_of(second)
