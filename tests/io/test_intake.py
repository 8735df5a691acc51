"""What is waited for before a request is decided: its counts, and the invitation to send a body."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from meshd.errors import MeshError
from meshd.io import intake as intake_module
from meshd.io.http1 import RequestHead, parse_request_head
from meshd.io.intake import begin_body, wait_for_ticket

pytestmark = pytest.mark.skipif(
    not intake_module.__file__.endswith(".py"),
    reason="compiled code takes no stand-in for Services or a connection",
)


class Counted:
    """Services whose director lets nobody in before ``verdict`` resolves; ``events``: what was counted."""

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.verdict: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.now = 5.0
        self.director = SimpleNamespace(wait_for_ticket=self._wait)
        self.metrics = SimpleNamespace(
            admission_rejected=self.events.append,
            admission_canceled=SimpleNamespace(inc=lambda: self.events.append("canceled")),
            admission_wait=SimpleNamespace(observe=self.events.append),
        )

    def clock(self) -> float:
        return self.now

    async def _wait(self) -> str:
        return await self.verdict


def test_a_wait_for_a_ticket_is_timed():
    async def scene() -> None:
        io: Any = Counted()
        waiting = asyncio.ensure_future(wait_for_ticket(io))
        await asyncio.sleep(0)
        io.now = 5.5
        io.verdict.set_result("ticket")
        assert await waiting == "ticket" and io.events == [0.5]

    asyncio.run(scene())


def test_a_refusal_is_counted_by_its_reason():
    async def scene() -> None:
        io: Any = Counted()
        io.verdict.set_exception(MeshError("admission_timeout", "late"))
        with pytest.raises(MeshError):
            await wait_for_ticket(io)
        assert io.events == ["timeout"]

    asyncio.run(scene())


def test_a_client_that_leaves_the_queue_is_counted_as_canceled():
    async def scene() -> None:
        io: Any = Counted()
        waiting = asyncio.ensure_future(wait_for_ticket(io))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert io.events == ["canceled"]

    asyncio.run(scene())


class Downstream:
    def __init__(self, has_body_bytes: bool) -> None:
        self.has_body_bytes = has_body_bytes
        self.events: list[Any] = []

    def write(self, data: bytes) -> None:
        self.events.append(data)

    def take_whole_body(self) -> None:
        return None

    def begin_body(self, room: Any, most: int) -> None:
        self.events.append(most)


def head(*fields: str, version: str = "1.1") -> RequestHead:
    lines = [f"POST / HTTP/{version}", "Host: h", *fields, "", ""]
    return parse_request_head("\r\n".join(lines).encode(), 65536, 256)


CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
EXPECTING = ("Content-Length: 4", "Expect: 100-continue")


@pytest.mark.parametrize(
    ("request_head", "has_body_bytes", "events"),
    [
        (head(), False, []),
        (head("Content-Length: 4"), False, [99]),
        (head(*EXPECTING), False, [CONTINUE, 99]),
        (head(*EXPECTING), True, [99]),
        (head(*EXPECTING, version="1.0"), False, [99]),
    ],
)
def test_only_a_client_that_waits_for_it_is_told_to_go_on(request_head, has_body_bytes, events):
    downstream: Any = Downstream(has_body_bytes)
    room: Any = None
    begin_body(request_head, downstream, room, 99)
    assert downstream.events == events
