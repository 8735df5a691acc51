"""The answers that meshd gives by itself: written whole, counted, in the dialect of the path."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshd.api.dialects import dialect_of_path, error_body
from meshd.errors import MeshError
from meshd.io.account import Record
from meshd.io.downstream import DownstreamConnection
from meshd.io.headers import error_fields, local_answer
from meshd.io.http1 import Field, RequestHead

if TYPE_CHECKING:
    from meshd.io.services import Services


class LocalAnswer:
    """Writes the one answer to a request that no upstream answers.

    ``closes``: the connection ends after it. ``extra``: fields that every answer to this request carries.
    """

    __slots__ = ("_closes", "_downstream", "_extra", "_head", "_io", "_record")

    def __init__(
        self,
        io: Services,
        downstream: DownstreamConnection,
        head: RequestHead,
        record: Record,
        closes: bool,
        extra: tuple[Field, ...],
    ) -> None:
        self._io = io
        self._downstream = downstream
        self._head = head
        self._record = record
        self._closes = closes
        self._extra = extra

    def success(
        self, status: int, body: bytes, fields: tuple[Field, ...], body_bytes: int | None = None
    ) -> None:
        """Write an answer; with ``body_bytes``, its whole length, the rest follows by ``more``."""
        self._record.outcome = "completed"
        self._write(status, "", body, fields, body_bytes)

    def more(self, data: bytes) -> None:
        """Write the next piece of a body that was begun."""
        self._record.bytes_out += len(data)
        self._downstream.write(data)

    def error(self, error: MeshError) -> None:
        """Write an error, or a preflight where the refused method is one."""
        record = self._record
        if error.code == "method_not_allowed" and self._preflight(error.allow):
            return
        record.error_code, record.outcome = error.code, "failed"
        dialect = dialect_of_path(self._head.path)
        body = error_body(dialect, error.code, error.status, error.message, record.request_id)
        self._write(error.status, error.code, body, error_fields(error))

    def _preflight(self, methods: tuple[str, ...]) -> bool:
        """Answer a CORS preflight; False if the request is none of a listed origin."""
        io, record = self._io, self._record
        if io.cors is None or self._head.method != "OPTIONS":
            return False
        answer = io.cors.preflight_answer(
            self._head,
            methods,
            request_id=record.request_id,
            date=io.date.value(),
            closes=self._closes,
        )
        if answer is None:
            return False
        record.status, record.outcome = 204, "completed"
        io.metrics.response(204, "")
        self._downstream.write(answer)
        return True

    def _write(
        self,
        status: int,
        code: str,
        body: bytes,
        fields: tuple[Field, ...],
        body_bytes: int | None = None,
    ) -> None:
        io, record = self._io, self._record
        record.status, record.bytes_out = status, len(body)
        io.metrics.response(status, code)
        self._downstream.write(
            local_answer(
                status,
                body,
                request_id=record.request_id,
                date=io.date.value(),
                closes=self._closes,
                is_head=self._head.method == "HEAD",
                extra=fields + self._extra,
                body_bytes=body_bytes,
            )
        )

    def __repr__(self) -> str:
        return f"LocalAnswer({self._head.method} {self._head.path} closes={self._closes})"
