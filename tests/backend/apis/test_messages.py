from collections.abc import Callable
from typing import Any

import pytest

from meshd.backend.apis.messages import answer, count
from meshd.backend.call import Call, make_call
from meshd.backend.reply import Reply, RequestError

MakeCall = Callable[..., Call]
Plain = Callable[[Reply], Any]
Stream = Callable[[Reply], list[Any]]

RIVER = [{"role": "user", "content": [{"type": "text", "text": "Name a river"}]}]


def test_plain_answer_is_one_text_block(call: MakeCall, plain: Plain) -> None:
    body = plain(answer(call(messages=RIVER, system="Be brief")))
    assert body["content"] == [{"type": "text", "text": "This is a deterministic answer to: Name a river"}]
    assert (body["type"], body["role"], body["stop_reason"]) == ("message", "assistant", "end_turn")
    assert body["id"].startswith("msg_")
    assert (body["usage"]["input_tokens"], body["usage"]["output_tokens"]) == (5, 9)


def test_stream_has_the_events_of_the_api_in_order(call: MakeCall, stream: Stream) -> None:
    events = stream(answer(call(messages=RIVER, max_tokens=2, stream=True)))
    assert [event["type"] for event in events] == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert [event["delta"]["text"] for event in events[2:4]] == ["This ", "is"]
    assert events[0]["message"]["usage"]["input_tokens"] == 3
    assert events[5]["delta"]["stop_reason"] == "max_tokens"
    assert events[5]["usage"] == {"output_tokens": 2}


def test_usage_is_left_out_on_request(call: MakeCall, plain: Plain, stream: Stream) -> None:
    assert "usage" not in plain(answer(call(has_usage=False, messages=RIVER)))
    events = stream(answer(call(has_usage=False, messages=RIVER, stream=True)))
    assert "usage" not in events[0]["message"] and "usage" not in events[-2]


def test_count_tokens_counts_system_blocks_and_all_messages(call: MakeCall, plain: Plain) -> None:
    system = [{"type": "text", "text": "a b"}]
    messages = [*RIVER, {"role": "assistant", "content": "The Rhine"}]
    assert plain(count(call(messages=messages, system=system))) == {"input_tokens": 7}


@pytest.mark.parametrize("raw", [b'{"messages":[{"role":"user","content":"x"}]}', b'{"model":"m"}'])
@pytest.mark.parametrize("api", [answer, count])
def test_model_and_messages_are_required(raw: bytes, api: Callable[[Call], Reply]) -> None:
    with pytest.raises(RequestError) as caught:
        api(make_call(raw, ("m",), has_usage=True, embedding_dimensions=16))
    assert caught.value.status == 400
