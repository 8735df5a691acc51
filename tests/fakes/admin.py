"""Ask admin routes without a socket."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import orjson

from meshd.controller.admin import AdminRoute, AdminRoutes
from meshd.controller.http_server import Request, Response
from tests.fakes.upstream_set import quiet_log


def ask(routes: Iterable[AdminRoute], method: str, target: str, body: Any = None) -> Response:
    """Send one request; a ``body`` that is not bytes is sent as JSON."""
    path, _, query = target.partition("?")
    data = body if isinstance(body, bytes) else b"" if body is None else orjson.dumps(body)
    request = Request(method, path, query, {"x-request-id": "req-1"}, data)
    return asyncio.run(AdminRoutes(routes, quiet_log()).handle(request))
