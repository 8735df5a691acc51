import json

import pytest

from meshd.backend.reply import DONE_EVENT, Dialect, Event, RequestError, error_event, error_reply, error_type


def test_event_with_a_name_has_both_lines() -> None:
    assert Event(b"{}", "ping").render() == b"event: ping\ndata: {}\n\n"
    assert DONE_EVENT.render() == b"data: [DONE]\n\n"


def test_errors_have_the_shape_of_their_dialect() -> None:
    error = RequestError(404, "model_not_found", "no")
    assert json.loads(error_reply(error, Dialect.OPENAI).body) == {
        "error": {"message": "no", "type": "not_found_error", "param": None, "code": "model_not_found"}
    }
    assert json.loads(error_reply(error, Dialect.MESSAGES).body) == {
        "type": "error",
        "error": {"type": "not_found_error", "message": "no"},
    }


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (429, "rate_limit_error"),
        (503, "api_error"),
    ],
)
def test_error_type_follows_the_status(status: int, kind: str) -> None:
    assert error_type(status, Dialect.OPENAI) == kind


def test_messages_has_types_of_its_own() -> None:
    assert error_type(529, Dialect.MESSAGES) == "overloaded_error"
    assert error_type(413, Dialect.MESSAGES) == "request_too_large"


def test_error_events_are_those_of_the_api() -> None:
    openai, messages, responses = (error_event(dialect, 5) for dialect in Dialect)
    assert (openai.name, messages.name, responses.name) == ("", "error", "error")
    assert json.loads(openai.data)["error"]["type"] == "api_error"
    assert json.loads(messages.data)["error"]["type"] == "api_error"
    assert json.loads(responses.data)["sequence_number"] == 5
