"""Responses on their way to a client: framing, SSE, back-pressure, and what a broken upstream looks like."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import h11
import pytest

from meshd.io.chunked import ChunkedDecoder
from meshd.io.relay import MAX_OBSERVED_BODY_BYTES, Relay
from meshd.io.sse import MAX_EVENT_BYTES, MAX_HELD_BYTES, SseRelay, split_events
from meshd.io.upstream import UpstreamConnection
from meshd.io.usage import UsageReader
from tests.fakes.asked import asked
from tests.fakes.played_client import PlayedClient
from tests.fakes.transport import FakeClock, FakeTransport

HEADS = {
    "chunked": b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n",
    "close": b"HTTP/1.1 200 OK\r\n\r\n",
    "none": b"HTTP/1.1 204 No Content\r\n\r\n",
}


class Scene:
    """One relay between a client and an upstream that the test plays."""

    def __init__(
        self,
        upstream_head: bytes = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
        *,
        framing: str = "chunked",
        dialect: Any = None,
        sse: SseRelay | None = None,
        observes_body: bool = False,
        early: bytes = b"",
        **options: Any,
    ) -> None:
        self.clock = FakeClock()
        self.client = PlayedClient()
        self.upstream = UpstreamConnection(
            "u", asyncio.get_running_loop(), lambda _connection: None, self.clock
        )
        self.transport = FakeTransport(self.upstream)
        asked(self.upstream, "POST", b"request")
        self.transport.receive(upstream_head + early)
        self.relay = Relay(
            self.client.connection,
            self.upstream,
            framing=framing,
            event_dialect=dialect,
            sse=sse,
            observes_body=observes_body,
            **options,
        )
        self.head = HEADS.get(framing, upstream_head)
        self.task = asyncio.ensure_future(self.run())

    async def run(self) -> str:
        ending = self.relay.begin(self.head)
        return self.relay.outcome if ending is None else await ending

    async def begin(self) -> Scene:
        await asyncio.sleep(0)
        return self

    def play(self, *pieces: bytes) -> None:
        """Body bytes from the upstream, each piece as one chunk."""
        for piece in pieces:
            self.transport.receive(b"%x\r\n%b\r\n" % (len(piece), piece))

    def end(self) -> None:
        self.transport.receive(b"0\r\n\r\n")

    def cut(self) -> None:
        self.transport.reset()

    async def outcome(self) -> str:
        async with asyncio.timeout(5):
            return await self.task

    @property
    def body(self) -> bytes:
        """The body as the client reads it, whether or not it is whole."""
        raw = self.client.sent
        assert raw.startswith(self.head)
        raw = raw[len(self.head) :]
        return b"".join(ChunkedDecoder().feed(raw)) if self.head is HEADS["chunked"] else raw

    @property
    def is_whole(self) -> bool:
        """Whether the client, an independent reader, takes the response for complete."""
        reader = h11.Connection(h11.CLIENT)
        reader.send(h11.Request(method="GET", target="/", headers=[("host", "h")]))
        reader.send(h11.EndOfMessage())
        reader.receive_data(self.client.sent)
        if not self.client.cut:
            reader.receive_data(b"")
        try:
            while True:
                event = reader.next_event()
                if isinstance(event, h11.EndOfMessage):
                    return True
                if event is h11.NEED_DATA:
                    return False
        except h11.RemoteProtocolError:
            return False


def play(run: Callable[[], Any]) -> None:
    asyncio.run(run())


# ------------------------------------------------------------------------------------------- framing


def test_body_of_unknown_length_is_chunked_again():
    async def run() -> None:
        it = await Scene().begin()
        it.play(b"hello", b" world")
        assert it.client.sent == it.head + b"5\r\nhello\r\n6\r\n world\r\n"
        it.end()
        assert await it.outcome() == "completed"
        assert it.body == b"hello world" and it.is_whole
        assert it.relay.bytes_out == 11 and not it.relay.is_cut

    play(run)


def test_sized_body_passes_as_it_is():
    async def run() -> None:
        it = await Scene(
            b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n", framing="length", early=b"he"
        ).begin()
        it.transport.receive(b"llo")
        assert await it.outcome() == "completed"
        assert it.client.sent == it.head + b"hello" and it.is_whole

    play(run)


def test_body_for_a_client_of_http10_is_delimited_by_the_close():
    async def run() -> None:
        it = await Scene(framing="close").begin()
        it.play(b"hello")
        it.end()
        assert await it.outcome() == "completed"
        assert it.client.sent == it.head + b"hello"

    play(run)


def test_response_without_body_is_its_head():
    async def run() -> None:
        it = await Scene(b"HTTP/1.1 204 No Content\r\n\r\n", framing="none").begin()
        assert await it.outcome() == "completed"
        assert it.client.sent == it.head and it.is_whole

    play(run)


def test_whole_response_that_came_before_the_relay_is_relayed_at_once():
    async def run() -> None:
        it = await Scene(early=b"5\r\nhello\r\n0\r\n\r\n").begin()
        assert await it.outcome() == "completed"
        assert it.body == b"hello" and it.is_whole

    play(run)


@pytest.mark.parametrize(
    ("framing", "upstream_head", "early", "how"),
    [
        ("chunked", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"2\r\nab\r\n", "abort"),
        ("length", b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n", b"ab", "abort"),
        ("close", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"2\r\nab\r\n", "reset"),
    ],
)
def test_cut_body_is_visible_as_truncated(framing, upstream_head, early, how):
    async def run() -> None:
        for cut in ("end", "reset"):
            it = await Scene(upstream_head, framing=framing, early=early).begin()
            getattr(it.transport, cut)()
            assert await it.outcome() == "body_error"
            assert it.client.cut == how and it.relay.is_cut
            assert it.body == b"ab" and not it.is_whole
            assert it.relay.failure is not None
            assert it.relay.failure.code == "upstream_connection_failed"

    play(run)


def test_broken_chunk_framing_is_visible_as_truncated():
    async def run() -> None:
        it = await Scene().begin()
        it.play(b"ab")
        it.transport.receive(b"zz\r\n")
        assert await it.outcome() == "body_error"
        assert it.client.cut == "abort" and it.relay.failure.code == "upstream_protocol_error"

    play(run)


def test_failure_before_the_relay_began_is_relayed_as_a_cut():
    async def run() -> None:
        it = Scene(early=b"2\r\nab\r\n")
        it.cut()
        assert await it.outcome() == "body_error"
        assert it.body == b"ab" and it.client.cut == "abort"

    play(run)


# ------------------------------------------------------------------------------------------------ SSE

STREAMS = {
    "openai": (
        b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'
        b'data: {"choices":[{"delta":{"content":"[DONE]\\n\\ndata: x"}}]}\r\n\r\n'
        b": keep-alive\n\n"
        b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2}}\n\n'
        b"data: [DONE]\n\n"
    ),
    "messages": (
        b'event: message_start\ndata: {"type":"message_start","message":{"usage":{"input_tokens":3}}}\n\n'
        b'event: content_block_delta\ndata: {"type":"content_block_delta","delta":{"text":"a"}}\n\n'
        b'event: message_delta\ndata: {"type":"message_delta","usage":{"output_tokens":2}}\n\n'
        b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
    ),
    "responses": (
        b'event: response.created\ndata: {"type":"response.created","sequence_number":0}\n\n'
        b"event: response.output_text.delta\n"
        b'data: {"type":"response.output_text.delta","sequence_number":1}\n\n'
        b'event: response.completed\ndata: {"type":"response.completed","sequence_number":2,'
        b'"response":{"usage":{"input_tokens":3,"output_tokens":2}}}\n\n'
    ),
}
MARKERS = (b"[DONE]", b"message_stop", b"response.completed")
APIS = tuple(STREAMS)


def sse_scene(api: str, **options: Any) -> Scene:
    return Scene(dialect=api, sse=SseRelay(api), **options)


def is_error(api: str, event: bytes, code: str) -> bool:
    payload = json.loads(event)
    if api == "openai":
        return payload["error"]["code"] == code and payload["error"]["type"] == "api_error"
    if api == "messages":
        return payload["type"] == "error" and payload["error"]["type"] == "api_error"
    return payload["type"] == "error" and payload["code"] == code and payload["param"] is None


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("framing", ["chunked", "close"])
def test_whole_stream_is_byte_identical_and_counted(api, framing):
    stream = STREAMS[api]

    async def run() -> None:
        for cut in range(1, len(stream)):
            it = await sse_scene(api, framing=framing).begin()
            it.play(stream[:cut], stream[cut:])
            it.end()
            assert await it.outcome() == "completed"
            assert it.body == stream
            assert (it.relay.usage.input_tokens, it.relay.usage.output_tokens) == (3, 2)
            assert not it.relay.is_cut and not it.client.cut and it.relay.first_token_at

    play(run)


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("framing", ["chunked", "close"])
def test_stream_cut_at_every_byte_never_shows_half_an_event(api, framing):
    stream = STREAMS[api]

    async def run() -> None:
        for cut in range(1, len(stream)):
            it = await sse_scene(api, framing=framing).begin()
            it.play(stream[:cut])
            it.cut()
            assert await it.outcome() == "body_error"
            assert it.relay.is_cut and not it.client.cut and it.is_whole
            body = it.body
            assert body.endswith(b"\n\n")
            *events, last = split_events(body)
            assert is_error(api, last, "upstream_connection_failed")
            assert events == split_events(stream)[: len(events)]
            for event in events:
                assert event == b"[DONE]" or json.loads(event) is not None
            assert not any(event == b"[DONE]" for event in events)
            if api == "responses":
                assert json.loads(last)["sequence_number"] == len(events)

    play(run)


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("framing", ["chunked", "close"])
def test_cut_after_the_success_marker_is_a_normal_end(api, framing):
    async def run() -> None:
        it = await sse_scene(api, framing=framing).begin()
        it.play(STREAMS[api])
        it.cut()
        assert await it.outcome() == "completed"
        assert it.body == STREAMS[api]
        assert not it.client.cut and it.is_whole and it.relay.failure is None

    play(run)


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("framing", ["chunked", "close"])
def test_clean_end_without_the_end_of_stream_is_an_error_event(api, framing):
    whole = STREAMS[api]
    stream = whole[: whole.rindex(b"\n\n", 0, -2) + 2]

    async def run() -> None:
        for rest in (b"", b'data: {"half'):
            it = await sse_scene(api, framing=framing).begin()
            it.play(stream + rest)
            it.end()
            assert await it.outcome() == "body_error"
            assert it.body.startswith(stream) and b"half" not in it.body
            assert is_error(api, split_events(it.body)[-1], "upstream_protocol_error")
            assert not any(marker in it.body[len(stream) :] for marker in MARKERS)
            assert it.relay.is_cut and it.is_whole

    play(run)


def test_end_of_stream_without_its_blank_line_is_relayed_at_a_clean_end():
    async def run() -> None:
        it = await sse_scene("openai").begin()
        it.play(b"data: [DONE]")
        it.end()
        assert await it.outcome() == "completed"
        assert it.body == b"data: [DONE]"

    play(run)


@pytest.mark.parametrize("api", APIS)
def test_timer_says_that_the_upstream_was_too_slow(api):
    async def run() -> None:
        it = await sse_scene(api).begin()
        it.play(STREAMS[api][:200])
        it.upstream.fail("upstream_timeout", "stream idle timer")
        assert await it.outcome() == "body_error"
        assert is_error(api, split_events(it.body)[-1], "upstream_timeout")
        assert it.relay.failure.code == "upstream_timeout"

    play(run)


def test_end_of_the_grace_period_is_told_as_such():
    async def run() -> None:
        it = await sse_scene("openai").begin()
        it.play(STREAMS["openai"][:100])
        it.upstream.fail("admission_closed", "the grace period is over")
        assert await it.outcome() == "body_error"
        assert is_error("openai", split_events(it.body)[-1], "admission_closed")

    play(run)


@pytest.mark.parametrize(
    ("api", "event"),
    [
        ("openai", b'data: {"error":{"message":"boom"}}\n\n'),
        ("messages", b'event: error\ndata: {"type":"error","error":{"type":"overloaded_error"}}\n\n'),
        ("responses", b'event: error\ndata: {"type":"error","code":"server_error"}\n\n'),
        ("responses", b'data: {"type":"response.failed"}\n\n'),
    ],
)
@pytest.mark.parametrize("how", ["end", "cut"])
def test_error_event_of_the_upstream_is_relayed_alone_with_what_follows(api, event, how):
    async def run() -> None:
        it = await sse_scene(api).begin()
        it.play(event, b": more\n\n")
        getattr(it, how)()
        assert await it.outcome() == "backend_error"
        assert it.body == event + b": more\n\n" and it.is_whole

    play(run)


def test_stream_without_a_contract_is_aborted_when_cut_and_ends_when_it_ends():
    async def run() -> None:
        for stream in (b'data: {"text":"a"}\n\n', b"data: x\n\n"):
            it = await Scene(dialect=None, sse=SseRelay("openai")).begin()
            it.play(stream)
            it.cut()
            assert await it.outcome() == "body_error"
            assert it.client.cut == "abort" and it.body == stream and not it.is_whole
            it = await Scene(dialect=None, sse=SseRelay("")).begin()
            it.play(stream)
            it.end()
            assert await it.outcome() == "completed"
            assert it.body == stream and it.is_whole

    play(run)


def test_generate_tells_a_cut_but_needs_no_end_of_stream():
    async def run() -> None:
        it = await sse_scene("openai", must_end=False).begin()
        it.play(b'data: {"text":"a"}\n\n')
        it.end()
        assert await it.outcome() == "completed"
        assert it.body == b'data: {"text":"a"}\n\n'
        it = await sse_scene("openai", must_end=False).begin()
        it.play(b'data: {"text":"a"}\n\n')
        it.cut()
        assert await it.outcome() == "body_error"
        assert is_error("openai", split_events(it.body)[-1], "upstream_connection_failed")

    play(run)


def test_sized_stream_is_aborted_when_cut():
    stream = STREAMS["openai"]

    async def run() -> None:
        it = await sse_scene(
            "openai", framing="length", upstream_head=b"HTTP/1.1 200 OK\r\nContent-Length: 9999\r\n\r\n"
        ).begin()
        it.transport.receive(stream[:60])
        it.cut()
        assert await it.outcome() == "body_error"
        assert it.client.cut == "abort"
        assert stream.startswith(it.body)

    play(run)


def test_sized_stream_without_its_end_of_stream_is_complete_when_its_bytes_are():
    stream = b'data: {"choices":[]}\n\n'

    async def run() -> None:
        it = await sse_scene(
            "openai",
            framing="length",
            upstream_head=b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(stream),
        ).begin()
        it.transport.receive(stream)
        assert await it.outcome() == "completed"
        assert it.body == stream and it.is_whole

    play(run)


def test_encoded_stream_is_aborted_when_cut():
    async def run() -> None:
        it = await Scene(dialect=None, sse=SseRelay("")).begin()
        it.play(b"\x1f\x8b\x08\n\n")
        it.cut()
        assert await it.outcome() == "body_error" and it.client.cut == "abort"

    play(run)


def test_stream_that_shows_part_of_an_event_is_aborted_when_cut():
    async def run() -> None:
        it = await sse_scene("openai").begin()
        it.play(b"data: " + b"x" * MAX_HELD_BYTES)
        assert len(it.body) >= MAX_HELD_BYTES
        it.cut()
        assert await it.outcome() == "body_error" and it.client.cut == "abort"

    play(run)


def test_event_over_a_mebibyte_is_relayed_and_counted_as_unobserved():
    piece = b"x" * 60_000

    async def run() -> None:
        it = await sse_scene("openai").begin()
        it.play(b"data: ", *[piece] * (MAX_EVENT_BYTES // len(piece) + 3), b"\n\n", b"data: [DONE]\n\n")
        it.end()
        assert await it.outcome() == "completed"
        assert len(it.body) > MAX_EVENT_BYTES and it.is_whole
        assert it.relay.skipped_observation == "event_too_large"

    play(run)


def test_incomplete_event_is_held_until_its_blank_line():
    async def run() -> None:
        it = await sse_scene("openai").begin()
        it.play(b"data: {}")
        assert it.body == b""
        it.play(b"\n")
        assert it.body == b""
        it.play(b"\ndata: {")
        assert it.body == b"data: {}\n\n"

    play(run)


def test_first_token_is_timed_when_its_event_is_whole():
    stream = STREAMS["openai"]
    at = stream.index(b"\n\n") + 1

    async def run() -> None:
        it = await sse_scene("openai").begin()
        it.play(stream[:at])
        assert it.relay.first_token_at == 0
        it.clock.advance(2)
        it.play(stream[at:])
        assert it.relay.first_token_at == it.clock.now
        ended_at = it.clock.now
        it.clock.advance(5)
        it.end()
        await it.outcome()
        assert it.relay.ended_at == ended_at

    play(run)


# ------------------------------------------------------------------------------------- back-pressure


def test_pause_and_resume_reach_the_upstream():
    async def run() -> None:
        it = await Scene().begin()
        it.relay.pause()
        assert it.transport.is_reading_paused
        it.relay.resume()
        assert not it.transport.is_reading_paused
        it.relay.pause()
        it.cut()
        it.relay.resume()  # of an upstream that is gone: nothing to do
        assert await it.outcome() == "body_error"

    play(run)


def test_client_that_still_owes_reading_an_earlier_answer_pauses_its_upstream():
    async def run() -> None:
        it = Scene(early=b"2\r\nab\r\n")
        it.client.connection.is_write_paused = True
        await it.begin()
        assert it.body == b"ab" and it.transport.is_reading_paused
        it.relay.resume()
        it.play(b"cd")
        it.end()
        assert await it.outcome() == "completed" and it.body == b"abcd"

    play(run)


def test_client_that_is_filled_by_what_came_before_keeps_its_upstream_paused():
    early = b"186a0\r\n" + b"x" * 100_000 + b"\r\n"

    async def run() -> None:
        it = Scene(early=early)
        assert it.transport.is_reading_paused
        exchange: Any = SimpleNamespace(client_paused=it.relay.pause)
        it.client.connection.exchange = exchange
        it.client.transport.is_stuck, it.client.transport.high = True, 65536
        await it.begin()
        assert it.transport.is_reading_paused

    play(run)


def test_upstream_paused_before_the_relay_goes_on_when_the_client_takes_it():
    async def run() -> None:
        it = Scene(early=b"186a0\r\n" + b"x" * 100_000 + b"\r\n")
        assert it.transport.is_reading_paused
        await it.begin()
        assert not it.transport.is_reading_paused

    play(run)


# --------------------------------------------------------------------------------------- plain bodies


def plain(body: bytes, dialect: Any = "openai", framing: str = "chunked") -> Scene:
    return Scene(dialect=dialect, observes_body=True, framing=framing)


@pytest.mark.parametrize(
    ("dialect", "body", "tokens"),
    [
        ("openai", {"usage": {"prompt_tokens": 3, "completion_tokens": 2}}, (3, 2)),
        (None, {"text": "a", "meta_info": {"prompt_tokens": 3, "completion_tokens": 2}}, (3, 2)),
        (
            "messages",
            {"usage": {"input_tokens": 3, "cache_read_input_tokens": 4, "output_tokens": 2}},
            (7, 2),
        ),
        ("responses", {"usage": {"input_tokens": 3, "output_tokens": 2}}, (3, 2)),
        ("openai", {"usage": None}, (0, 0)),
        ("openai", [1], (0, 0)),
    ],
)
def test_usage_of_a_plain_body_is_read_wherever_it_was_cut(dialect, body, tokens):
    raw = json.dumps(body).encode()

    async def run() -> None:
        for cut in range(1, len(raw)):
            it = await plain(raw, dialect).begin()
            it.play(raw[:cut], raw[cut:])
            it.end()
            assert await it.outcome() == "completed"
            assert it.body == raw
            usage = UsageReader(dialect == "messages").read(it.relay.usage_body)
            assert (usage.input_tokens, usage.output_tokens) == tokens

    play(run)


def test_body_that_is_not_json_is_relayed_all_the_same():
    async def run() -> None:
        it = await plain(b"").begin()
        it.play(b"{not json")
        it.end()
        assert await it.outcome() == "completed"
        assert it.body == b"{not json" and not UsageReader(False).read(it.relay.usage_body).is_known

    play(run)


def test_body_over_a_mebibyte_is_not_kept_for_counting():
    async def run() -> None:
        it = await plain(b"").begin()
        it.play(*[b"x" * 60_000] * (MAX_OBSERVED_BODY_BYTES // 60_000 + 2))
        assert not it.relay.observes_body and it.relay._body == []
        it.end()
        assert await it.outcome() == "completed"
        assert it.relay.skipped_observation == "body_too_large"

    play(run)


def test_repr_tells_the_state():
    async def run() -> None:
        it = await Scene().begin()
        it.play(b"abc")
        assert repr(it.relay) == "Relay(chunked out=3 outcome=running None)"
        it.end()
        await it.outcome()
        assert repr(it.relay) == "Relay(chunked out=3 outcome=completed None)"

    play(run)


CHUNKED_STREAM = {
    "openai": b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n' * 4
    + b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":4}}\n\ndata: [DONE]\n\n',
    "responses": b"".join(
        b'data: {"type":"response.output_text.delta","delta":"x","sequence_number":%d}\n\n' % n
        for n in range(6)
    ),
}


@pytest.mark.parametrize("api", CHUNKED_STREAM)
@pytest.mark.parametrize("events_a_chunk", [1, 2, 3])
@pytest.mark.parametrize("chunks_a_read", [1, 2, 5])
def test_whole_events_in_their_own_chunks_pass_as_they_stand_and_count_alike(
    api, events_a_chunk, chunks_a_read
):
    """The short cut for whole chunks and the long way must not differ in anything."""
    events = [e + b"\n\n" for e in CHUNKED_STREAM[api].split(b"\n\n") if e]
    payloads = [b"".join(events[i : i + events_a_chunk]) for i in range(0, len(events), events_a_chunk)]
    chunks = [b"%X\r\n%b\r\n" % (len(p), p) for p in payloads]
    reads = [b"".join(chunks[i : i + chunks_a_read]) for i in range(0, len(chunks), chunks_a_read)]

    async def run(pieces: list[bytes]) -> tuple[object, ...]:
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        it = await Scene(dialect=api, sse=SseRelay(api), upstream_head=head, framing="chunked").begin()
        for piece in pieces:
            it.transport.receive(piece)
        sse = it.relay._sse
        assert sse is not None
        facts = (
            it.body,
            it.relay.bytes_out,
            sse.usage.output_tokens,
            sse.has_ended,
            sse.last_sequence_number,
        )
        it.task.cancel()
        return facts

    async def both() -> None:
        wire = b"".join(chunks)
        byte_by_byte = await run([wire[i : i + 1] for i in range(len(wire))])
        assert await run(reads) == byte_by_byte
        assert byte_by_byte[0] == CHUNKED_STREAM[api]

    play(both)
