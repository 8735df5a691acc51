"""Ask the controller which upstream a new session belongs to (policy ``dp_sticky``)."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

import orjson

from meshd.api.view import NO_ASSIGNMENT
from meshd.io.leg import Leg
from meshd.io.upstream import UpstreamFailure
from meshd.routing.sessions import ASSIGNED_HEADER, ASSIGNMENT_PATH, SessionId

if TYPE_CHECKING:
    from meshd.io.http1 import RequestHead
    from meshd.io.services import Services

SESSION_HEADER: Final = b"x-session-id"
ANSWER_SECS: Final = 0.1  # longer than this no request waits for the controller


def session_key(head: RequestHead) -> bytes:
    """Return the first ``x-session-id`` that is not empty; empty if there is none."""
    key = head.values.get(SESSION_HEADER, b"")
    if not key and SESSION_HEADER in head.repeated:
        for name, value in head.fields:
            if value and name.lower() == SESSION_HEADER:
                return value
    return key


async def assigned_upstream(
    io: Services, key: bytes, numbers: tuple[int, ...], is_rehearsed: bool = False
) -> int:
    """Return which of the upstreams ``numbers`` the session belongs to from now on.

    ``NO_ASSIGNMENT`` if the controller does not say in time. ``is_rehearsed``: nothing is stored.
    """
    question: dict[str, object] = {"session": [*SessionId.of(key)], "candidates": numbers}
    if is_rehearsed:
        question["rehearsed"] = True
    body = orjson.dumps(question)
    head = b"POST %b HTTP/1.1\r\nhost: controller\r\ncontent-length: %d\r\n\r\n" % (
        ASSIGNMENT_PATH.encode(),
        len(body),
    )
    leg = Leg(io, io.clock() + ANSWER_SECS)
    try:
        async with asyncio.timeout(ANSWER_SECS):
            response = await leg.ask(io.controller, "POST", head, [body], needs_fresh=False)
        answer = response.values.get(ASSIGNED_HEADER, b"")
        return int(answer) if answer.isdigit() else NO_ASSIGNMENT
    except (UpstreamFailure, TimeoutError):
        leg.close()
        return NO_ASSIGNMENT
    finally:
        leg.release()
