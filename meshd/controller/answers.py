"""The bytes of the controller's own JSON answers and errors."""

from __future__ import annotations

import secrets
import string
from typing import Any, Final

import orjson

from meshd.api.dialects import error_body
from meshd.controller.http_server import Request, Response
from meshd.errors import CODES

_ALPHABET: Final = string.ascii_letters + string.digits
_MAX_ID_BYTES: Final = 256
_FULL_S: Final = 5  # advice when the set or its jobs are full
_CODE_OF_STATUS: Final = {
    400: "malformed_request",
    408: "request_timeout",
    413: "body_too_large",
    431: "header_too_large",
    501: "unsupported_transfer_encoding",
    505: "http_version_not_supported",
}


def json_answer(
    request: Request, value: Any, status: int = 200, headers: tuple[tuple[str, str], ...] = ()
) -> Response:
    own_id = ("x-request-id", request_id(request))
    return Response(status, orjson.dumps(value), headers=(own_id, *headers))


def error_answer(request: Request | None, code: str, message: str, allow: str = "") -> Response:
    """Answer a code of the closed list in the common envelope; ``allow``: methods of a 405."""
    row = CODES[code]
    own_id = request_id(request)
    headers = [("x-request-id", own_id), ("x-mesh-error-code", code)]
    if allow:
        headers.append(("allow", allow))
    if row.retry_after_s:
        headers.append(("retry-after", str(row.retry_after_s)))
    return Response(
        row.status, error_body("openai", code, row.status, message, own_id), headers=tuple(headers)
    )


def worker_error(request: Request, status: int, code: str, message: str) -> Response:
    """Answer an error of the ``/workers`` routes in their own envelope."""
    headers = [("x-request-id", request_id(request)), ("x-mesh-error-code", code)]
    if status == 503:
        headers.append(("retry-after", str(_FULL_S)))
    return Response(status, orjson.dumps({"error": message, "code": code}), headers=tuple(headers))


def refuse(status: int, message: str) -> Response:
    """Word an error that the HTTP server found itself."""
    return error_answer(None, _CODE_OF_STATUS.get(status, "malformed_request"), message)


def request_id(request: Request | None) -> str:
    """Return the id the request came with, or a fresh one."""
    given = request.headers.get("x-request-id", "") if request is not None else ""
    if given and len(given) <= _MAX_ID_BYTES and given.isascii() and given.isprintable():
        return given
    return "req-" + "".join(secrets.choice(_ALPHABET) for _ in range(24))
