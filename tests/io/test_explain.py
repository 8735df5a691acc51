"""What ``POST /route/explain`` takes for a question, and what it makes of its parts."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from meshd.api.endpoints import EndpointRegistry
from meshd.config import Settings
from meshd.errors import MeshError
from meshd.io.explain import Question, read_question
from meshd.io.session_assignment import session_key


class Room:
    """A body's room that may grow to ``most`` bytes."""

    def __init__(self, body: bytes, most: int = 1 << 20) -> None:
        self.body = memoryview(bytearray(body))
        self._most = most

    def grow(self, body_bytes: int) -> bool:
        assert body_bytes > len(self.body), "a slot refuses to grow to what fits already"
        if body_bytes > self._most:
            return False
        self.body = memoryview(bytearray(self.body).ljust(body_bytes))
        return True

    def fill(self, body: bytes) -> None:
        self.body[: len(body)] = body


def ask(question: Any, most: int = 1 << 20) -> tuple[Question, bytes]:
    """Read a question; return it and the body left in the room."""
    raw = question if isinstance(question, bytes) else json.dumps(question).encode()
    room = Room(raw, most)
    io = SimpleNamespace(
        settings=Settings(), endpoints=EndpointRegistry(("/custom/*",)), max_body_bytes=100_000
    )
    found = read_question(io, room, len(raw))  # type: ignore[arg-type]
    return found, bytes(room.body[: found.body_bytes])


def refusal(question: Any, most: int = 1 << 20) -> MeshError:
    with pytest.raises(MeshError) as caught:
        ask(question, most)
    assert not caught.value.is_closing
    return caught.value


def test_body_of_the_request_is_left_where_the_question_was() -> None:
    body = {
        "model": "m1",
        "messages": [{"role": "user", "content": "Grüße, 川"}],
        "seed": 2**70,
        "top_p": 1e16,
    }
    question, left = ask({"path": "/v1/chat/completions?a=b", "body": body})
    assert question.endpoint.name == "chat" and question.head.path == "/v1/chat/completions"
    assert json.loads(left)["messages"] == body["messages"]
    assert list(json.loads(left)) == list(body), "members keep their order, which the routing text has too"


def test_headers_are_those_of_the_request_and_json_is_the_default() -> None:
    question, left = ask({"path": "/v1/completions", "headers": {"X-Session-Id": "s-42"}, "body": {}})
    assert session_key(question.head) == b"s-42" and left == b"{}"
    assert question.head.values[b"content-type"] == b"application/json"
    assert question.head.content_length == 2
    question, left = ask({"path": "/custom/rerank", "headers": {"content-length": "99", "host": "a b"}})
    assert (question.endpoint.name, left, question.head.content_length) == ("passthrough", b"", 0)


@pytest.mark.parametrize(
    ("question", "code"),
    [
        (b"", "invalid_request"),
        (b"[]", "invalid_request"),
        ({"body": {}}, "invalid_request"),
        ({"path": 1}, "invalid_request"),
        ({"path": "v1/completions"}, "invalid_request"),
        ({"path": "/v1/completions HTTP/1.1\r\nx: y"}, "invalid_request"),
        ({"path": "/v1/completions", "bdy": {}}, "invalid_request"),
        ({"path": "/v1/completions", "headers": []}, "invalid_request"),
        ({"path": "/v1/completions", "headers": {"a": 1}}, "invalid_request"),
        ({"path": "/v1/tokenize", "body": {}}, "invalid_request"),
        ({"path": "/v1/responses/resp_1/cancel"}, "invalid_request"),
        ({"path": "/v1/models"}, "method_not_allowed"),
        ({"path": "/nowhere"}, "not_found"),
        ({"path": "/v1/completions", "headers": {"a\r\nb": "c"}}, "malformed_request"),
        ({"path": "/v1/completions", "headers": {"a": "b\0"}}, "malformed_request"),
        ({"path": "/v1/completions", "headers": {"Content-Encoding": "gzip"}}, "unsupported_encoding"),
        ({"path": "/v1/completions", "headers": {"Content-Type": "text/plain"}}, "unsupported_content_type"),
        ({"path": "/v1/completions", "headers": {"expect": "the worst"}}, "expectation_failed"),
        ({"path": "/v1/completions", "headers": {"a": "b" * 70_000}}, "header_too_large"),
        ({"path": "/v1/completions", "body": {"prompt": "a" * 100_000}}, "body_too_large"),
    ],
)
def test_what_is_no_question_or_no_request_is_refused(question: Any, code: str) -> None:
    assert refusal(question).code == code


def test_body_that_is_longer_when_written_anew_gets_more_room() -> None:
    raw = b'{"path":"/v1/completions","body":{"prompt":[' + b"1e15," * 200 + b"1]}}"
    _, left = ask(raw)
    assert len(left) > len(raw) and json.loads(left)["prompt"][:2] == [1e15, 1e15]
    assert refusal(raw, most=len(raw)).code == "buffer_budget_exhausted"
