"""Conversations with a client connection: one request at a time, whatever the client does with its bytes."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from mmap import mmap
from typing import Any

import pytest

from meshd.errors import MeshError
from meshd.io.client_socket import WRITE_HIGH, WRITE_LOW
from meshd.io.downstream import (
    DISCARD_SECS,
    HEAD_READ_BYTES,
    KEEPABLE_REST_BYTES,
    LINGER_BYTES,
    LINGER_SECS,
    MAX_KEPT_HEAD_BYTES,
    MAX_PENDING_BYTES,
    DownstreamConnection,
)
from meshd.io.http1 import RequestHead, parse_request_head
from tests.fakes.begun import begun
from tests.fakes.transport import FakeClock, FakeTransport

SCRATCH_BYTES = 16384
MOST = 1 << 20


class Room:
    """Room for a body; ``growth`` bounds what it may become, 0 for a node without memory."""

    def __init__(self, size: int, growth: int = 1 << 30) -> None:
        self.body = memoryview(bytearray(size))
        self.growth = growth

    def fill(self, data: bytes) -> None:
        self.body[: len(data)] = data

    def grow(self, body_bytes: int) -> bool:
        if body_bytes > self.growth:
            return False
        self.body = memoryview(bytearray(self.body).ljust(body_bytes, b"\0"))
        return True


class Exchange:
    """What a connection tells the exchange in progress on it."""

    def __init__(self, head: RequestHead) -> None:
        self.head = head
        self.gone: list[str] = []
        self.pressure: list[str] = []

    def client_gone(self, cause: str) -> None:
        self.gone.append(cause)

    def client_paused(self) -> None:
        self.pressure.append("paused")

    def client_resumed(self) -> None:
        self.pressure.append("resumed")


class Scene:
    """A process with one client; the test plays client, exchange and time."""

    header_timeout_s = 30.0
    body_timeout_s = 60.0
    idle_timeout_s = 75.0
    write_timeout_s = 300.0
    max_head_bytes = 8192
    is_draining = False

    def __init__(self, turned_away: MeshError | None = None) -> None:
        self.scratch_map = mmap(-1, SCRATCH_BYTES)
        self.scratch = memoryview(self.scratch_map)
        self.head_scratch = self.scratch[:HEAD_READ_BYTES]
        self.parsed = 0
        self.now = FakeClock()
        self.turned_away = turned_away
        self.exchanges: list[Exchange] = []
        self.refused: list[MeshError] = []
        self.is_open = False
        self.room = Room(0)
        self.connection = DownstreamConnection(self)  # type: ignore[arg-type]
        self.transport = FakeTransport(self.connection)

    # -------------------------------------------------------------------- what the connection calls

    def opened(self, connection: DownstreamConnection) -> None:
        assert not self.is_open
        self.is_open = True
        if self.turned_away is not None:
            connection.turn_away(self.turned_away)

    def closed(self, connection: DownstreamConnection) -> None:
        assert self.is_open
        self.is_open = False

    def parse_head(self, raw: bytes) -> RequestHead:
        self.parsed += 1
        return parse_request_head(raw, self.max_head_bytes, 64)

    def start_exchange(self, connection: DownstreamConnection, head: RequestHead) -> Exchange:
        self.exchanges.append(Exchange(head))
        return self.exchanges[-1]

    def refuse(self, connection: DownstreamConnection, error: MeshError, head: bytes) -> bytes:
        self.refused.append(error)
        return b"<%d>" % error.status

    # ------------------------------------------------------------------------------ what a test plays

    def receive(self, *pieces: bytes) -> None:
        for piece in pieces:
            if piece and not self.transport.is_closing():
                self.transport.receive(piece)

    def receive_some(self, data: bytes) -> int:
        """Deliver what the connection reads; return how much that was."""
        before = self.transport.delivered
        self.transport.receive(data)
        return self.transport.delivered - before

    def begin_body(self, room: Room, most: int) -> asyncio.Future[None] | None:
        """The exchange in progress has room for the body."""
        self.room = room
        return begun(self.connection, room, most)

    def answer(self, text: bytes = b"<200>", closes: bool = False) -> None:
        """The exchange in progress answers, and ends the connection if it must."""
        must_close = closes or self.connection.must_close_after()
        self.connection.write(text)
        self.connection.finish(must_close)

    def pass_time(self, seconds: float) -> None:
        """Let time pass; timers are looked at ten times a second."""
        end = self.now.now + seconds
        while self.now.now < end:
            self.now.now = min(end, self.now.now + 0.1)
            self.connection.check_deadline(self.now.now)
            self.transport.settle()

    @property
    def exchange(self) -> Exchange:
        return self.exchanges[-1]

    @property
    def paths(self) -> list[str]:
        return [exchange.head.path for exchange in self.exchanges]

    @property
    def sent(self) -> bytes:
        return bytes(self.transport.sent)

    @property
    def state(self) -> str:
        return repr(self.connection).split()[1]


def play(scene: Callable[[], Any]) -> None:
    """Run ``scene`` inside a running loop; a coroutine is awaited."""

    async def run() -> None:
        result = scene()
        if result is not None:
            await result

    asyncio.run(run())


def get(path: str = "/a", *fields: str) -> bytes:
    return "\r\n".join([f"GET {path} HTTP/1.1", "Host: h", *fields, "", ""]).encode()


def post(length: int, path: str = "/p", *fields: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: h", f"Content-Length: {length}", *fields, "", ""]
    return "\r\n".join(lines).encode()


CHUNKED_HEAD = b"POST /c HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n"


def body_of(scene: Scene) -> bytes:
    return bytes(scene.room.body[: scene.connection.body_received])


# ------------------------------------------------------------------------------------ ordinary life


def test_head_cut_at_every_byte_starts_one_exchange():
    raw = b"\r\n" + get("/a?b=c", "X: y")

    def scene() -> None:
        for cut in range(len(raw) + 1):
            it = Scene()
            it.receive(raw[:cut], raw[cut:])
            assert it.paths == ["/a"] and it.state == "BUSY"
            it.answer()
            assert it.sent == b"<200>" and it.connection.is_idle
        it = Scene()
        it.receive(*(raw[at : at + 1] for at in range(len(raw))))
        assert it.paths == ["/a"]

    play(scene)


def test_sized_body_lands_in_its_slot_wherever_it_is_cut():
    body = bytes(range(256))
    raw = post(256) + body + get("/next")

    def scene() -> None:
        for cut in range(len(raw) + 1):
            it = Scene()
            it.receive(raw[:cut])
            is_early = bool(it.exchanges)
            ready = it.begin_body(Room(4096), MOST) if is_early else None
            it.receive(raw[cut:])
            if not is_early:
                ready = it.begin_body(Room(4096), MOST)
            assert ready is None or ready.done()
            assert body_of(it) == body, cut
            assert it.paths == ["/p"]
            it.answer()
            assert it.paths == ["/p", "/next"]
            it.answer()
            assert it.state == "HEAD" and not it.refused

    play(scene)


def test_chunked_body_lands_in_its_slot_wherever_it_is_cut():
    raw = CHUNKED_HEAD + b"5;x=y\r\nhello\r\n6\r\n world\r\n0\r\nauthorization: x\r\n\r\n" + get("/next")

    def scene() -> None:
        for cut in range(len(raw) + 1):
            it = Scene()
            it.receive(raw[:cut])
            is_early = bool(it.exchanges)
            ready = it.begin_body(Room(16), MOST) if is_early else None
            it.receive(raw[cut:])
            if not is_early:
                ready = it.begin_body(Room(16), MOST)
            assert ready is not None and ready.result() is None
            assert body_of(it) == b"hello world", cut
            it.answer()
            assert it.paths == ["/c", "/next"]
            assert b"authorization" not in it.exchange.head.values

    play(scene)


def test_sized_body_is_received_straight_into_the_slot():
    def scene() -> None:
        it = Scene()
        it.receive(post(100_000))
        room = Room(131072)
        ready = it.begin_body(room, MOST)
        buffer = it.connection.get_buffer(-1)
        assert len(buffer) == 100_000 and buffer.obj is room.body.obj
        it.receive(b"x" * 99_999)
        assert not ready.done() and len(it.connection.get_buffer(-1)) == 1
        it.receive(b"y")
        assert ready.done() and body_of(it) == b"x" * 99_999 + b"y"
        assert it.connection.get_buffer(-1).obj is it.scratch.obj

    play(scene)


def test_head_that_comes_again_is_not_parsed_again_whatever_its_length():
    def scene() -> None:
        it = Scene()
        for number, length in enumerate((3, 3, 12, 0, 1234)):
            it.receive(post(length)[:-1])
            assert len(it.exchanges) == number
            it.receive(post(length)[-1:] + b"x" * length)
            assert len(it.exchanges) == number + 1 and it.exchange.head.content_length == length
            if length:
                assert it.begin_body(Room(4096), MOST) is None and body_of(it) == b"x" * length
            it.answer()
        assert it.parsed == 1
        it.receive(post(3, "/other"))
        assert it.parsed == 2 and it.exchange.head.path == "/other"

    play(scene)


@pytest.mark.parametrize("cut", [1, 60, -1])
def test_known_head_that_came_in_pieces_leaves_the_next_ones_whole(cut):
    """How far a head was searched counts for that head alone: shorter ones behind it end sooner."""
    long = get("/long", "X: " + "y" * 100)

    def scene() -> None:
        it = Scene()
        it.receive(long)
        it.answer()
        it.receive(long[:cut], long[cut:])
        assert it.parsed == 1
        it.answer()
        it.receive(get("/a") + get("/b") + get("/c"))
        it.answer()
        it.answer()
        it.answer()
        assert it.paths == ["/long", "/long", "/a", "/b", "/c"] and it.connection.is_idle

    play(scene)


def test_long_head_is_not_kept_for_the_next_one():
    def scene() -> None:
        it = Scene()
        for number in (1, 2):
            it.receive(get("/", "X: " + "y" * MAX_KEPT_HEAD_BYTES))
            assert it.parsed == number
            it.answer()

    play(scene)


def test_head_after_a_large_body_is_read_alone():
    def scene() -> None:
        it = Scene()

        def serve(length: int) -> int:
            """Return how many bytes the first read of a request took."""
            data = post(length) + b"z" * length
            taken = it.receive_some(data[: len(it.connection.get_buffer(-1))])
            it.begin_body(Room(length), MOST)
            it.receive(data[taken:])
            assert body_of(it) == b"z" * length
            it.answer()
            return taken

        assert serve(100_000) == HEAD_READ_BYTES
        assert serve(100_000) == len(post(100_000))
        assert serve(200_000) == len(post(100_000))
        assert serve(100) == len(post(100_000)), "this one begins with 3 bytes of body"
        assert serve(100) == len(post(100)) + 100

    play(scene)


def test_chunked_body_grows_its_room():
    def scene() -> None:
        it = Scene()
        it.receive(CHUNKED_HEAD)
        ready = it.begin_body(Room(64), MOST)
        for number in range(40):
            it.receive(b"64\r\n" + bytes([number]) * 100 + b"\r\n")
        it.receive(b"0\r\n\r\n")
        assert ready.done()
        assert body_of(it) == b"".join(bytes([number]) * 100 for number in range(40))

    play(scene)


def test_pipelined_requests_are_served_in_order_one_at_a_time():
    def scene() -> None:
        it = Scene()
        it.receive(get("/1") + post(3, "/2") + b"abc" + get("/3"))
        assert it.paths == ["/1"]
        it.answer(b"<1>")
        assert it.paths == ["/1", "/2"]
        assert it.begin_body(Room(64), MOST) is None
        it.answer(b"<2>")
        it.answer(b"<3>")
        assert it.paths == ["/1", "/2", "/3"] and it.sent == b"<1><2><3>"

    play(scene)


def test_next_request_after_an_answer_that_closes_is_never_served():
    def scene() -> None:
        it = Scene()
        it.receive(get("/1", "Connection: close") + get("/2"))
        it.answer(closes=True)
        assert it.paths == ["/1"] and it.sent == b"<200>"
        # Closing over bytes that came already could turn into a reset that overtakes the answer.
        assert it.state == "LINGER" and it.transport.has_written_eof
        it.transport.end()
        assert not it.is_open

    play(scene)


def test_answer_that_closes_closes_at_once_when_nothing_is_unread():
    def scene() -> None:
        it = Scene()
        it.receive(get())
        it.answer(closes=True)
        assert it.transport.is_closed and not it.transport.is_aborted
        it.transport.settle()
        assert not it.is_open and it.exchange.gone == []

    play(scene)


# --------------------------------------------------------------------------------------------- bounds


def test_reading_stops_at_64_kib_of_further_bytes_and_goes_on_later():
    flood = get("/next") * 20_000

    def scene() -> None:
        it = Scene()
        it.receive(get("/first"))
        sent = it.receive_some(flood)
        assert it.transport.is_reading_paused
        assert MAX_PENDING_BYTES < sent <= MAX_PENDING_BYTES + SCRATCH_BYTES
        while it.transport.is_reading_paused:  # no room is made by each request, but by their bytes
            assert len(it.connection._pending) > MAX_PENDING_BYTES
            it.answer()
        for _ in range(200):
            sent += it.receive_some(flood[sent:])
            it.answer()
            assert len(it.connection._pending) <= MAX_PENDING_BYTES + SCRATCH_BYTES
        assert set(it.paths[1:]) == {"/next"} and not it.refused

    play(scene)


def test_body_that_waits_for_its_slot_is_bounded_too():
    body = bytes(i % 251 for i in range(200_000))

    def scene() -> None:
        it = Scene()
        it.receive(post(len(body)) + body[:70_000])
        kept = len(it.connection._pending)
        assert it.transport.is_reading_paused and kept <= MAX_PENDING_BYTES + SCRATCH_BYTES
        ready = it.begin_body(Room(262144), MOST)
        assert not it.transport.is_reading_paused
        it.receive(body[kept:])
        assert ready.done() and body_of(it) == body

    play(scene)


def test_client_is_watched_again_once_a_body_that_filled_the_buffer_is_stored():
    def scene() -> None:
        it = Scene()
        it.receive(post(66_000), b"x" * 66_000)
        assert it.transport.is_reading_paused
        assert it.begin_body(Room(131072), MOST) is None
        assert not it.transport.is_reading_paused
        it.transport.end()
        assert len(it.exchange.gone) == 1

    play(scene)


def test_client_that_reads_no_answer_gets_no_further_one():
    def scene() -> None:
        it = Scene()
        it.transport.is_stuck = True
        it.receive(get("/1") + get("/2"))
        it.answer(b"x" * (WRITE_HIGH + 1))
        assert it.connection.is_write_paused and it.paths == ["/1"]
        assert it.transport.is_reading_paused
        it.transport.take(WRITE_HIGH + 1 - WRITE_LOW)
        assert it.paths == ["/1", "/2"] and not it.transport.is_reading_paused

    play(scene)


def test_pressure_reaches_the_exchange():
    def scene() -> None:
        it = Scene()
        it.transport.is_stuck = True
        it.receive(get())
        it.connection.write(b"x" * WRITE_HIGH)
        assert it.exchange.pressure == []
        it.connection.write(b"x")
        assert it.exchange.pressure == ["paused"]
        it.transport.take(WRITE_HIGH - WRITE_LOW)
        assert it.exchange.pressure == ["paused"]
        it.transport.take(1)
        assert it.exchange.pressure == ["paused", "resumed"]

    play(scene)


# -------------------------------------------------------------------------------------- refused heads

SMUGGLED = get("/smuggled")


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        (b"GET / HTTP/1.1\r\nHost : h\r\n\r\n", "malformed_request"),
        (b"GET / HTTP/1.1\nHost: h\n\n", "malformed_request"),
        (b"GET / HTTP/1.1\r\nHost: h\n\r\n", "malformed_request"),
        (b"\r\n\r\nGET / HTTP/1.1\r\nHost: h\r\n\r\n", "malformed_request"),
        (post(3, "/", "Transfer-Encoding: chunked"), "malformed_request"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "http_version_not_supported"),
        (b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\nHost: h\r\n\r\n", "uri_too_long"),
        (b"GET / HTTP/1.1\r\nHost: h\r\nX: " + b"a" * 9000 + b"\r\n\r\n", "header_too_large"),
        (b"GET / HTTP/1.1\r\nHost: h\r\n" + b"X: y\r\n" * 65 + b"\r\n", "header_too_large"),
    ],
)  # fmt: skip
def test_refused_head_is_answered_and_nothing_behind_it_is_parsed(raw, code):
    def scene() -> None:
        for cut in {len(raw) // 2, len(raw), len(raw) + 10}:
            it = Scene()
            wire = raw + SMUGGLED
            it.receive(wire[:cut], wire[cut:])
            it.receive(SMUGGLED)
            assert [error.code for error in it.refused] == [code]
            assert it.exchanges == [] and it.sent == b"<%d>" % it.refused[0].status
            assert it.state == "LINGER" and it.transport.has_written_eof
            it.transport.end()
            assert not it.is_open

    play(scene)


def test_head_that_never_ends_is_refused_when_it_is_too_long():
    def scene() -> None:
        it = Scene()
        it.receive(b"GET / HTTP/1.1\r\n", *[b"X: yyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyy\r\n"] * 1000)
        assert [error.code for error in it.refused] == ["header_too_large"]

    play(scene)


def test_lingering_reads_a_bounded_amount_for_a_bounded_time():
    def scene() -> None:
        it = Scene()
        it.receive(b"\0\r\n\r\n")
        it.receive(b"x" * (LINGER_BYTES - 1))
        assert not it.transport.is_aborted
        it.receive(b"x")
        assert it.transport.is_aborted
        it = Scene()
        it.receive(b"\0\r\n\r\n")
        it.pass_time(LINGER_SECS - 0.2)
        assert not it.transport.is_aborted
        it.pass_time(0.3)
        assert it.transport.is_aborted and not it.is_open

    play(scene)


def test_lingering_goes_on_while_the_client_still_takes_the_answer():
    def scene() -> None:
        it = Scene()
        it.transport.is_stuck = True
        it.receive(post(100_000, "/1"))
        it.answer(b"x" * 10_000, closes=True)
        for _ in range(5):
            it.transport.take(1000)
            it.pass_time(LINGER_SECS - 0.2)
            assert not it.transport.is_aborted
        it.pass_time(2 * LINGER_SECS)
        assert it.transport.is_aborted

    play(scene)


def test_connection_over_the_cap_is_answered_and_closed():
    def scene() -> None:
        it = Scene(turned_away=MeshError("too_many_connections", "Too many.", is_closing=True))
        assert it.sent == b"<503>" and it.transport.has_written_eof
        it.receive(SMUGGLED)
        assert it.exchanges == []

    play(scene)


# ------------------------------------------------------------------------------------- early answers


def test_early_answer_with_a_short_rest_keeps_the_connection():
    body = b"GET /smuggled HTTP/1.1\r\nHost: h\r\n\r\n".ljust(KEEPABLE_REST_BYTES)
    wire = body + get("/next")

    def scene() -> None:
        for cut in (0, 1, 30, 40, 20_000, len(body) - 1, len(body), len(body) + 5, len(wire)):
            it = Scene()
            it.receive(post(len(body)), wire[:cut])
            it.answer(b"<404>")
            it.receive(wire[cut:])
            assert it.paths == ["/p", "/next"], cut
            assert not it.transport.is_closing()
            it.answer()
            assert it.sent == b"<404><200>"

    play(scene)


def test_early_answer_in_the_middle_of_a_body_keeps_the_connection():
    def scene() -> None:
        it = Scene()
        it.receive(post(100_000))
        it.begin_body(Room(131072), MOST)
        it.receive(b"x" * 50_000)
        it.answer(b"<500>")
        it.receive(b"x" * 50_000, get("/next"))
        assert it.paths == ["/p", "/next"] and not it.transport.is_closing()

    play(scene)


def test_what_came_already_does_not_count_as_rest():
    def scene() -> None:
        it = Scene()
        it.receive(post(100_000), b"x" * 50_000)
        assert not it.connection.must_close_after()
        it.answer(b"<404>")
        it.receive(b"x" * 50_000, get("/next"))
        assert it.paths == ["/p", "/next"]

    play(scene)


@pytest.mark.parametrize(
    "raw",
    [
        post(KEEPABLE_REST_BYTES + 1),
        CHUNKED_HEAD,
        post(10, "/p", "Expect: 100-continue"),
    ],
    ids=["long", "chunked", "expect"],
)
def test_early_answer_with_a_long_or_unknown_rest_closes(raw):
    def scene() -> None:
        it = Scene()
        it.receive(raw)
        assert it.connection.must_close_after()
        it.answer(b"<413>")
        it.receive(SMUGGLED)
        assert it.exchanges[1:] == [] and it.sent == b"<413>"
        assert it.state == "LINGER" and it.transport.has_written_eof

    play(scene)


def test_answer_after_the_body_was_read_need_not_close():
    def scene() -> None:
        for raw in (post(5) + b"hello", CHUNKED_HEAD + b"5\r\nhello\r\n0\r\n\r\n", get()):
            it = Scene()
            it.receive(raw)
            if it.exchange.head.has_body:
                it.begin_body(Room(64), MOST)
            assert not it.connection.must_close_after()

    play(scene)


def test_rest_that_does_not_come_ends_the_connection():
    def scene() -> None:
        it = Scene()
        it.receive(post(10))
        it.answer(b"<404>")
        it.pass_time(DISCARD_SECS - 0.2)
        assert not it.transport.is_closing()
        it.pass_time(0.3)
        assert not it.is_open

    play(scene)


# ------------------------------------------------------------------------------------- broken bodies


@pytest.mark.parametrize(
    ("wire", "growth", "code"),
    [
        (b"zz\r\n", 1 << 30, "malformed_request"),
        (b"5\r\nhelloX", 1 << 30, "malformed_request"),
        (b"41\r\n" + b"x" * 65 + b"\r\n", 0, "buffer_budget_exhausted"),
        (b"ffff\r\n" + b"x" * 1100, 1 << 30, "body_too_large"),
    ],
)
def test_chunked_body_that_breaks_fails_once_and_nothing_after_it_counts(wire, growth, code):
    async def scene() -> None:
        it = Scene()
        it.receive(CHUNKED_HEAD)
        ready = it.begin_body(Room(64, growth), most=1000)
        it.receive(wire)
        it.receive(b"0\r\n\r\n" + SMUGGLED)  # before the exchange has been told
        with pytest.raises(MeshError) as caught:
            await ready
        assert caught.value.code == code and caught.value.is_closing
        it.answer(b"<%d>" % caught.value.status)
        it.receive(SMUGGLED)
        assert it.paths == ["/c"] and it.state == "LINGER"

    play(scene)


def test_chunked_body_that_came_broken_with_its_head_fails_too():
    async def scene() -> None:
        it = Scene()
        it.receive(CHUNKED_HEAD + b"zz\r\n\r\n" + SMUGGLED)
        with pytest.raises(MeshError, match="chunk"):
            await it.begin_body(Room(64), MOST)
        assert it.connection.must_close_after()

    play(scene)


# ---------------------------------------------------------------------------------------------- timers


def test_client_that_sends_nothing_is_closed_silently():
    def scene() -> None:
        it = Scene()
        it.pass_time(29.8)
        assert not it.transport.is_closing()
        it.pass_time(0.4)
        assert not it.is_open and it.sent == b"" and it.refused == []

    play(scene)


def test_head_that_drips_in_is_refused_after_the_time_since_the_accept():
    def scene() -> None:
        it = Scene()
        for _ in range(29):
            it.pass_time(1)
            it.receive(b"G")
            assert it.refused == []
        it.pass_time(1.1)
        assert [error.code for error in it.refused] == ["request_timeout"]
        assert it.sent == b"<408>" and it.state == "LINGER"

    play(scene)


def test_later_head_is_timed_from_its_first_byte():
    def scene() -> None:
        it = Scene()
        it.receive(get())
        it.answer()
        it.pass_time(74)
        it.receive(b"G")
        it.pass_time(29.8)
        assert it.refused == []
        it.pass_time(0.4)
        assert [error.code for error in it.refused] == ["request_timeout"]

    play(scene)


def test_idle_connection_is_closed_silently():
    def scene() -> None:
        it = Scene()
        it.receive(get())
        it.answer()
        it.pass_time(74.8)
        assert not it.transport.is_closing()
        it.pass_time(0.4)
        assert not it.is_open and it.sent == b"<200>"

    play(scene)


@pytest.mark.parametrize("raw", [post(10), CHUNKED_HEAD], ids=["sized", "chunked"])
def test_body_without_a_byte_for_the_body_time_is_a_stall(raw):
    async def scene() -> None:
        it = Scene()
        it.receive(raw)
        it.pass_time(500)  # no time runs while the request waits for its turn
        ready = it.begin_body(Room(64), MOST)
        for _ in range(4):
            it.pass_time(59)
            it.receive(b"1")
        assert not ready.done()
        it.pass_time(59.8)
        assert not ready.done()
        it.pass_time(0.4)
        with pytest.raises(MeshError) as caught:
            await ready
        assert caught.value.code == "request_timeout" and caught.value.is_closing

    play(scene)


def test_no_timer_of_the_client_runs_while_its_answer_is_made():
    def scene() -> None:
        it = Scene()
        it.receive(post(2), b"ab")
        it.begin_body(Room(64), MOST)
        it.pass_time(1000)
        assert not it.transport.is_closing() and it.connection.deadline == 0

    play(scene)


def test_client_that_takes_no_byte_is_cut():
    def scene() -> None:
        it = Scene()
        it.transport.is_stuck = True
        it.receive(get())
        it.connection.write(b"x" * 2 * WRITE_HIGH)
        it.pass_time(299)
        assert it.exchange.gone == []
        it.pass_time(1.3)
        assert len(it.exchange.gone) == 1 and it.transport.is_aborted and not it.is_open

    play(scene)


def test_client_that_takes_bytes_slowly_is_not_cut():
    def scene() -> None:
        it = Scene()
        it.transport.is_stuck = True
        it.receive(get())
        it.connection.write(b"x" * 2 * WRITE_HIGH)
        for _ in range(5):
            it.pass_time(250)
            it.transport.take(100)
        assert it.exchange.gone == [] and not it.transport.is_closing()
        it.pass_time(301)
        assert len(it.exchange.gone) == 1

    play(scene)


def test_closed_connection_that_takes_no_byte_is_cut_in_the_end():
    def scene() -> None:
        it = Scene()
        it.transport.is_stuck = True
        it.receive(get())
        it.answer(b"x" * 1000, closes=True)
        it.pass_time(299)
        assert it.is_open
        it.pass_time(1.2)
        assert not it.is_open and it.transport.is_aborted

    play(scene)


# ------------------------------------------------------------------------------------------ client gone


@pytest.mark.parametrize("how", ["end", "reset"])
@pytest.mark.parametrize("stage", ["waiting", "body", "busy", "answering"])
def test_client_that_leaves_is_told_to_its_exchange_once(how, stage):
    def scene() -> None:
        it = Scene()
        it.receive(get() if stage in ("busy", "answering") else post(10))
        if stage == "body":
            it.begin_body(Room(64), MOST)
            it.receive(b"abc")
        if stage == "answering":
            it.connection.write(b"<head>")
        getattr(it.transport, how)()
        assert len(it.exchange.gone) == 1
        assert not it.is_open and it.connection.is_closed
        it.connection.write(b"late")  # nothing more goes out, and nobody minds
        it.connection.finish(False)
        it.connection.abort()
        assert it.sent == (b"<head>" if stage == "answering" else b"")
        assert len(it.exchange.gone) == 1

    play(scene)


def test_client_that_leaves_between_requests_is_told_to_nobody():
    def scene() -> None:
        for how in ("end", "reset"):
            it = Scene()
            it.receive(get())
            it.answer()
            getattr(it.transport, how)()
            assert it.exchange.gone == [] and not it.is_open

    play(scene)


def test_answers_before_a_half_close_are_still_flushed():
    def scene() -> None:
        it = Scene()
        it.transport.is_stuck = True
        it.receive(get())
        it.answer()
        it.transport.end()
        assert it.transport.is_closed and not it.transport.is_aborted and it.is_open
        it.transport.take(100)
        it.transport.settle()
        assert not it.is_open

    play(scene)


def test_client_that_leaves_during_lingering_ends_it():
    def scene() -> None:
        for how in ("end", "reset"):
            it = Scene()
            it.receive(b"\0\r\n\r\n")
            getattr(it.transport, how)()
            assert not it.is_open

    play(scene)


# ------------------------------------------------------------------------------------------------ cuts


def test_cut_connection_begins_no_other_request():
    def scene() -> None:
        it = Scene()
        it.receive(get("/1") + get("/2"))
        it.connection.abort()
        it.connection.finish(False)
        assert it.paths == ["/1"] and it.transport.is_aborted
        assert it.transport.socket.options == {}
        it.transport.settle()
        assert not it.is_open and it.exchange.gone == []

    play(scene)


def test_cut_by_reset_sets_the_socket_to_do_so():
    def scene() -> None:
        it = Scene()
        it.receive(get("/1"))
        it.connection.abort(resets=True)
        assert it.transport.is_aborted
        option = it.transport.socket.options[(socket.SOL_SOCKET, socket.SO_LINGER)]
        assert option == b"\1\0\0\0\0\0\0\0"

    play(scene)


def test_continue_is_wanted_only_while_no_body_byte_came():
    def scene() -> None:
        it = Scene()
        it.receive(post(3, "/p", "Expect: 100-continue"))
        assert not it.connection.has_body_bytes
        it.connection.write(b"<100>")
        assert it.sent == b"<100>"
        it.begin_body(Room(64), MOST)
        it.receive(b"a")
        assert it.connection.has_body_bytes
        it = Scene()
        it.receive(post(3, "/p", "Expect: 100-continue") + b"a")
        assert it.connection.has_body_bytes

    play(scene)


def test_repr_tells_the_state():
    def scene() -> None:
        it = Scene()
        it.receive(b"GET")
        assert repr(it.connection) == "DownstreamConnection(192.0.2.1:40000 HEAD pending=3)"

    play(scene)
