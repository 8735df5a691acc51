"""Server-sent events pass unchanged and are observed alike, however their bytes were cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshd.io.sse import MAX_HELD_BYTES, SseRelay, split_events

CHAT = (
    b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n'
    b'data: {"choices":[{"delta":{"content":"say data: [DONE]\\n\\n"}}]}\n\n'
    b": comment\n\n"
    b'data: {"choices":[{"delta":{"content":" river"},"finish_reason":"stop"}]}\r\n\r\n'
    b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":3}}\n\n'
    b"data: [DONE]\n\n"
)
MESSAGES = (
    b'event: message_start\ndata: {"type":"message_start","message":{"usage":{"input_tokens":5,'
    b'"cache_read_input_tokens":10,"cache_creation_input_tokens":2,"output_tokens":1}}}\n\n'
    b"event: content_block_start\n"
    b'data: {"type":"content_block_start","content_block":{"type":"text","text":""}}\n\n'
    b"event: content_block_delta\n"
    b'data: {"type":"content_block_delta","delta":{"type":"text_delta","text":"Hi"}}\n\n'
    b'event: message_delta\ndata: {"type":"message_delta","usage":{"output_tokens":9}}\n\n'
    b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
)
RESPONSES = (
    b"event: response.created\n"
    b'data: {"type":"response.created","sequence_number":0,"response":{"usage":null}}\n\n'
    b"event: response.refusal.delta\n"
    b'data: {"type":"response.refusal.delta","delta":"no","sequence_number":1}\n\n'
    b'event: response.completed\ndata: {"type":"response.completed","sequence_number":2,'
    b'"response":{"usage":{"input_tokens":4,"output_tokens":6}}}\n\n'
)
STREAMS = [("openai", CHAT, 7, 3), ("messages", MESSAGES, 17, 9), ("responses", RESPONSES, 4, 6)]


def run(api: str, pieces: list[bytes]) -> tuple[bytes, SseRelay]:
    relay = SseRelay(api)
    out = b"".join(relay.feed(piece) for piece in pieces)
    return out + relay.finish(), relay


def facts(relay: SseRelay) -> tuple:
    return (
        relay.has_first_token,
        relay.has_ended,
        relay.is_success,
        relay.has_error_event,
        relay.usage.input_tokens,
        relay.usage.output_tokens,
        relay.last_sequence_number,
    )


@pytest.mark.parametrize(("api", "stream", "input_tokens", "output_tokens"), STREAMS)
def test_stream_cut_at_every_byte_is_relayed_and_observed_alike(api, stream, input_tokens, output_tokens):
    _, whole = run(api, [stream])
    assert whole.is_success and whole.has_ended and whole.has_first_token
    assert (whole.usage.input_tokens, whole.usage.output_tokens) == (input_tokens, output_tokens)
    for cut in range(len(stream) + 1):
        out, relay = run(api, [stream[:cut], stream[cut:]])
        assert out == stream
        assert facts(relay) == facts(whole), cut


@given(st.sampled_from(STREAMS), st.lists(st.integers(1, 60), min_size=1, max_size=30))
def test_stream_in_any_pieces_is_relayed_and_observed_alike(row, sizes):
    api, stream = row[:2]
    pieces, at = [], 0
    for size in sizes * 200:
        pieces.append(stream[at : at + size])
        at += size
        if at >= len(stream):
            break
    out, relay = run(api, pieces)
    assert out == stream[:at]
    if at >= len(stream):
        assert facts(relay) == facts(run(api, [stream])[1])


@pytest.mark.parametrize(("api", "stream"), [row[:2] for row in STREAMS])
def test_only_whole_events_are_relayed(api, stream):
    for cut in range(len(stream)):
        relay = SseRelay(api)
        sent = relay.feed(stream[:cut])
        assert not sent or sent.endswith((b"\n\n", b"\n\r\n"))
        assert stream.startswith(sent)


def test_event_too_long_to_hold_flows_through():
    event = b"data: " + b"x" * (MAX_HELD_BYTES + 10) + b"\n\n"
    relay = SseRelay("openai")
    first = relay.feed(event[:-1])
    assert len(first) >= MAX_HELD_BYTES and relay.has_sent_partial
    assert first + relay.feed(event[-1:]) == event
    assert not relay.has_sent_partial


def test_observation_ends_at_a_mebibyte_of_one_event_but_bytes_go_on():
    relay = SseRelay("openai")
    pieces = [b"data: " + b"x" * 70000] + [b"y" * 70000] * 20 + [b"\n\n", b"data: [DONE]\n\n"]
    assert b"".join(relay.feed(p) for p in pieces) + relay.finish() == b"".join(pieces)
    assert not relay.is_observing


def test_nothing_is_counted_after_the_end_of_the_stream():
    _, relay = run("openai", [CHAT, b'data: {"usage":{"prompt_tokens":99,"completion_tokens":99}}\n\n'])
    assert relay.usage.input_tokens == 7


@pytest.mark.parametrize(
    ("api", "event"),
    [
        ("openai", b'data: {"error":{"message":"x"}}\n\n'),
        ("messages", b'event: error\ndata: {"type":"error","error":{}}\n\n'),
        ("responses", b'data: {"type":"error","code":"x"}\n\n'),
        ("responses", b'data: {"type":"response.failed"}\n\n'),
    ],
)
def test_error_event_ends_the_stream_without_success(api, event):
    _, relay = run(api, [event])
    assert relay.has_ended and relay.has_error_event and not relay.is_success


@pytest.mark.parametrize(
    ("api", "payload", "is_output"),
    [
        ("openai", b'{"choices":[{"delta":{"role":"assistant"}}]}', False),
        ("openai", b'{"choices":[{"delta":{"content":""}}]}', False),
        ("openai", b'{"choices":[{"delta":{"refusal":"no"}}]}', True),
        ("openai", b'{"choices":[{"delta":{"reasoning_content":"hm"}}]}', True),
        ("openai", b'{"choices":[{"delta":{"tool_calls":[{"function":{"name":"f"}}]}}]}', True),
        ("openai", b'{"choices":[{"delta":{"function_call":{"arguments":"{"}}}]}', True),
        ("openai", b'{"choices":[{"text":"a"}]}', True),
        ("openai", b'{"text":"a","meta_info":{}}', True),
        ("openai", b'{"output_ids":[1]}', True),
        ("messages", b'{"type":"content_block_start","content_block":{"type":"tool_use"}}', True),
        ("messages", b'{"type":"content_block_delta","delta":{"partial_json":"{"}}', True),
        ("messages", b'{"type":"ping"}', False),
        ("responses", b'{"type":"response.output_item.added","item":{"type":"function_call"}}', True),
        ("responses", b'{"type":"response.output_item.added","item":{"type":"message"}}', False),
        ("responses", b'{"type":"response.function_call_arguments.delta"}', True),
    ],
)
def test_first_output_token_is_recognised(api, payload, is_output):
    _, relay = run(api, [b"data: " + payload + b"\n\n"])
    assert relay.has_first_token is is_output


@given(st.binary(max_size=300))
def test_arbitrary_bytes_pass_unchanged(data):
    for api in ("openai", "messages", "responses", ""):
        out, _ = run(api, [data[:100], data[100:]])
        assert out == data


def test_data_lines_of_one_event_are_joined():
    assert split_events(b"data: a\ndata:b\ndata\nid: 1\n\n: c\n\ndata: d\r\n\r\n") == [b"a\nb\n", b"d"]


@pytest.mark.parametrize(
    ("usage", "passes"),
    [
        (b'"usage":null', True),
        (b'"usage": null', True),
        (b'"x":"usage","usage":null', False),
        (b'"usage":null,"usage":{"prompt_tokens":1}', False),
        (b'"usage" :null', False),
        (b'"usage":{"prompt_tokens":1}', False),
        (b'"usage":', False),
    ],
)
def test_events_that_say_that_they_have_no_usage_pass_unseen(usage, passes):
    relay = SseRelay("openai")
    relay.feed(b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n')
    assert relay.has_first_token
    assert relay.may_pass(b'data: {"choices":[],' + usage + b"}\n\n") is passes
