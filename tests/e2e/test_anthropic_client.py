"""The official Anthropic client: messages plain and streamed, and the errors it raises."""

from __future__ import annotations

from collections.abc import Iterator

import anthropic
import pytest

from tests.fakes.node import Node

ANSWER = "This is a deterministic answer to: Name a river"
ASK = {"model": "m1", "max_tokens": 50, "messages": [{"role": "user", "content": "Name a river"}]}


@pytest.fixture(scope="module")
def client(node: Node) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=node.url, api_key="k", max_retries=0, timeout=20) as made:
        yield made


def test_message(client):
    answer = client.messages.create(**ASK, system="Be brief")
    assert answer.content[0].text == ANSWER
    assert answer.stop_reason == "end_turn"
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (5, len(ANSWER.split()))


def test_request_id_has_the_prefix_of_messages(client):
    raw = client.messages.with_raw_response.create(**ASK)
    assert raw.headers["x-request-id"].startswith("msg-")
    assert raw.parse().content[0].text == ANSWER


def test_content_of_blocks(client):
    content = [{"type": "text", "text": "Name a"}, {"type": "text", "text": "river"}]
    answer = client.messages.create(
        model="m1", max_tokens=50, messages=[{"role": "user", "content": content}]
    )
    assert answer.content[0].text == ANSWER


def test_message_stream_of_raw_events(client):
    events = list(client.messages.create(**ASK, stream=True))
    assert (events[0].type, events[-1].type) == ("message_start", "message_stop")
    assert "".join(e.delta.text for e in events if e.type == "content_block_delta") == ANSWER


def test_message_stream_helper_gathers_the_whole_message(client):
    with client.messages.stream(**ASK) as stream:
        assert "".join(stream.text_stream) == ANSWER
        message = stream.get_final_message()
    assert message.content[0].text == ANSWER
    assert message.stop_reason == "end_turn"
    assert message.usage.output_tokens == len(ANSWER.split())


def test_stop_at_the_token_limit(client):
    answer = client.messages.create(**{**ASK, "max_tokens": 3})
    assert (answer.content[0].text, answer.stop_reason) == ("This is a", "max_tokens")


# ------------------------------------------------------------------------------------------------ errors


def raised(client: anthropic.Anthropic, kind: type[anthropic.APIStatusError], **arguments):
    with pytest.raises(kind) as caught:
        client.messages.create(**{**ASK, **arguments})
    error = caught.value
    assert type(error) is kind
    return error


def test_bad_request_of_our_own(client):
    error = raised(client, anthropic.BadRequestError, messages=[])
    assert error.status_code == 400
    assert error.body["type"] == "error"
    assert error.body["error"]["type"] == "invalid_request_error"
    assert error.body["request_id"] == error.response.headers["x-request-id"]
    assert error.body["request_id"].startswith("msg-")
    assert error.response.headers["x-mesh-error-code"] == "invalid_request"


def test_unknown_model(client):
    error = raised(client, anthropic.NotFoundError, model="nope")
    assert (error.status_code, error.body["error"]["type"]) == (404, "not_found_error")
    assert error.response.headers["x-mesh-error-code"] == "model_not_found"


def test_request_id_of_the_caller_stands_in_the_error(client):
    error = raised(client, anthropic.BadRequestError, messages=[], extra_headers={"x-request-id": "mine-8"})
    assert error.body["request_id"] == error.response.headers["x-request-id"] == "mine-8"


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "BadRequestError"),
        (401, "AuthenticationError"),
        (403, "PermissionDeniedError"),
        (404, "NotFoundError"),
        (413, "RequestTooLargeError"),
        (429, "RateLimitError"),
        (500, "InternalServerError"),
        (503, "ServiceUnavailableError"),
        (529, "OverloadedError"),
    ],
)
def test_error_of_the_upstream(client, status, kind):
    expected = getattr(anthropic, kind, None) or getattr(anthropic._exceptions, kind)
    error = raised(client, expected, extra_headers={"x-backend-fault": f"status={status}"})
    assert error.status_code == status
    assert error.body["type"] == "error"
    assert error.response.headers["x-request-id"].startswith("msg-")
    assert "x-mesh-error-code" not in error.response.headers


def test_upstream_that_breaks_before_its_head(client):
    with pytest.raises(anthropic.InternalServerError) as caught:
        client.messages.create(**ASK, extra_headers={"x-backend-fault": "close"})
    error = caught.value
    assert (error.status_code, error.body["error"]["type"]) == (502, "api_error")
    assert error.body["request_id"] == error.response.headers["x-request-id"]


def test_stream_that_breaks_raises_and_never_looks_complete(client):
    fault = {"x-backend-fault": "cut=700"}
    seen = []
    with pytest.raises(anthropic.APIError):
        seen.extend(event.type for event in client.messages.create(**ASK, stream=True, extra_headers=fault))
    assert seen[0] == "message_start" and "message_stop" not in seen


def test_tokens_are_counted_by_the_upstream(client):
    counted = client.messages.count_tokens(model="m1", messages=[{"role": "user", "content": "a b c"}])
    assert counted.input_tokens == 3


def test_message_with_tools_is_answered(client):
    message = client.messages.create(
        model="m1",
        max_tokens=50,
        messages=[{"role": "user", "content": "Name a river"}],
        tools=[{"name": "f", "description": "d", "input_schema": {"type": "object"}}],
    )
    assert message.content[0].text.endswith("Name a river")
