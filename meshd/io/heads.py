"""Request heads and response heads, once read; http1.py reads them. Pure.

Peers repeat themselves: on a connection that is kept alive most heads equal the one before, but for the value
of `content-length`. `again` recognises that by comparing bytes, many times cheaper than reading them anew,
and what was worked out from a head before (which fields pass, say) stays with it.

The classes are written out, since the methods that ``dataclass`` makes stay interpreted in a compiled build.
Heads are shared by requests: nobody changes them, but for ``facts`` and ``derived``.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from meshd.api.endpoints import Endpoint
    from meshd.io.measure import RequestMetrics

Field = tuple[bytes, bytes]

MAX_LENGTH_DIGITS: Final = 19
_LENGTH: Final = re.compile(rb"\r\ncontent-length:[ \t]*(?=\d)", re.IGNORECASE)


class RequestFacts:
    """What was worked out from a request head, whatever its length: a place for each who needs something.

    ``endpoint``, ``resource_id``: what it asks for, once found. ``checked_for``: the number of the endpoint
    whose checks it has passed. ``counted``: with which requests it is counted. ``client_id``: the client's
    request id, if ``has_looked_for_id``. ``passing``: its fields as an upstream gets them, four ways
    (headers.py). ``opening``: how it begins towards upstreams, for the target ``opens_target``.
    """

    __slots__ = (
        "checked_for",
        "client_id",
        "counted",
        "endpoint",
        "has_looked_for_id",
        "opening",
        "opens_target",
        "passing",
        "resource_id",
    )

    def __init__(self) -> None:
        self.endpoint: Endpoint | None = None
        self.resource_id = ""
        self.checked_for = -1
        self.counted: RequestMetrics | None = None
        self.has_looked_for_id = False
        self.client_id: str | None = None
        self.passing: list[str | None] = [None, None, None, None]
        self.opening = ""
        self.opens_target: bytes | None = None

    def __repr__(self) -> str:
        return f"RequestFacts({self.endpoint} {self.resource_id} {self.client_id})"


class RequestHead:
    """One request head; ``fields`` are in the client's order, with repeats and the client's bytes.

    ``target``: path and query as the upstream will see them. ``query``: with its "?", or empty.
    ``values``: lower-case name → first value; ``repeated``: lower-case names that came more than once.
    ``trailer_bytes``, ``trailer_fields``: what the head has left of its limits for a trailer section.
    ``raw``: the bytes that it was read from; ``length_at``: of `length_offset`, 0 if it may not vary.
    ``length_line``: the length as a header line of ours, empty without.
    """

    __slots__ = (
        "connection_tokens",
        "content_length",
        "facts",
        "fields",
        "has_body",
        "has_expectation",
        "is_chunked",
        "is_http11",
        "keeps_alive",
        "length_at",
        "length_line",
        "method",
        "path",
        "query",
        "raw",
        "repeated",
        "target",
        "trailer_bytes",
        "trailer_fields",
        "values",
    )

    def __init__(
        self,
        method: str,
        target: bytes,
        path: str,
        query: bytes,
        is_http11: bool,
        fields: tuple[Field, ...],
        values: dict[bytes, bytes],
        repeated: frozenset[bytes],
        content_length: int | None,
        is_chunked: bool,
        connection_tokens: frozenset[bytes],
        trailer_bytes: int,
        trailer_fields: int,
        raw: bytes,
        length_at: int,
        facts: RequestFacts,
    ) -> None:
        self.method = method
        self.target = target
        self.path = path
        self.query = query
        self.is_http11 = is_http11
        self.fields = fields
        self.values = values
        self.repeated = repeated
        self.content_length = content_length
        self.is_chunked = is_chunked
        self.has_body = is_chunked or bool(content_length)
        self.has_expectation = b"expect" in values
        self.keeps_alive = is_http11 and b"close" not in connection_tokens
        self.connection_tokens = connection_tokens
        self.trailer_bytes = trailer_bytes
        self.trailer_fields = trailer_fields
        self.raw = raw
        self.length_at = length_at
        self.length_line = _length_line(content_length)
        self.facts = facts

    def __repr__(self) -> str:
        return f"RequestHead({self.method} {self.target!r} {self.fields!r})"

    def with_target(self, target: bytes) -> RequestHead:
        """Return a copy for another target; path and query stay those that the client asked for."""
        return self._copy(target, self.fields, self.values, self.content_length, self.raw)

    def again(self, data: bytes) -> RequestHead | None:
        """Return the head that ``data`` begins with if it is this one, or differs in its length alone."""
        raw = self.raw
        if data.startswith(raw):
            return self
        end = _repeat_end(raw, self.length_at, data)
        if end < 0:
            return None
        digits = _digits(data, self.length_at)
        fields, values = _with_length(self.fields, self.values, digits)
        return self._copy(self.target, fields, values, int(digits), data[:end])

    def _copy(
        self,
        target: bytes,
        fields: tuple[Field, ...],
        values: dict[bytes, bytes],
        content_length: int | None,
        raw: bytes,
    ) -> RequestHead:
        return RequestHead(
            self.method,
            target,
            self.path,
            self.query,
            self.is_http11,
            fields,
            values,
            self.repeated,
            content_length,
            self.is_chunked,
            self.connection_tokens,
            self.trailer_bytes,
            self.trailer_fields,
            raw,
            self.length_at,
            self.facts,
        )


class ResponseHead:
    """One final or interim response head of an upstream; attributes as those of `RequestHead`.

    ``has_body``: by status and request method (RFC 9112 §6.3). ``is_encoded``: its content, by a coding.
    """

    __slots__ = (
        "connection_tokens",
        "content_length",
        "derived",
        "fields",
        "has_body",
        "is_chunked",
        "is_close_delimited",
        "is_dated",
        "is_encoded",
        "is_http11",
        "is_sse",
        "keeps_alive",
        "length_at",
        "length_line",
        "raw",
        "reason",
        "status",
        "values",
    )

    def __init__(
        self,
        status: int,
        reason: bytes,
        is_http11: bool,
        fields: tuple[Field, ...],
        values: dict[bytes, bytes],
        content_length: int | None,
        is_chunked: bool,
        has_body: bool,
        is_sse: bool,
        is_encoded: bool,
        connection_tokens: frozenset[bytes],
        raw: bytes,
        length_at: int,
        derived: dict[str, Any],
    ) -> None:
        self.status = status
        self.reason = reason
        self.is_http11 = is_http11
        self.fields = fields
        self.values = values
        self.content_length = content_length
        self.is_chunked = is_chunked
        self.has_body = has_body
        self.is_close_delimited = has_body and not is_chunked and content_length is None
        self.is_dated = b"date" in values
        self.is_sse = is_sse
        self.is_encoded = is_encoded
        self.keeps_alive = is_http11 and b"close" not in connection_tokens
        self.connection_tokens = connection_tokens
        self.raw = raw
        self.length_at = length_at
        self.length_line = _length_line(content_length)
        self.derived = derived

    def __repr__(self) -> str:
        return f"ResponseHead({self.status} {self.fields!r})"

    def with_fields(self, fields: tuple[Field, ...], values: dict[bytes, bytes]) -> ResponseHead:
        """Return a copy with other fields; nothing that was derived from this one holds for it."""
        return self._copy(fields, values, self.content_length, b"", {})

    def again(self, data: bytes) -> ResponseHead | None:
        """As `RequestHead.again`; the request must have been of the same method."""
        raw = self.raw
        if data.startswith(raw):
            return self
        end = _repeat_end(raw, self.length_at, data)
        if end < 0:
            return None
        digits = _digits(data, self.length_at)
        fields, values = _with_length(self.fields, self.values, digits)
        return self._copy(fields, values, int(digits), data[:end], self.derived)

    def _copy(
        self,
        fields: tuple[Field, ...],
        values: dict[bytes, bytes],
        content_length: int | None,
        raw: bytes,
        derived: dict[str, Any],
    ) -> ResponseHead:
        return ResponseHead(
            self.status,
            self.reason,
            self.is_http11,
            fields,
            values,
            content_length,
            self.is_chunked,
            self.has_body,
            self.is_sse,
            self.is_encoded,
            self.connection_tokens,
            raw,
            self.length_at,
            derived,
        )


def _length_line(content_length: int | None) -> str:
    return "" if content_length is None else f"content-length: {content_length}\r\n"


def length_offset(raw: bytes) -> int:
    """Return where the digits of `content-length` begin in a head that has one such field; 0 without it."""
    found = _LENGTH.search(raw)
    return 0 if found is None else found.end()


def _digits(data: bytes, at: int) -> bytes:
    end = at
    while end < len(data) and 48 <= data[end] <= 57:
        end += 1
    return data[at:end]


def _repeat_end(raw: bytes, length_at: int, data: bytes) -> int:
    """Return where in ``data`` a head ends that is ``raw`` but for the digits at ``length_at``; else -1.

    No other end can come before: what is the same in both has none, and digits are no line end.
    """
    if not length_at or data[:length_at] != raw[:length_at]:
        return -1
    digits = _digits(data, length_at)
    if not 0 < len(digits) <= MAX_LENGTH_DIGITS:
        return -1
    rest = raw[length_at + len(_digits(raw, length_at)) :]
    at = length_at + len(digits)
    end = at + len(rest)
    return end if data[at:end] == rest else -1


def _with_length(
    fields: tuple[Field, ...], values: dict[bytes, bytes], digits: bytes
) -> tuple[tuple[Field, ...], dict[bytes, bytes]]:
    changed = tuple(
        [(name, digits if name.lower() == b"content-length" else value) for name, value in fields]
    )
    return changed, {**values, b"content-length": digits}
