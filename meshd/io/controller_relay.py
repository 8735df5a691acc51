"""Ask the controller what an admin route asks for; the answer is relayed like any upstream's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from meshd.api.rank_body import Buffer
from meshd.errors import MeshError
from meshd.io.headers import forwarded_fields, upstream_head
from meshd.io.routes import READING
from meshd.io.upstream import UpstreamFailure

if TYPE_CHECKING:
    from meshd.director import BodyRoom
    from meshd.io.account import Record
    from meshd.io.http1 import RequestHead, ResponseHead
    from meshd.io.leg import Leg
    from meshd.io.services import Services

MAX_ADMIN_BODY_BYTES: Final = 1 << 20
CONTROLLER_AUTHORITY: Final = "controller"
CONTROLLER_SECS: Final = 10.0  # an admin route is not waited for any longer


async def ask_controller(
    leg: Leg, io: Services, head: RequestHead, record: Record, room: BodyRoom
) -> ResponseHead:
    """Send the request, its whole body in ``room``, on ``leg``; return the response head.

    Raises ``MeshError`` ``controller_unavailable``.
    """
    request = upstream_head(
        head,
        base_path="",
        authority=CONTROLLER_AUTHORITY,
        fields=forwarded_fields(head, passes_credentials=True),
        body_bytes=record.bytes_in if head.has_body else None,
        request_id=record.request_id,
        api_key=None,
        sends_x_api_key=False,
    )
    body: list[Buffer] = [room.content(record.bytes_in)]
    try:
        # A change is sent once: a repeated one would meet what the first has done.
        is_change = head.method not in READING
        response = await leg.ask(io.controller, head.method, request, body, needs_fresh=is_change)
    except UpstreamFailure as failure:
        raise MeshError(
            "controller_unavailable", "The controller is being restarted.", cause=failure.cause
        ) from failure
    leg.request_deadline = 0.0  # a client may take a long answer slowly; silence has its own timer
    return response
