"""The closed list of failures meshd itself produces: code, status, and whether repeating helps."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final


class Side(Enum):
    """Who is to blame for a failure."""

    DOWNSTREAM = "downstream"
    UPSTREAM = "upstream"
    INTERNAL = "internal"


class Repeat(Enum):
    """Whether a client may send the request again."""

    NO = "no"
    MAYBE = "maybe"  # the upstream may have done the work already
    AGAIN = "again"


@dataclass(frozen=True, slots=True)
class ErrorCode:
    """One row of the error tables; ``retry_after_s`` is the default advice, 0 for none."""

    name: str
    status: int
    side: Side
    repeat: Repeat
    retry_after_s: int = 0


def _rows() -> dict[str, ErrorCode]:
    down, up, internal = Side.DOWNSTREAM, Side.UPSTREAM, Side.INTERNAL
    no, maybe, again = Repeat.NO, Repeat.MAYBE, Repeat.AGAIN
    rows = (
        # HTTP layer
        ErrorCode("malformed_request", 400, down, no),
        ErrorCode("not_found", 404, down, no),
        ErrorCode("method_not_allowed", 405, down, no),
        ErrorCode("request_timeout", 408, down, again),
        ErrorCode("body_too_large", 413, down, no),
        ErrorCode("uri_too_long", 414, down, no),
        ErrorCode("unsupported_encoding", 415, down, no),
        ErrorCode("unsupported_content_type", 415, down, no),
        ErrorCode("expectation_failed", 417, down, no),
        ErrorCode("header_too_large", 431, down, no),
        ErrorCode("internal_error", 500, internal, again),
        ErrorCode("unsupported_transfer_encoding", 501, down, no),
        ErrorCode("too_many_connections", 503, internal, again, 1),
        ErrorCode("http_version_not_supported", 505, down, no),
        # admission
        ErrorCode("admission_full", 429, internal, again, 1),
        ErrorCode("admission_timeout", 503, internal, again, 1),
        ErrorCode("admission_closed", 503, internal, again, 1),
        ErrorCode("buffer_budget_exhausted", 503, internal, again, 1),
        # what the request means
        ErrorCode("invalid_request", 400, down, no),
        ErrorCode("tokenizer_not_found", 400, down, no),
        ErrorCode("tokenizer_input_too_large", 413, down, no),
        ErrorCode("tokenization_error", 500, internal, no),
        ErrorCode("detokenization_error", 500, internal, no),
        ErrorCode("unsupported_api", 501, down, no),
        ErrorCode("unsupported_api_topology", 501, down, no),
        ErrorCode("stateful_routing_unsupported", 501, down, no),
        ErrorCode("tokenizer_unavailable", 503, internal, again, 5),
        # preparation
        ErrorCode("prepare_queue_full", 503, internal, again, 1),
        ErrorCode("prepare_pool_closed", 503, internal, again, 5),
        ErrorCode("prepare_queue_timeout", 504, internal, again),
        ErrorCode("prepare_timeout", 504, internal, again),
        ErrorCode("prepare_cancelled", 499, down, no),  # never sent: metrics and log only
        ErrorCode("prepare_failed", 500, internal, no),
        ErrorCode("prepare_worker_died", 500, internal, no),
        # placement
        ErrorCode("no_workers", 503, internal, again, 5),
        ErrorCode("model_not_found", 404, down, no),
        ErrorCode("no_available_workers", 503, internal, again, 5),
        ErrorCode("policy_returned_none", 503, internal, again, 1),
        # the exchange with an upstream
        ErrorCode("upstream_connection_failed", 502, up, maybe),
        ErrorCode("upstream_connect_timeout", 504, up, again),
        ErrorCode("upstream_timeout", 504, up, maybe),
        ErrorCode("upstream_protocol_error", 502, up, maybe),
        ErrorCode("no_worker_response", 502, up, again),
        ErrorCode("conflicting_backend_credentials", 503, internal, no, 60),
        # routes
        ErrorCode("controller_unavailable", 503, internal, again, 1),
        ErrorCode("admin_required", 403, down, no),
    )
    return {row.name: row for row in rows}


CODES: Final[dict[str, ErrorCode]] = _rows()


class MeshError(Exception):
    """A request failed for a reason of the closed list.

    ``code``: a key of ``CODES``. ``message``: one or two plain sentences for the client, without any
    address, path or credential. ``cause``: the inner reason for the log line alone.
    ``retry_after_s``: overrides the default of the code. ``allow``: methods of a 405.
    ``is_closing``: the connection cannot go on after the answer.
    """

    __slots__ = ("allow", "cause", "code", "is_closing", "message", "retry_after_s", "status")

    def __init__(
        self,
        code: str,
        message: str,
        *,
        cause: str = "",
        retry_after_s: int | None = None,
        allow: tuple[str, ...] = (),
        is_closing: bool = False,
    ) -> None:
        row = CODES[code]
        super().__init__(message)
        self.code = code
        self.status = row.status
        self.message = message
        self.cause = cause
        self.retry_after_s = row.retry_after_s if retry_after_s is None else retry_after_s
        self.allow = allow
        self.is_closing = is_closing

    def __repr__(self) -> str:
        return f"MeshError({self.code} {self.status}: {self.message!r})"


class StartupError(Exception):
    """The process cannot start or go on; the text says what to do. Exit code ``exit_code``."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code
