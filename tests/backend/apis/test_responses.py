import json
from collections.abc import Callable
from typing import Any

import pytest

from meshd.backend.apis.responses import ResponseStore, answer
from meshd.backend.call import Call
from meshd.backend.reply import Reply, RequestError

MakeCall = Callable[..., Call]
Plain = Callable[[Reply], Any]
Stream = Callable[[Reply], list[Any]]

TEXT = "This is a deterministic answer to: Name a river"


def test_plain_answer_is_one_message_item(call: MakeCall, plain: Plain) -> None:
    body = plain(answer(call(input="Name a river", instructions="Be brief"), ResponseStore()))
    assert body["id"].startswith("resp_") and body["status"] == "completed"
    assert [item["type"] for item in body["output"]] == ["message"]
    assert body["output"][0]["content"][0]["text"] == TEXT
    assert (body["usage"]["input_tokens"], body["usage"]["output_tokens"]) == (5, 9)


def test_limit_makes_the_response_incomplete(call: MakeCall, plain: Plain, stream: Stream) -> None:
    body = plain(answer(call(input="x", max_output_tokens=2), ResponseStore()))
    assert body["status"] == "incomplete"
    assert body["incomplete_details"] == {"reason": "max_output_tokens"}
    events = stream(answer(call(input="x", max_output_tokens=2, stream=True), ResponseStore()))
    assert events[-1]["type"] == "response.incomplete"


def test_stream_has_the_events_of_the_api_numbered_from_zero(
    call: MakeCall, plain: Plain, stream: Stream
) -> None:
    items = [{"role": "user", "content": [{"type": "input_text", "text": "Name a river"}]}]
    events = stream(answer(call(input=items, stream=True), ResponseStore()))
    assert [event["type"] for event in events] == [
        "response.created",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * 9,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert "".join(event["delta"] for event in events[3:12]) == events[12]["text"] == TEXT
    assert events[0]["response"]["status"] == "in_progress"
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == TEXT


def test_usage_is_left_out_on_request(call: MakeCall, plain: Plain) -> None:
    assert plain(answer(call(has_usage=False, input="x"), ResponseStore()))["usage"] is None


def test_kept_response_can_be_read_cancelled_and_deleted(call: MakeCall, plain: Plain) -> None:
    store = ResponseStore()
    body = plain(answer(call(input="x"), store))
    assert plain(store.get(body["id"])) == body
    assert plain(store.cancel(body["id"]))["status"] == "cancelled"
    assert plain(store.get(body["id"]))["status"] == "cancelled"
    assert plain(store.delete(body["id"])) == {"id": body["id"], "object": "response", "deleted": True}
    for operation in (store.get, store.cancel, store.delete, store.input_items):
        with pytest.raises(RequestError) as caught:
            operation(body["id"])
        assert caught.value.status == 404


def test_input_items_are_those_of_the_request(call: MakeCall, plain: Plain) -> None:
    store = ResponseStore()
    items = [{"role": "user", "content": "a"}, {"id": "own", "role": "user", "content": "b"}]
    body = plain(answer(call(input=items), store))
    listed = plain(store.input_items(body["id"]))
    assert [item["content"] for item in listed["data"]] == ["a", "b"]
    assert listed["last_id"] == "own" and listed["has_more"] is False


def test_response_is_not_kept_when_the_request_says_so(call: MakeCall) -> None:
    store = ResponseStore()
    answer(call(input="x", store=False), store)
    assert len(store) == 0


def test_only_the_last_responses_are_kept(call: MakeCall, plain: Plain) -> None:
    store = ResponseStore(capacity=2)
    ids = [json.loads(answer(call(input=f"{n}"), store).body)["id"] for n in range(3)]
    assert len(store) == 2
    with pytest.raises(RequestError):
        store.get(ids[0])
    assert plain(store.get(ids[2]))["id"] == ids[2]


@pytest.mark.parametrize("value", [7, {}, True])
def test_input_of_another_kind_is_refused(call: MakeCall, value: object) -> None:
    with pytest.raises(RequestError):
        answer(call(input=value), ResponseStore())
