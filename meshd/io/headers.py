"""Which header fields pass, in both directions, and how heads are written. Pure.

Fields keep their order, their repeats and their bytes. Every head that meshd writes is made here: as text of
Latin-1, in which each byte is one character, and encoded once.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from email.utils import formatdate
from http import HTTPStatus
from typing import Final
from urllib.parse import urlsplit

from meshd.errors import MeshError
from meshd.io.http1 import Field, RequestHead, ResponseHead

HOP_BY_HOP: Final = frozenset(
    (
        b"connection",
        b"keep-alive",
        b"proxy-connection",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"transfer-encoding",
        b"trailer",
        b"upgrade",
        b"te",
    )
)
_REQUEST_DROPPED: Final = HOP_BY_HOP | {
    b"host",
    b"expect",
    b"content-length",
    b"x-request-id",
    b"http2-settings",
}
_CREDENTIALS: Final = frozenset((b"authorization", b"x-api-key"))
_TRACE_FIELDS: Final = frozenset((b"traceparent", b"tracestate"))
_RESPONSE_DROPPED: Final = HOP_BY_HOP | {b"x-request-id", b"content-length"}
# Fields that only `--route-headers` may add; an upstream's own are never believed.
_MESH_RESPONSE_FIELDS: Final = frozenset(
    (
        b"x-mesh-upstream",
        b"x-mesh-prefill-upstream",
        b"x-mesh-attempts",
        b"x-mesh-model-version",
        b"x-mesh-policy-version",
        b"x-mesh-route-reason",
    )
)
_URL: Final = re.compile(
    rb"\s*(?:(?P<scheme>[A-Za-z][A-Za-z0-9+.\-]*):)?//(?:[^/?#@]*@)?"
    rb"(?P<host>\[[^\]/?#]*\]|[^/?#:\s]*):?(?P<port>[^/?#]*)(?P<path>/[^?#]*)?(?P<query>\?[^#]*)?",
    re.DOTALL,
)
MAX_REQUEST_ID_BYTES: Final = 256
_ID_LETTERS: Final = 24
_ENTROPY_BYTES: Final = 4096  # drawn at once
_ALPHABET: Final = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"
_TO_ALPHABET: Final = bytes(_ALPHABET[i % 62] for i in range(256))
_BIASED: Final = bytes(range(248, 256))  # 248 = 4 × 62: the rest would favour the first letters
_REASONS: Final = {int(status): status.phrase.encode() for status in HTTPStatus}


class RequestIds:
    """Find or make the id of a request; entropy is drawn from the system in blocks."""

    __slots__ = ("_at", "_headers", "_letters")

    def __init__(self, headers: Iterable[str]) -> None:
        self._headers = tuple(name.lower().encode("latin-1") for name in headers)
        self._letters = ""
        self._at = 0

    def choose(self, head: RequestHead, prefix: str) -> str:
        """Return the client's id if one is present and printable, else a fresh one with ``prefix``."""
        facts = head.facts
        if not facts.has_looked_for_id:
            facts.client_id = self._find(head.values)
            facts.has_looked_for_id = True
        chosen = facts.client_id
        return self.generate(prefix) if chosen is None else chosen

    def _find(self, values: dict[bytes, bytes]) -> str | None:
        for name in self._headers:
            value = values.get(name)
            if value is not None:
                text = value.decode("latin-1")
                # An empty value wins too, as in the reference router: it is the client's choice.
                is_usable = not text or (text.isascii() and text.isprintable())
                return text if is_usable and len(text) <= MAX_REQUEST_ID_BYTES else None
        return None

    def generate(self, prefix: str) -> str:
        at = self._at
        end = at + _ID_LETTERS
        if end > len(self._letters):
            self._letters = os.urandom(_ENTROPY_BYTES).translate(_TO_ALPHABET, _BIASED).decode("ascii")
            at, end = 0, _ID_LETTERS
        self._at = end
        return prefix + self._letters[at:end]


class HttpDate:
    """The `date` field, made once a second (RFC 9110 §6.6.1)."""

    __slots__ = ("_line", "_line_ends_at", "_second", "_value", "_wall_clock")

    def __init__(self, wall_clock: Callable[[], float]) -> None:
        self._wall_clock = wall_clock
        self._second = -1
        self._value = b""
        self._line = ""
        self._line_ends_at = 0.0

    def line(self, now: float) -> str:
        """Return the header line, by any clock that runs evenly: the wall clock is read once a second."""
        if now >= self._line_ends_at:
            self._line_ends_at = now + 1.0 - self._wall_clock() % 1.0
            self._line = f"date: {self.value().decode('ascii')}\r\n"
        return self._line

    def value(self) -> bytes:
        second = int(self._wall_clock())
        if second != self._second:
            self._second = second
            self._value = formatdate(second, usegmt=True).encode("ascii")
        return self._value


def forwarded_fields(head: RequestHead, passes_credentials: bool, trace_fields: bytes = b"") -> str:
    """Return the client's surviving request fields as header lines.

    ``trace_fields``: lines that take the place of `traceparent` and `tracestate`; empty: those pass too.
    """
    passing = head.facts.passing
    way = (1 if passes_credentials else 0) + (2 if trace_fields else 0)
    block = passing[way]
    if block is None:
        dropped = _REQUEST_DROPPED if passes_credentials else _REQUEST_DROPPED | _CREDENTIALS
        block = passing[way] = _surviving(head, dropped | _TRACE_FIELDS if trace_fields else dropped)
    return block + trace_fields.decode("latin-1") if trace_fields else block


