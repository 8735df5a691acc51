"""What a request waits for before it is decided where it goes: a ticket, and its body."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TYPE_CHECKING, Final

from meshd.errors import MeshError
from meshd.io.account import Record
from meshd.io.attempts import Holder
from meshd.io.downstream import DownstreamConnection
from meshd.io.http1 import RequestHead
from meshd.io.request_checks import content_length_of
from meshd.strand import Promise

if TYPE_CHECKING:
    from meshd.admission.gate import Ticket
    from meshd.director import BodyRoom
    from meshd.io.services import Services

_CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"


async def wait_for_ticket(io: Services) -> Ticket:
    """Wait in the queue for admission. Raises the ``MeshError`` of a refusal, which is counted here."""
    started_at = io.clock()
    try:
        ticket = await io.director.wait_for_ticket()
    except MeshError as error:
        io.metrics.admission_rejected(error.code.removeprefix("admission_"))
        raise
    except asyncio.CancelledError:
        io.metrics.admission_canceled.inc()
        raise
    io.metrics.admission_wait.observe(io.clock() - started_at)
    return ticket


def begin_body(
    head: RequestHead, downstream: DownstreamConnection, room: BodyRoom, most: int
) -> Promise[None] | None:
    """Receive the body into ``room``; None if it is there whole, else what `begin_body` promises.

    Tells a client to go on that waits for that before it sends its body (RFC 9110 §10.1.1).
    """
    if not head.has_body:
        return None
    if head.has_expectation and head.is_http11 and not downstream.has_body_bytes:
        downstream.write(_CONTINUE)
    body = downstream.take_whole_body()
    if body is None:
        return downstream.begin_body(room, most)
    room.fill(body)
    return None


class Intake(Holder):
    """A request up to its whole body, which it keeps in its room; the exchange is one."""

    __slots__ = ("_downstream", "_head", "_io", "_room")

    def __init__(self, io: Services, downstream: DownstreamConnection, head: RequestHead) -> None:
        super().__init__(io.loop, Record(downstream.head_started_at))
        self._io = io
        self._downstream = downstream
        self._head = head
        self._room: BodyRoom | None = None

    async def _receive_body(self, most: int) -> BodyRoom:
        """Reserve memory for the body, then receive it whole."""
        arriving = self._begin_body(most)
        if arriving is not None:
            await arriving
            self._note_body(self._io.clock())
        assert self._room is not None
        return self._room

    def _begin_body(self, most: int) -> Awaitable[None] | None:
        """Do so; None if the body is there, else what to wait for before `_note_body`."""
        length = content_length_of(self._head)
        self._room = self._io.director.try_reserve(length)
        return self._wait_for_room(length, most) if self._room is None else self._take_body(self._room, most)

    async def _wait_for_room(self, length: int | None, most: int) -> None:
        self._room = await self._io.director.reserve(length)
        arriving = self._take_body(self._room, most)
        if arriving is not None:
            await arriving

    def _take_body(self, room: BodyRoom, most: int) -> Promise[None] | None:
        now = self.record.ticket_at = self._io.clock()
        arriving = begin_body(self._head, self._downstream, room, most)
        if arriving is None:
            self._note_body(now)
        return arriving

    def _note_body(self, now: float) -> None:
        record = self.record
        record.bytes_in = self._downstream.body_received
        if record.endpoint:  # what routes do with a body is no preparation
            record.body_at = record.body_at or now
