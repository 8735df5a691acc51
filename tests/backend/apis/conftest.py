"""Calls an API function without a server."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from meshd.backend.call import Call, make_call
from meshd.backend.reply import DONE, Reply


@pytest.fixture
def call() -> Callable[..., Call]:
    def build(has_usage: bool = True, embedding_dimensions: int = 16, **body: Any) -> Call:
        raw = json.dumps({"model": "meshd-demo", **body}).encode()
        return make_call(raw, ("meshd-demo",), has_usage=has_usage, embedding_dimensions=embedding_dimensions)

    return build


@pytest.fixture
def plain() -> Callable[[Reply], Any]:
    def read(reply: Reply) -> Any:
        assert (reply.status, reply.content_type, reply.events) == (200, b"application/json", None)
        return json.loads(reply.body)

    return read


@pytest.fixture
def stream() -> Callable[[Reply], list[Any]]:
    """Return the data of each event; the terminal flag must be on the last alone, names equal types."""

    def read(reply: Reply) -> list[Any]:
        assert reply.events is not None and reply.content_type == b"text/event-stream"
        events = list(reply.events)
        assert [event.is_terminal for event in events] == [False] * (len(events) - 1) + [True]
        data = ["[DONE]" if event.data == DONE else json.loads(event.data) for event in events]
        for event, value in zip(events, data, strict=True):
            assert event.name == (value["type"] if event.name else "")
        return data

    return read
