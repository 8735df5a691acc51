"""What an API gives back before it becomes bytes on a connection: a body, or a run of SSE events."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, NamedTuple

import orjson

JSON: Final = b"application/json"
SSE: Final = b"text/event-stream"
TEXT: Final = b"text/plain; charset=utf-8"
DONE: Final = b"[DONE]"

Header = tuple[bytes, bytes]


class Dialect(Enum):
    """Whose shape an error has."""

    OPENAI = "openai"
    MESSAGES = "messages"
    RESPONSES = "responses"  # errors as OPENAI; a stream's error event of its own


class Event(NamedTuple):
    """One SSE event; ``is_terminal`` marks the one that ends a stream of its API."""

    data: bytes
    name: str = ""
    is_terminal: bool = False

    def render(self) -> bytes:
        if self.name:
            return b"event: %b\ndata: %b\n\n" % (self.name.encode(), self.data)
        return b"data: %b\n\n" % self.data


DONE_EVENT: Final = Event(DONE, is_terminal=True)


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer: ``body`` if plain; ``events``, read once, if a stream.

    ``words``: how many words were generated, hence how long a plain answer takes under a token delay.
    """

    status: int
    content_type: bytes = JSON
    body: bytes = b""
    events: Iterator[Event] | None = None
    headers: tuple[Header, ...] = ()
    words: int = 0


class RequestError(Exception):
    """The request cannot be answered; becomes a JSON error of the path's dialect."""

    def __init__(self, status: int, code: str, message: str, headers: tuple[Header, ...] = ()) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.headers = headers


def json_reply(value: Any, *, status: int = 200, headers: tuple[Header, ...] = (), words: int = 0) -> Reply:
    return Reply(status, JSON, orjson.dumps(value), headers=headers, words=words)


def stream_reply(events: Iterator[Event], words: int) -> Reply:
    return Reply(200, SSE, events=events, words=words)


def error_reply(error: RequestError, dialect: Dialect) -> Reply:
    body = error_body(error.status, error.code, error.message, dialect)
    return json_reply(body, status=error.status, headers=error.headers)


def error_body(status: int, code: str, message: str, dialect: Dialect) -> dict[str, Any]:
    kind = error_type(status, dialect)
    if dialect is Dialect.MESSAGES:
        return {"type": "error", "error": {"type": kind, "message": message}}
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def error_event(dialect: Dialect, sequence_number: int) -> Event:
    """Return the event with which a stream of ``dialect`` tells that it failed."""
    code, message = "backend_fault", "The backend failed on request."
    if dialect is Dialect.MESSAGES:
        return Event(orjson.dumps(error_body(500, code, message, dialect)), "error")
    if dialect is Dialect.OPENAI:
        return Event(orjson.dumps(error_body(500, code, message, dialect)))
    body = {
        "type": "error",
        "code": code,
        "message": message,
        "param": None,
        "sequence_number": sequence_number,
    }
    return Event(orjson.dumps(body), "error")


def error_type(status: int, dialect: Dialect) -> str:
    if status == 529 and dialect is Dialect.MESSAGES:
        return "overloaded_error"
    if status == 413 and dialect is Dialect.MESSAGES:
        return "request_too_large"
    known = {
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        429: "rate_limit_error",
    }
    return known.get(status, "api_error" if status >= 500 else "invalid_request_error")
