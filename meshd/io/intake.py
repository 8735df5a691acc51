"""What a request waits for before it is decided where it goes: a ticket, and its body."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from meshd.errors import MeshError
from meshd.io.downstream import DownstreamConnection
from meshd.io.http1 import RequestHead
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