def _surviving(head: RequestHead, dropped: frozenset[bytes]) -> str:
    named = head.connection_tokens
    passing: list[Field] = []
    for name, value in head.fields:
        key = name.lower()
        if key not in dropped and key not in named and not key.startswith(b"x-mesh-"):
            passing.append((name, value))
    if head.values.get(b"te", b"").lower() == b"trailers" and b"te" not in head.repeated:
        passing += ((b"te", b"trailers"), (b"connection", b"te"))
    return _lines(passing)


def _lines(fields: Iterable[Field]) -> str:
    return b"".join([b"%b: %b\r\n" % field for field in fields]).decode("latin-1")


def upstream_head(
    head: RequestHead,
    *,
    base_path: str,
    authority: str,
    fields: str,
    body_bytes: int | None,
    request_id: str,
    api_key: str | None,
    sends_x_api_key: bool,
) -> bytes:
    """Return the request head towards an upstream.

    ``fields`` come from ``forwarded_fields``; ``body_bytes`` is the exact length that follows, None for
    a request without a body field (GET, HEAD, DELETE).
    """
    length = head.length_line
    if body_bytes != head.content_length:
        length = "" if body_bytes is None else f"content-length: {body_bytes}\r\n"
    credentials = "" if api_key is None else f"authorization: Bearer {api_key}\r\n"
    if sends_x_api_key and api_key is not None:
        credentials += f"x-api-key: {api_key}\r\n"
    text = (
        f"{_opening(head, base_path)}{authority}\r\n"
        f"{fields}{length}x-request-id: {request_id}\r\n{credentials}\r\n"
    )
    return text.encode("latin-1")


def _opening(head: RequestHead, base_path: str) -> str:
    """Return the request line, and the name of the next field; below no base path it is kept."""
    facts = head.facts
    if facts.opens_target is head.target and not base_path:
        return facts.opening
    opening = f"{head.method} {base_path}{head.target.decode('latin-1')} HTTP/1.1\r\nhost: "
    if not base_path:
        facts.opening, facts.opens_target = opening, head.target
    return opening


def downstream_head(
    response: ResponseHead,
    *,
    request_id: str,
    framing: str,
    closes: bool,
    upstream_authority: str,
    date: str = "",
    extra: tuple[Field, ...] = (),
) -> bytes:
    """Return the response head towards the client.

    ``framing``, ``date``: header lines; the framing may be empty, the date if the upstream sent one.
    """
    opening = _relayed(response, upstream_authority)
    if extra:
        opening += _lines(extra)
    end = "\r\nconnection: close\r\n\r\n" if closes else "\r\n\r\n"
    return f"{opening}{date}{framing}x-request-id: {request_id}{end}".encode("latin-1")


def _relayed(response: ResponseHead, authority: str) -> str:
    """Return the status line and the upstream's fields that pass."""
    block: str | None = response.derived.get(authority)
    if block is not None:
        return block
    named = response.connection_tokens
    passing: list[Field] = []
    for name, value in response.fields:
        key = name.lower()
        if key in _RESPONSE_DROPPED or key in named or key in _MESH_RESPONSE_FIELDS:
            continue
        if key in (b"location", b"content-location"):
            value = _local_reference(value, authority)
        passing.append((name, value))
    status_line = f"HTTP/1.1 {response.status} {response.reason.decode('latin-1')}\r\n"
    block = response.derived[authority] = status_line + _lines(passing)
    return block


def _local_reference(value: bytes, authority: str) -> bytes:
    """Reduce an absolute URL of the upstream itself to path and query; others pass.

    A port that is no number counts as the upstream's: what cannot be read must not show an address either.
    """
    url = _URL.match(value)
    if url is None:
        return value
    own = urlsplit(f"//{authority}")
    default = 443 if (url["scheme"] or b"").lower() == b"https" else 80
    host, port = url["host"].strip(b"[]").lower().decode("latin-1"), url["port"].strip()
    is_own_port = (
        not port.isdigit() or int(port) == (own.port or default) if port else own.port in (None, default)
    )
    if host != own.hostname or not is_own_port:
        return value
    return (url["path"] or b"/") + (url["query"] or b"")


def local_answer(
    status: int,
    body: bytes,
    *,
    request_id: str,
    date: bytes,
    closes: bool,
    is_head: bool = False,
    extra: tuple[Field, ...] = (),
    content_type: bytes = b"application/json",
    body_bytes: int | None = None,
) -> bytes:
    """Return a whole answer that meshd itself gives; a HEAD request gets the head alone.

    ``body_bytes``: the length of the whole body, if ``body`` is only how it begins.
    """
    parts = [
        b"HTTP/1.1 %d %s\r\ncontent-type: " % (status, _REASONS.get(status, b"")),
        content_type,
        b"\r\ncontent-length: %d\r\ndate: " % (len(body) if body_bytes is None else body_bytes),
        date,
        b"\r\nserver: meshd\r\nx-request-id: ",
        request_id.encode("latin-1"),
        b"\r\n",
    ]
    for name, value in extra:
        parts += (name, b": ", value, b"\r\n")
    parts.append(b"connection: close\r\n\r\n" if closes else b"\r\n")
    if not is_head:
        parts.append(body)
    return b"".join(parts)


def error_fields(error: MeshError) -> tuple[Field, ...]:
    """Return the extra fields of an error answer."""
    fields: list[Field] = [(b"x-mesh-error-code", error.code.encode("ascii"))]
    if error.status in (429, 503):
        fields.append((b"retry-after", b"%d" % max(1, error.retry_after_s)))
    if error.allow:
        fields.append((b"allow", ", ".join(error.allow).encode("ascii")))
    return tuple(fields)
