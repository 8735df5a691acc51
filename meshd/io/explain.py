"""``POST /route/explain``: where a request would go and why, without sending it.

The request stands in the body of this one, ``{"path":"…","headers":{},"body":{…}}``. It passes the checks of
its own head, a prepare job reads its body for the policies in force, and its placement is rehearsed. It takes
no ticket, and nothing is counted, recorded or assigned. Two things are of this I/O process alone, the turn
among equals and the moment: the next such request *on this connection* goes where it says, while nothing else
comes in between.

This process reads the outer body itself, some milliseconds at 1 MiB; so the route is for operators, by the
rule for routes that change something, though it changes nothing.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import orjson

from meshd.api.endpoints import Endpoint
from meshd.api.request_json import Members, parse_body, refuse
from meshd.api.text import compact_json
from meshd.api.view import RoutingView
from meshd.errors import MeshError
from meshd.io.http1 import RequestHead, parse_request_head
from meshd.io.request_checks import check_endpoint_head
from meshd.io.session_assignment import assigned_upstream, session_key
from meshd.routing.placement import SessionUnassigned

if TYPE_CHECKING:
    from meshd.director import BodyRoom
    from meshd.io.routes import Answer
    from meshd.io.services import Services

_MEMBERS: Final = ("path", "headers", "body")
_PATH: Final = re.compile(r"/[!-~]*")
_OURS: Final = ("content-length", "transfer-encoding", "host", "connection")
"""Fields that this file sets: they are of the connection, not of the request."""


class Question(NamedTuple):
    """A request to be explained; the first ``body_bytes`` of the room are its body."""

    endpoint: Endpoint
    head: RequestHead
    body_bytes: int


def read_question(io: Services, room: BodyRoom, length: int) -> Question:
    """Read the body of ``length`` in ``room`` and leave there that of the request which it asks about.

    Raises ``MeshError`` for what is wrong here, and for what the request itself would be refused for.
    """
    members = parse_body(room.body[:length])
    unknown = sorted(members.keys() - set(_MEMBERS))
    if unknown:
        refuse(f'There is no member "{unknown[0][:64]}"; there are "path", "headers" and "body".')
    body = compact_json(members["body"]).encode() if "body" in members else b""
    head = _head(members, len(body), io.settings.max_header_bytes, io.settings.max_headers)
    endpoint = io.endpoints.find("POST", head.path).endpoint
    if endpoint.picks_by not in ("policy", "least_load"):
        refuse("Requests to this path are not placed on one server by a policy.")
    check_endpoint_head(endpoint, head, io.max_body_bytes)
    if len(body) > len(room.body) and not room.grow(len(body)):
        raise MeshError("buffer_budget_exhausted", "No memory is free for this request body.")
    room.fill(body)
    return Question(endpoint, head, len(body))


async def explain(io: Services, question: Question, view: RoutingView) -> Answer:
    """Answer, with the view of the request's body. Raises the ``MeshError`` that the request would get."""
    if io.director.needs_session:
        view = view.for_session(session_key(question.head))
    while True:
        try:
            found: Mapping[str, Any] = io.director.explain(question.endpoint, view)
        except SessionUnassigned as unassigned:
            asking = assigned_upstream(io, view.session_key, unassigned.numbers, is_rehearsed=True)
            view.assigned = await asyncio.create_task(asking)  # it has a timeout
            continue
        return 200, orjson.dumps(found), ()


def _head(members: Members, body_bytes: int, max_head_bytes: int, max_fields: int) -> RequestHead:
    """Return the head of the request as a client would have sent it."""
    path, fields = members.get("path"), members.get("headers", {})
    if type(path) is not str or not _PATH.fullmatch(path):
        refuse('"path" has to be the path of an endpoint.')
    if type(fields) is not dict or not all(type(value) is str for value in fields.values()):
        refuse('"headers" has to be an object of strings.')
    lines = [f"POST {path} HTTP/1.1", "host: explained", f"content-length: {body_bytes}"]
    if not any(name.lower() == "content-type" for name in fields):
        lines.append("content-type: application/json")
    lines += [f"{name}: {value}" for name, value in fields.items() if name.lower() not in _OURS]
    raw = "\r\n".join([*lines, "", ""]).encode("utf-8", "replace")
    try:
        return parse_request_head(raw, max_head_bytes, max_fields)
    except MeshError as error:
        raise MeshError(error.code, error.message) from error  # it is not this connection that is at fault
