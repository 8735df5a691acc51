"""A client connection under pipelined, damaged bytes: what is served never depends on how they were cut."""

from __future__ import annotations

import asyncio
from mmap import mmap

from hypothesis import strategies as st

from meshd.errors import MeshError
from meshd.io.downstream import DownstreamConnection
from meshd.io.http1 import RequestHead, parse_request_head
from tests.fakes.begun import begun
from tests.fakes.transport import FakeClock, FakeTransport
from tests.fuzz import request_head
from tests.fuzz.engine import Target, cuts, main, mutated

LOOP = asyncio.new_event_loop()  # only makes futures
MOST = 64  # bytes of a chunked body
WORDS = [
    *request_head.WORDS, b"0\r\n\r\n", b"5\r\nhello\r\n0\r\n\r\n", b"hello", b"/early",
    b"GET / HTTP/1.1\r\nhost: h\r\n\r\n",
    b"POST /early HTTP/1.1\r\nhost: h\r\ncontent-length: 40\r\n\r\n", b"content-length: 3\r\n",
    b"41\r\n" + b"x" * 65,
]  # fmt: skip


@st.composite
def _requests(draw: st.DrawFn) -> bytes:
    parts = []
    for _ in range(draw(st.integers(1, 4))):
        path = draw(st.sampled_from([b"/", b"/early", b"/v1/x?y"]))
        method = draw(st.sampled_from([b"POST", b"GET", b"DELETE"]))
        extra = draw(
            st.sampled_from(
                [b"", b"", b"expect: 100-continue\r\n", b"connection: close\r\n", b"upgrade: h2c\r\n"]
            )
        )
        body = draw(st.sampled_from([b"hello", b"", b"GET / HTTP/1.1\r\n\r\n"]))
        framing = draw(st.sampled_from([b"content-length: %d\r\n\r\n" % len(body) + body, b"\r\n", b""]))
        if not framing:
            framing = b"transfer-encoding: chunked\r\n\r\n" + (
                b"%x\r\n%b\r\n" % (len(body), body) if body else b""
            )
            framing += b"0\r\n\r\n"
        parts.append(method + b" " + path + b" HTTP/1.1\r\nhost: h\r\n" + extra + framing)
    return b"".join(parts)


class _Room:
    def __init__(self, size: int) -> None:
        self.body = memoryview(bytearray(size))

    def fill(self, data: bytes) -> None:
        self.body[: len(data)] = data

    def grow(self, body_bytes: int) -> bool:
        self.body = memoryview(bytearray(self.body).ljust(body_bytes, b"\0"))
        return True


class _Exchange:
    def __init__(self, head: RequestHead) -> None:
        self.head = head
        self.room: _Room | None = None
        self.ready: asyncio.Future[None] | None = None

    def client_gone(self, cause: str) -> None:
        raise AssertionError(f"the client never leaves here: {cause}")

    def client_paused(self) -> None: ...

    def client_resumed(self) -> None: ...


class _Server:
    """Serves each request as soon as its body is there, or at once and without it below `/early`."""

    header_timeout_s = body_timeout_s = idle_timeout_s = write_timeout_s = 60.0
    max_head_bytes = request_head.LIMIT
    is_draining = False

    def __init__(self) -> None:
        self.scratch_map = mmap(-1, 4096)
        self.scratch = self.head_scratch = memoryview(self.scratch_map)
        self.now = FakeClock()
        self.events: list[tuple[object, ...]] = []
        self.waiting: _Exchange | None = None
        self.connection = DownstreamConnection(self)  # type: ignore[arg-type]
        self.transport = FakeTransport(self.connection)

    def opened(self, connection: DownstreamConnection) -> None: ...

    def closed(self, connection: DownstreamConnection) -> None: ...

    def parse_head(self, raw: bytes) -> RequestHead:
        return parse_request_head(raw, self.max_head_bytes, request_head.MOST_FIELDS)

    def start_exchange(self, connection: DownstreamConnection, head: RequestHead) -> _Exchange:
        assert self.waiting is None, "one request at a time"
        self.waiting = _Exchange(head)
        return self.waiting

    def refuse(self, connection: DownstreamConnection, error: MeshError, head: bytes) -> bytes:
        self.events.append(("refused",))  # of several faults any may show first
        return b"-"

    def serve(self) -> None:
        """Go on with what can be answered."""
        while (exchange := self.waiting) is not None:
            head = exchange.head
            if head.has_body and not head.path.startswith("/early"):
                if exchange.room is None:
                    exchange.room = _Room(16 if head.is_chunked else min(head.content_length or 0, 4096))
                    if (head.content_length or 0) > 4096:
                        self._end(exchange, ("too large",))
                        continue
                    exchange.ready = begun(self.connection, exchange.room, MOST)
                if exchange.ready is not None and not exchange.ready.done():
                    return
                failure = exchange.ready.exception() if exchange.ready is not None else None
                if failure is not None:
                    assert isinstance(failure, MeshError)
                    self._end(exchange, ("body refused",), closes=True)
                    continue
                received = bytes(exchange.room.body[: self.connection.body_received])
                self._end(exchange, ("body", received))
            else:
                self._end(exchange, ("answered",))

    def _end(self, exchange: _Exchange, how: tuple[object, ...], closes: bool = False) -> None:
        head = exchange.head
        self.events.append((head.method, head.target, *how))
        self.waiting = None
        must_close = closes or not head.keeps_alive or self.connection.must_close_after()
        self.connection.write(b"+")
        self.connection.finish(must_close)


def _converse(pieces: list[bytes]) -> tuple[list[tuple[object, ...]], bytes, bool]:
    """Return what was served, what was written, and whether our side is shut."""
    server = _Server()
    for piece in pieces:
        if server.transport.is_closing():
            break
        server.transport.receive(piece)
        server.serve()
    is_shut = server.transport.is_closing() or server.transport.has_written_eof
    if server.waiting is not None and server.waiting.ready is not None:
        server.waiting.ready.cancel()
    return server.events, bytes(server.transport.sent), is_shut


async def _check(data: bytes) -> None:
    whole = _converse([data])
    assert len(whole[1]) == len(whole[0])
    for pieces in cuts(data):
        assert _converse(pieces) == whole, pieces


def check(data: bytes) -> None:
    LOOP.run_until_complete(_check(data))


TARGET = Target("client_connection", mutated(_requests(), WORDS), check)

if __name__ == "__main__":
    main(TARGET)
