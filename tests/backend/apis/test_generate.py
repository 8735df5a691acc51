from collections.abc import Callable
from typing import Any

import pytest

from meshd.backend.apis.generate import answer
from meshd.backend.call import Call
from meshd.backend.reply import Reply, RequestError

MakeCall = Callable[..., Call]
Plain = Callable[[Reply], Any]
Stream = Callable[[Reply], list[Any]]

TEXT = "This is a deterministic answer to: Name a river"


def test_plain_answer_has_text_and_meta_info(call: MakeCall, plain: Plain) -> None:
    body = plain(answer(call(text="Name a river")))
    assert body["text"] == TEXT
    assert body["meta_info"].pop("id").startswith("gnt-")
    assert body["meta_info"] == {
        "prompt_tokens": 3,
        "completion_tokens": 9,
        "cached_tokens": 0,
        "finish_reason": {"type": "stop", "length": 9},
    }


def test_stream_repeats_the_text_so_far_and_finishes_on_the_last(call: MakeCall, stream: Stream) -> None:
    events = stream(answer(call(text="Name a river", sampling_params={"max_new_tokens": 3}, stream=True)))
    assert [event["text"] for event in events[:-1]] == ["This ", "This is ", "This is a"]
    assert [event["meta_info"]["completion_tokens"] for event in events[:-1]] == [1, 2, 3]
    finishes = [event["meta_info"]["finish_reason"] for event in events[:-1]]
    assert finishes == [None, None, {"type": "length", "length": 3}]
    assert events[-1] == "[DONE]"


def test_last_event_of_a_stream_equals_the_plain_text(call: MakeCall, stream: Stream) -> None:
    assert stream(answer(call(text="Name a river", stream=True)))[-2]["text"] == TEXT


def test_batches_of_texts_and_ids_are_answered_by_an_array(
    call: MakeCall, plain: Plain, stream: Stream
) -> None:
    assert [item["text"][-1] for item in plain(answer(call(text=["a", "b"])))] == ["a", "b"]
    assert [item["text"][-1] for item in plain(answer(call(input_ids=[[1], [2]])))] == ["1", "2"]
    assert plain(answer(call(input_ids=[1, 2])))["text"].endswith("1 2")
    copies = plain(answer(call(text="a", sampling_params={"n": 2})))
    assert len(copies) == 2 and copies[0]["meta_info"]["id"] != copies[1]["meta_info"]["id"]
    last = {
        event["index"]: event["text"] for event in stream(answer(call(text=["a", "b"], stream=True)))[:-1]
    }
    assert [last[0][-1], last[1][-1]] == ["a", "b"]


def test_limit_zero_still_streams_one_event(call: MakeCall, stream: Stream) -> None:
    events = stream(answer(call(text="a", sampling_params={"max_new_tokens": 0}, stream=True)))
    assert events[0]["text"] == "" and events[0]["meta_info"]["finish_reason"]["type"] == "length"
    assert events[1:] == ["[DONE]"]


def test_ignore_eos_is_a_sampling_parameter(call: MakeCall, plain: Plain) -> None:
    body = plain(answer(call(text="a", sampling_params={"max_new_tokens": 30, "ignore_eos": True})))
    assert len(body["text"].split()) == 30


def test_usage_is_left_out_on_request(call: MakeCall, plain: Plain) -> None:
    assert set(plain(answer(call(has_usage=False, text="a")))["meta_info"]) == {"id", "finish_reason"}


@pytest.mark.parametrize(
    "members", [{}, {"text": 7}, {"text": [1]}, {"input_ids": ["a"]}, {"text": "a", "sampling_params": 1}]
)
def test_missing_or_wrong_input_is_refused(call: MakeCall, members: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        answer(call(**members))
