"""How each API words a failure: JSON error envelopes, and the error event that ends a broken stream.

Pure text. The code of the closed list always travels in the header ``x-mesh-error-code``; the Messages
envelope has no place for it.
"""

from __future__ import annotations

import re
from typing import Any, Final, Literal

import orjson

from meshd.api.endpoints import ENDPOINTS, Dialect
from meshd.errors import CODES

StreamDialect = Literal["openai", "responses", "messages"]

NAME_BYTES: Final = 256
"""Most bytes of a client's own name (model, member, header) that a message repeats."""

_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
# C0, DEL, C1, the two line separators and lone surrogates: none may reach a log line or UTF-8 output.
_UNPRINTABLE: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
_MESSAGES_PATHS: Final = frozenset(endpoint.path for endpoint in ENDPOINTS if endpoint.dialect == "messages")


def dialect_of_path(path: str) -> Dialect:
    """Return whose envelope an error on ``path`` (without query) has, whether or not the path exists."""
    return "messages" if path in _MESSAGES_PATHS else "openai"


def error_type(status: int, dialect: Dialect = "openai") -> str:
    """Return the ``type`` member that belongs to ``status``."""
    if dialect == "messages":
        if status == 413:
            return "request_too_large"
        if status == 529:
            return "overloaded_error"
    known = _TYPES.get(status)
    if known is not None:
        return known
    return "invalid_request_error" if status < 500 else "api_error"


def printable(text: str) -> str:
    """Return ``text`` with every control character and lone surrogate replaced by ``?``."""
    return _UNPRINTABLE.sub("?", text)


def cut_name(name: str, limit: int = NAME_BYTES) -> str:
    """Return a client's own name as a message may repeat it: printable, at most ``limit`` UTF-8 bytes.

    Looks at no more than ``limit`` characters, so that a name of megabytes costs nothing.
    """
    return printable(name[:limit]).encode()[:limit].decode(errors="ignore")


def error_body(dialect: Dialect, code: str, status: int, message: str, request_id: str) -> bytes:
    """Return the JSON body of an error that meshd itself answers, members in the documented order."""
    kind = error_type(status, dialect)
    text = printable(message)
    if dialect == "messages":
        return _json(
            {
                "type": "error",
                "error": {"type": kind, "message": text},
                "request_id": printable(request_id),
            }
        )
    return _json({"error": {"message": text, "type": kind, "param": None, "code": code}})


def error_event(dialect: StreamDialect, code: str, message: str, sequence_number: int = 0) -> bytes:
    """Return the SSE event that tells a client its stream broke after the head was sent.

    ``sequence_number`` is used by ``responses`` alone: the last one seen plus 1, or 0.
    """
    kind = error_type(CODES[code].status)
    text = printable(message)
    if dialect == "messages":
        data = _json({"type": "error", "error": {"type": kind, "message": text}})
    elif dialect == "responses":
        data = _json(
            {
                "type": "error",
                "code": code,
                "message": text,
                "param": None,
                "sequence_number": sequence_number,
            }
        )
    else:
        error = {"message": text, "type": kind, "param": None, "code": code}
        return b"data: " + _json({"error": error}) + b"\n\n"
    return b"event: error\ndata: " + data + b"\n\n"


def _json(value: dict[str, Any]) -> bytes:
    return orjson.dumps(value)
