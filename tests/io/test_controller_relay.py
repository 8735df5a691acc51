"""What is asked of the controller for an admin route."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from meshd.errors import MeshError
from meshd.io import controller_relay
from meshd.io.account import Record
from meshd.io.controller_relay import ask_controller
from meshd.io.http1 import parse_request_head, parse_response_head
from meshd.io.upstream import UpstreamFailure

pytestmark = pytest.mark.skipif(
    not controller_relay.__file__.endswith(".py"), reason="compiled code takes no stand-in for Services"
)

OK = parse_response_head(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n", "GET")


class PlayedLeg:
    def __init__(self, answer: Any) -> None:
        self.answer = answer
        self.request_deadline = 10.0
        self.fresh: list[bool] = []

    async def ask(self, address: Any, method: str, request: bytes, body: Any, needs_fresh: bool) -> Any:
        self.fresh.append(needs_fresh)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def ask(leg: PlayedLeg, method: str = "GET") -> Any:
    head = parse_request_head(f"{method} /workers HTTP/1.1\r\nhost: h\r\n\r\n".encode(), 65536, 256)
    io: Any = SimpleNamespace(controller=None)
    room: Any = SimpleNamespace(content=lambda length: b""[:length])
    played: Any = leg
    return asyncio.run(ask_controller(played, io, head, Record(0.0), room))


def test_answer_may_be_taken_slowly_by_the_client() -> None:
    leg = PlayedLeg(OK)
    assert ask(leg) is OK
    assert leg.request_deadline == 0.0


def test_changes_are_sent_once_on_a_fresh_connection() -> None:
    leg = PlayedLeg(OK)
    for method in ("GET", "POST", "PUT", "DELETE"):
        ask(leg, method)
    assert leg.fresh == [False, True, True, True]


def test_controller_that_does_not_answer_is_unavailable() -> None:
    with pytest.raises(MeshError) as caught:
        ask(PlayedLeg(UpstreamFailure("upstream_timeout", "request timer", False, True)))
    assert (caught.value.code, caught.value.status) == ("controller_unavailable", 503)
