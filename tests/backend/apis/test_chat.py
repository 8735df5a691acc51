from collections.abc import Callable
from typing import Any

import pytest

from meshd.backend.apis.chat import answer
from meshd.backend.call import Call, make_call
from meshd.backend.reply import Reply, RequestError

MakeCall = Callable[..., Call]
Plain = Callable[[Reply], Any]
Stream = Callable[[Reply], list[Any]]

RIVER = [{"role": "user", "content": "Name a river"}]
TEXT = "This is a deterministic answer to: Name a river"


def test_example_body_gives_the_example_id_and_answer(plain: Plain) -> None:
    body = b'{"model":"meshd-demo","messages":[{"role":"user","content":"Name a river"}]}'
    assert plain(answer(make_call(body, ("meshd-demo",), has_usage=True, embedding_dimensions=16))) == {
        "id": "chatcmpl-be50ca8a97520f91a91a4187",
        "object": "chat.completion",
        "created": 1700000000,
        "model": "meshd-demo",
        "system_fingerprint": "meshd-backend-1",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": TEXT, "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 9,
            "total_tokens": 12,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }


def test_stream_has_role_words_finish_usage_and_done(call: MakeCall, stream: Stream) -> None:
    options = {"include_usage": True}
    events = stream(answer(call(messages=RIVER, max_tokens=2, stream=True, stream_options=options)))
    deltas = [(e["choices"][0]["delta"], e["choices"][0]["finish_reason"]) for e in events[:-2]]
    assert deltas == [
        ({"role": "assistant", "content": ""}, None),
        ({"content": "This "}, None),
        ({"content": "is"}, None),
        ({}, "length"),
    ]
    assert events[-2]["choices"] == [] and events[-2]["usage"]["completion_tokens"] == 2
    assert events[-1] == "[DONE]"
    assert {e["object"] for e in events[:-1]} == {"chat.completion.chunk"}


def test_stream_without_the_option_has_no_usage(call: MakeCall, stream: Stream) -> None:
    events = stream(answer(call(messages=RIVER, stream=True)))
    assert not any("usage" in event for event in events[:-1])


def test_n_gives_equal_choices_and_counts_each(call: MakeCall, plain: Plain, stream: Stream) -> None:
    body = plain(answer(call(messages=RIVER, n=3)))
    assert [c["index"] for c in body["choices"]] == [0, 1, 2]
    assert {c["message"]["content"] for c in body["choices"]} == {TEXT}
    assert body["usage"]["completion_tokens"] == 27 and body["usage"]["prompt_tokens"] == 3
    texts = {0: "", 1: "", 2: ""}
    for event in stream(answer(call(messages=RIVER, n=3, stream=True)))[:-1]:
        choice = event["choices"][0]
        texts[choice["index"]] += choice["delta"].get("content", "")
    assert set(texts.values()) == {TEXT}


def test_prompt_tokens_count_every_message_and_parts_are_joined(call: MakeCall, plain: Plain) -> None:
    parts = [{"type": "text", "text": "Name a"}, {"type": "text", "text": "river"}]
    messages = [{"role": "system", "content": "Be brief"}, {"role": "user", "content": parts}]
    body = plain(answer(call(messages=messages)))
    assert body["usage"]["prompt_tokens"] == 5
    assert body["choices"][0]["message"]["content"] == TEXT


def test_completion_limit_wins_over_max_tokens_and_ignore_eos_fills_it(call: MakeCall, plain: Plain) -> None:
    body = plain(answer(call(messages=RIVER, max_completion_tokens=20, max_tokens=1, ignore_eos=True)))
    assert len(body["choices"][0]["message"]["content"].split()) == 20
    assert body["choices"][0]["finish_reason"] == "length"


def test_usage_is_left_out_on_request(call: MakeCall, plain: Plain, stream: Stream) -> None:
    assert "usage" not in plain(answer(call(has_usage=False, messages=RIVER)))
    options = {"include_usage": True}
    events = stream(answer(call(has_usage=False, messages=RIVER, stream=True, stream_options=options)))
    assert not any("usage" in event for event in events[:-1])


def test_missing_messages_are_refused(call: MakeCall) -> None:
    with pytest.raises(RequestError):
        answer(call())
