"""Conversations with an upstream connection: what it takes for a response, and how each one ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from meshd.io.chunked import ChunkedDecoder
from meshd.io.http1 import ResponseHead
from meshd.io.upstream import MAX_UNATTACHED_BYTES, UpstreamConnection, UpstreamFailure
from tests.fakes.asked import asked, attached
from tests.fakes.transport import FakeClock, FakeTransport

REQUEST = b"POST /v1/x HTTP/1.1\r\nhost: u\r\ncontent-length: 4\r\n\r\n"


class Sink:
    """Collects one body; ``end`` is "" while it runs."""

    def __init__(self) -> None:
        self.body = b""
        self.end = ""

    def pass_chunks(self, data: bytes, decoder: ChunkedDecoder) -> bool:
        return False

    def body_data(self, data: bytes) -> None:
        assert not self.end
        self.body += data

    def body_end(self) -> None:
        assert not self.end
        self.end = "complete"

    def body_failed(self, failure: UpstreamFailure) -> None:
        assert not self.end
        self.end = failure.code


class Conversation:
    """One exchange on one connection, with the test as the upstream."""

    def __init__(self, method: str = "POST", body: bytes = b"body", is_stuck: bool = False) -> None:
        self.clock = FakeClock()
        self.closed: list[UpstreamConnection] = []
        self.connection = UpstreamConnection("u", asyncio.get_running_loop(), self.closed.append, self.clock)
        self.transport = FakeTransport(self.connection, is_stuck)
        self.sink = Sink()
        self.ask(method, body)

    def ask(self, method: str = "POST", body: bytes = b"body") -> None:
        self.sink = Sink()
        self.response = asked(self.connection, method, REQUEST, [memoryview(body)] if body else ())

    def play(self, *pieces: bytes) -> None:
        for piece in pieces:
            if not self.transport.is_closing():
                self.transport.receive(piece)

    @property
    def head(self) -> ResponseHead:
        return self.response.result()

    @property
    def failure(self) -> UpstreamFailure:
        error = self.response.exception()
        assert isinstance(error, UpstreamFailure)
        return error

    def attach(self) -> Sink:
        attached(self.connection, self.sink)
        return self.sink


def conversation(scene: Callable[[], Any]) -> None:
    async def run() -> None:
        scene()

    asyncio.run(run())


WHOLE = [
    ("sized", "POST", b"HTTP/1.1 200 OK\r\nContent-Length: 11\r\n\r\nhello world", b"hello world"),
    ("sized, empty", "POST", b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", b""),
    (
        "chunked",
        "POST",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"5;x=y\r\nhello\r\n6\r\n world\r\n0\r\nt: 1\r\n\r\n",
        b"hello world",
    ),
    ("answer to HEAD", "HEAD", b"HTTP/1.1 200 OK\r\nContent-Length: 11\r\n\r\n", b""),
    ("chunked answer to HEAD", "HEAD", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b""),
    ("204 with framing", "POST", b"HTTP/1.1 204 No Content\r\nContent-Length: 5\r\n\r\n", b""),
    ("304 with a length", "GET", b"HTTP/1.1 304 Not Modified\r\nContent-Length: 5\r\n\r\n", b""),
    (
        "after interim responses",
        "POST",
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n"
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok",
        b"ok",
    ),
]


@pytest.mark.parametrize(("method", "wire", "body"), [r[1:] for r in WHOLE], ids=[r[0] for r in WHOLE])
def test_whole_response_is_the_same_wherever_it_is_cut(method, wire, body):
    def scene() -> None:
        for cut in range(1, len(wire) + 1):
            talk = Conversation(method)
            talk.play(*filter(None, (wire[:cut], wire[cut:])))
            sink = talk.attach()
            assert (sink.body, sink.end) == (body, "complete"), cut
            assert talk.head.status in (200, 204, 304)
            assert talk.connection.is_reusable and not talk.closed

    conversation(scene)


@pytest.mark.parametrize(("method", "wire", "body"), [r[1:] for r in WHOLE], ids=[r[0] for r in WHOLE])
def test_whole_response_arrives_byte_by_byte_into_an_attached_sink(method, wire, body):
    def scene() -> None:
        talk = Conversation(method)
        for at in range(len(wire)):
            talk.play(wire[at : at + 1])
            if talk.response.done() and talk.connection._sink is None:
                talk.attach()
        assert (talk.sink.body, talk.sink.end) == (body, "complete")

    conversation(scene)


def test_close_delimited_body_ends_with_the_connection_and_is_not_reusable():
    wire = b"HTTP/1.1 200 OK\r\n\r\nhello"

    def scene() -> None:
        for cut in range(1, len(wire) + 1):
            talk = Conversation()
            talk.play(*filter(None, (wire[:cut], wire[cut:])))
            assert not talk.connection.is_complete
            talk.transport.end()
            sink = talk.attach()
            assert (sink.body, sink.end) == (b"hello", "complete")
            assert not talk.connection.is_reusable and talk.closed

    conversation(scene)


def test_close_delimited_body_that_is_reset_is_a_cut():
    def scene() -> None:
        talk = Conversation()
        talk.play(b"HTTP/1.1 200 OK\r\n\r\nhello")
        sink = talk.attach()
        talk.transport.reset()
        assert (sink.body, sink.end) == (b"hello", "upstream_connection_failed")

    conversation(scene)


@pytest.mark.parametrize("how", ["end", "reset"])
def test_response_cut_at_every_byte_is_a_failure(how):
    wire = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n"
    head_bytes = wire.index(b"\r\n\r\n") + 4

    def scene() -> None:
        for cut in range(len(wire)):
            talk = Conversation()
            if cut:
                talk.play(wire[:cut])
            getattr(talk.transport, how)()
            if cut < head_bytes:
                assert talk.failure.code == "upstream_connection_failed"
                assert talk.failure.has_response_bytes is (cut > 0)
                assert talk.failure.was_sent
            else:
                assert talk.attach().end == "upstream_connection_failed"
            assert not talk.connection.is_reusable and not talk.connection.is_busy
            assert talk.closed

    conversation(scene)


@pytest.mark.parametrize("how", ["end", "reset"])
def test_sized_body_that_ends_short_fails_an_attached_sink_once(how):
    def scene() -> None:
        talk = Conversation()
        talk.play(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhello")
        sink = talk.attach()
        getattr(talk.transport, how)()
        assert (sink.body, sink.end) == (b"hello", "upstream_connection_failed")

    conversation(scene)


EXCESS = [
    b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok!",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\nHTTP/1.1 200 OK\r\n\r\n",
]


@pytest.mark.parametrize("wire", EXCESS)
def test_bytes_past_the_end_leave_the_response_and_end_the_connection(wire):
    def scene() -> None:
        for cut in (len(wire), wire.index(b"ok") + 2, len(wire) - 1):
            talk = Conversation()
            talk.play(*filter(None, (wire[:cut], wire[cut:])))
            sink = talk.attach()
            talk.transport.settle()
            assert (sink.body, sink.end) == (b"ok", "complete")
            assert not talk.connection.is_reusable
            assert talk.transport.is_aborted

    conversation(scene)


def test_excess_after_an_answer_to_head_ends_the_connection():
    def scene() -> None:
        talk = Conversation("HEAD")
        talk.play(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        assert (talk.attach().body, talk.sink.end) == (b"", "complete")
        assert not talk.connection.is_reusable

    conversation(scene)


MALFORMED = [
    ("status line", b"HTP/1.1 200 OK\r\n\r\n"),
    ("status", b"HTTP/1.1 777 X\r\n\r\n"),
    ("two framings", b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n"),
    ("lengths that differ", b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\nok"),
    ("unasked upgrade", b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\n"),
    ("bare LF", b"HTTP/1.1 200 OK\nContent-Length: 2\n\nok"),
    ("oversized head", b"HTTP/1.1 200 OK\r\nX: " + b"y" * 70_000 + b"\r\n\r\n"),
    ("oversized head without end", b"HTTP/1.1 200 OK\r\nX: " + b"y" * 70_000),
    ("too many interim", b"HTTP/1.1 102 Processing\r\n\r\n" * 17 + b"HTTP/1.1 200 OK\r\n\r\n"),
    ("broken chunk beside its head", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"),
]


@pytest.mark.parametrize("wire", [row[1] for row in MALFORMED], ids=[row[0] for row in MALFORMED])
def test_malformed_response_is_a_protocol_error(wire):
    def scene() -> None:
        talk = Conversation()
        talk.play(wire)
        assert talk.failure.code == "upstream_protocol_error"
        assert talk.failure.has_response_bytes
        assert talk.transport.is_aborted and talk.closed and not talk.connection.is_reusable

    conversation(scene)


def test_sixteen_interim_responses_are_dropped():
    def scene() -> None:
        talk = Conversation()
        talk.play(b"HTTP/1.1 102 Processing\r\n\r\n" * 16 + b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        assert talk.head.status == 200 and talk.connection.is_reusable

    conversation(scene)


def test_broken_chunk_after_the_head_fails_the_body():
    def scene() -> None:
        talk = Conversation()
        talk.play(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n")
        sink = talk.attach()
        talk.play(b"zz\r\n")
        assert (sink.body, sink.end) == (b"ok", "upstream_protocol_error")
        assert talk.transport.is_aborted

    conversation(scene)


@pytest.mark.parametrize(
    "wire",
    [
        b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok",
        b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok",
    ],
)
def test_connection_that_its_upstream_will_close_is_not_reusable(wire):
    def scene() -> None:
        talk = Conversation()
        talk.play(wire)
        assert talk.attach().end == "complete"
        assert not talk.connection.is_reusable

    conversation(scene)


def test_answer_before_the_whole_request_was_sent_stands_and_is_not_reused():
    def scene() -> None:
        talk = Conversation(body=b"x" * 200_000, is_stuck=True)
        assert not talk.connection.is_sent
        talk.play(b"HTTP/1.1 413 Too Large\r\nContent-Length: 0\r\n\r\n")
        talk.transport.take(1 << 20)  # the upstream reads the rest after all
        assert talk.connection.is_sent
        assert (talk.head.status, talk.attach().end) == (413, "complete")
        assert not talk.connection.is_reusable

    conversation(scene)


@pytest.mark.parametrize(("how", "is_reset"), [("end", False), ("reset", True)])
def test_end_before_the_whole_request_was_sent_says_so_and_drops_the_rest(how, is_reset):
    def scene() -> None:
        talk = Conversation(body=b"x" * 200_000, is_stuck=True)
        getattr(talk.transport, how)()
        assert talk.failure.code == "upstream_connection_failed"
        assert not talk.failure.was_sent
        # A flush would go on reading the slot after another request got it.
        assert talk.transport.is_aborted

    conversation(scene)


def test_data_while_idle_closes():
    def scene() -> None:
        talk = Conversation()
        talk.play(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        talk.connection.is_busy = False  # as the pool does
        talk.play(b"HTTP/1.1 408 Request Timeout\r\nContent-Length: 0\r\n\r\n")
        assert talk.connection.is_closed and talk.closed
        assert talk.head.status == 200

    conversation(scene)


def test_end_while_idle_closes():
    def scene() -> None:
        talk = Conversation()
        talk.play(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        talk.connection.is_busy = False
        talk.transport.end()
        assert talk.connection.is_closed and talk.closed

    conversation(scene)


def test_second_exchange_begins_clean():
    def scene() -> None:
        talk = Conversation()
        talk.play(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n")
        assert talk.attach().body == b"ok"
        talk.connection.is_busy = False
        talk.ask()
        talk.play(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nyes")
        assert (talk.attach().body, talk.sink.end) == (b"yes", "complete")

    conversation(scene)


def test_body_that_nobody_takes_yet_is_bounded_by_pausing():
    def scene() -> None:
        talk = Conversation()
        talk.play(b"HTTP/1.1 200 OK\r\nContent-Length: 200000\r\n\r\n", b"x" * MAX_UNATTACHED_BYTES)
        assert not talk.transport.is_reading_paused
        talk.play(b"x")
        assert talk.transport.is_reading_paused
        sink = talk.attach()
        assert len(sink.body) == MAX_UNATTACHED_BYTES + 1
        assert talk.transport.is_reading_paused  # its sink alone knows when its client takes more
        talk.connection.resume_reading()
        assert not talk.transport.is_reading_paused

    conversation(scene)


def test_own_pause_does_not_count_as_silence():
    def scene() -> None:
        talk = Conversation()
        talk.play(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nx")
        talk.connection.pause_reading()
        talk.clock.advance(100)
        talk.connection.resume_reading()
        assert talk.connection.last_byte_at == talk.clock.now

    conversation(scene)


def test_timer_fails_a_silent_exchange_and_closes():
    def scene() -> None:
        talk = Conversation()
        talk.connection.fail("upstream_timeout", "first-byte timer")
        assert talk.failure.code == "upstream_timeout" and not talk.failure.has_response_bytes
        assert talk.transport.is_aborted
        talk.transport.settle()
        assert not talk.connection.is_busy

    conversation(scene)


def test_close_by_its_owner_is_immediate_and_silent():
    def scene() -> None:
        talk = Conversation()
        talk.play(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nx")
        sink = talk.attach()
        talk.connection.close()
        talk.transport.settle()
        assert talk.transport.is_aborted and sink.end == ""
        assert not talk.connection.is_reusable

    conversation(scene)


def test_repr_tells_the_state():
    def scene() -> None:
        talk = Conversation()
        assert repr(talk.connection) == "UpstreamConnection(u busy served=0 complete=False)"
        talk.connection.close()
        assert repr(talk.connection) == "UpstreamConnection(u closed served=0 complete=False)"

    conversation(scene)


def test_head_that_comes_again_is_read_by_its_own_length_and_method():
    def scene() -> None:
        talk = Conversation()
        for method, length in (
            ("POST", 2),
            ("POST", 2),
            ("POST", 300),
            ("HEAD", 2),
            ("HEAD", 2),
            ("POST", 2),
        ):
            talk.connection.is_busy = False  # as the pool leaves it
            talk.ask(method)
            body = b"x" * length if method == "POST" else b""
            talk.play(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (length, body))
            assert (talk.head.status, talk.head.content_length) == (200, length)
            assert (talk.attach().body, talk.sink.end) == (body, "complete")
            assert not talk.transport.is_closing()

    conversation(scene)
