"""Event streams: every byte passes once and in order, and what is observed does not depend on the cuts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

from hypothesis import strategies as st

from meshd.io import sse
from meshd.io.sse import SseRelay
from tests.fuzz.engine import Target, cuts, main, mutated

APIS = ("openai", "messages", "responses", "")
EVENTS = [
    b'data: {"choices":[{"text":"a"}]}', b'data: {"choices":[{"delta":{"content":"b"}}]}',
    b"data: [DONE]", b"data:[DONE]",
    b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":5}}', b": comment",
    b"event: x\nid: 1\nretry: 9", b'data: {"error":{"message":"m"}}',
    b'data: {"type":"error","error":{"type":"t"}}', b'data: {"usage":null}',
    b'data: {"type":"message_start","message":{"usage":{"input_tokens":7,"output_tokens":1}}}',
    b'data: {"type":"content_block_delta","delta":{"text":"c"}}', b'data: {"type":"message_stop"}',
    b'data: {"type":"message_delta","usage":{"output_tokens":9,"cache_read_input_tokens":2}}',
    b'data: {"type":"response.output_text.delta","sequence_number":4}',
    b'data: {"type":"response.failed"}',
    b'data: {"type":"response.completed","sequence_number":6,"response":{"usage":{"output_tokens":2}}}',
    b'data: {"text":"t","meta_info":{"prompt_tokens":2,"completion_tokens":4}}', b"data: {", b"data",
    b"data: 1", b"data: []", b'data: {"a":\ndata: 1}',
    b'data: {"message":"x","response":[],"meta_info":3}', b"garbage", b"",
]  # fmt: skip
WORDS = [
    *EVENTS, b"\n", b"\n\n", b"\r\n", b"\r\n\r\n", b"\r", b"\n\r\n", b"data: ", b"[DONE]", b'"usage"',
    b'"error"', b"\xff", b"x" * 30, b'{"meta_info":{"prompt_tokens":8}}', b'"sequence_number":99',
]  # fmt: skip


@st.composite
def _streams(draw: st.DrawFn) -> bytes:
    ending = draw(st.sampled_from([b"\n\n", b"\r\n\r\n", b"\n\r\n"]))
    return b"".join(event + ending for event in draw(st.lists(st.sampled_from(EVENTS), max_size=8)))


@contextlib.contextmanager
def _holding(count: int) -> Iterator[None]:
    """Hold so few bytes that events flow in part."""
    with mock.patch.object(sse, "MAX_HELD_BYTES", count):
        yield


def _relay(api: str, pieces: list[bytes]) -> tuple[object, ...]:
    relay = SseRelay(api)
    out = b""
    for index, piece in enumerate(pieces):
        out += relay.feed(piece)
        if not relay.has_sent_partial:
            so_far = b"".join(pieces[: index + 1])
            assert so_far.startswith(out) and (not out or _ends_event(out)), "half an event was let through"
    out += relay.finish()
    assert out == b"".join(pieces)
    usage = (relay.usage.is_known, relay.usage.input_tokens, relay.usage.output_tokens)
    return (
        usage,
        relay.has_first_token,
        relay.has_ended,
        relay.is_success,
        relay.has_error_event,
        relay.has_ended or relay.last_sequence_number,  # nobody asks for it after the end
    )


def _ends_event(out: bytes) -> bool:
    return out.endswith((b"\n\n", b"\n\r\n"))


def check(data: bytes) -> None:
    for api in APIS:
        seen = _relay(api, [data])
        assert seen[2] or not (seen[3] or seen[4])
        for held in (65536, 24):
            with _holding(held):
                for pieces in cuts(data, ways=2):
                    assert _relay(api, pieces) == seen, (api, held, pieces)


TARGET = Target("sse_scanner", mutated(_streams(), WORDS), check)

if __name__ == "__main__":
    main(TARGET)
