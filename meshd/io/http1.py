"""What HTTP/1.1 bytes mean: request heads and response heads (RFC 9112) become those of heads.py. Pure.

httptools (llhttp) reads the field lines; everything it is lenient about is judged here, over the raw
bytes, before the head is believed: line endings, control bytes, the request line, Host, framing, sizes.
Each head goes through a parser of its own that is fed that head and nothing else. Hence no byte of a
body, a trailer or a next message can ever reach a header list, and `Upgrade` cannot swallow a body.
Bodies are framed by `ChunkedDecoder` (chunked.py) and by counting, on both sides alike.

Deliberately unsupported: HTTP/2 and h2c, trailers (dropped), obs-fold, HTTP/0.9, CONNECT.
"""

from __future__ import annotations

import re
from typing import Final

import httptools

from meshd.errors import MeshError
from meshd.io.heads import MAX_LENGTH_DIGITS, RequestFacts, length_offset
from meshd.io.heads import Field as Field
from meshd.io.heads import RequestHead as RequestHead
from meshd.io.heads import ResponseHead as ResponseHead

MAX_RESPONSE_HEAD_BYTES: Final = 65536
MAX_RESPONSE_FIELDS: Final = 256
TOKEN_BYTE: Final = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]"  # of a token (RFC 9110 §5.6.2)

_REQUEST_LINE: Final = re.compile(rb"(" + TOKEN_BYTE + rb"{1,32}) ([!\"$-~]+) HTTP/(\d)\.(\d)\r\n")
_VERSIONED_LINE: Final = re.compile(rb"[^\r\n]* HTTP/(\d\.\d)\r\n")
_STATUS_LINE: Final = re.compile(rb"HTTP/1\.([01]) ([1-5]\d\d)(?: ([\t -~\x80-\xff]*))?\r\n")
_ABSOLUTE: Final = re.compile(rb"(?i:https?)://([^/?@]+)(/[^?]*)?(\?.*)?")
_HOST: Final = re.compile(rb"(?:\[[0-9A-Fa-f:.]+\]|[0-9A-Za-z\-._~!$&'()*+,;=%]*)(?::\d{0,5})?")
_BARE_LINE_END: Final = re.compile(rb"\r[^\n]|(?<!\r)\n")
_CONTROL: Final = bytes([*range(9), 11, 12, *range(14, 32), 127])
# llhttp refuses methods it does not know; the registry, not the parser, decides about those.
_PARSER_METHODS: Final = frozenset((b"GET", b"HEAD", b"POST", b"PUT", b"DELETE", b"OPTIONS", b"PATCH"))


class UpstreamProtocolError(Exception):
    """An upstream sent bytes that are not the HTTP/1.1 response it owed."""


class _FieldReader:
    """Callbacks for httptools: collects field lines, and nothing else."""

    __slots__ = ("on_header",)

    def __init__(self, fields: list[Field]) -> None:
        self.on_header = lambda name, value: fields.append((name, value))


def malformed(message: str) -> MeshError:
    return MeshError("malformed_request", message, is_closing=True)


# ---------------------------------------------------------------------------------------- requests


def check_partial_head(pending: bytes, max_head_bytes: int, start: int = 0) -> None:
    """Refuse a head that is already too long or cannot become valid; call while its end is missing.

    Raises MeshError ``uri_too_long`` or ``header_too_large``, so that nobody can make us buffer more, and
    ``malformed_request`` for a bare CR or LF at or after ``start``: a head of those alone would never end.
    """
    if _BARE_LINE_END.search(pending, start):
        raise malformed("The request head has a line that does not end with CRLF.")
    if len(pending) <= max_head_bytes:
        return
    if pending.find(b"\r\n", 2 if pending.startswith(b"\r\n") else 0, max_head_bytes) < 0:
        raise MeshError("uri_too_long", "The request line is too long.", is_closing=True)
    raise MeshError("header_too_large", "The request head is too large.", is_closing=True)


def find_head_end(buffer: bytes | bytearray, start: int = 0) -> int:
    """Return the offset just past the head in ``buffer``, or -1 while it is incomplete.

    An empty line after a bare LF, or of one, is an end too: a peer that omits CR is refused at once, and
    what other readers would take for the next message is never waited for.
    """
    end = buffer.find(b"\n\r\n", start)
    # Not beyond the head: a body may come in the same read, and searching 64 KiB of it costs 60 µs.
    bare = buffer.find(b"\n\n", start, end + 1 if end >= 0 else None)
    if bare >= 0:
        return bare + 2
    return end + 3 if end >= 0 else -1


def parse_request_head(raw: bytes, max_head_bytes: int, max_fields: int) -> RequestHead:
    """Parse one whole request head (its last bytes are the empty line); raise MeshError to refuse it."""
    whole = raw
    if raw.startswith(b"\r\n"):
        raw = raw[2:]  # one empty line before the request line (RFC 9112 §2.2)
    lines = raw.count(b"\r\n")
    if lines != raw.count(b"\n") or lines != raw.count(b"\r"):
        raise malformed("The request head has a line that does not end with CRLF.")
    if len(raw) > max_head_bytes:
        check_partial_head(raw, max_head_bytes)
    line = _REQUEST_LINE.match(raw)
    if line is None:
        raise _request_line_error(raw)
    method, target, major, minor = line.groups()
    if major != b"1" or minor not in (b"0", b"1"):
        raise _version_error()
    if lines - 2 > max_fields:
        raise MeshError("header_too_large", "The request head has too many fields.", is_closing=True)
    if method == b"CONNECT":
        raise MeshError("method_not_allowed", "CONNECT is not served.", is_closing=True)
    is_http11 = minor == b"1"
    fields = _read_fields(raw, httptools.HttpRequestParser, method, "The request head has a bad field line.")
    left = max_head_bytes - len(raw), max_fields - len(fields)
    return _assemble_request(method, target, is_http11, fields, left, whole)


def _assemble_request(
    method: bytes, target: bytes, is_http11: bool, fields: list[Field], left: tuple[int, int], raw: bytes
) -> RequestHead:
    values, repeated = _index(fields)
    host = values.get(b"host")
    if b"host" in repeated or (host is None and is_http11) or (host and not _HOST.fullmatch(host)):
        raise malformed("The request needs exactly one valid Host field.")
    target = _origin_form(target, host)
    content_length = _content_length(fields, values, repeated)
    is_chunked = False
    if b"transfer-encoding" in values:
        if content_length is not None:
            raise malformed("Content-Length and Transfer-Encoding came together.")
        _check_transfer_encoding(values[b"transfer-encoding"], b"transfer-encoding" in repeated, is_http11)
        is_chunked = True
    path, mark, query = target.partition(b"?")
    bytes_left, fields_left = left
    may_vary = bytes_left >= MAX_LENGTH_DIGITS  # else a longer number could make the head too large
    return RequestHead(
        method.decode("ascii"),
        target,
        path.decode("ascii"),
        mark + query,
        is_http11,
        tuple(fields),
        values,
        repeated,
        content_length,
        is_chunked,
        _tokens(fields, values, b"connection"),
        bytes_left,
        fields_left,
        raw,
        _length_at(raw, values, repeated) if may_vary else 0,
        RequestFacts(),
    )


def _length_at(raw: bytes, values: dict[bytes, bytes], repeated: frozenset[bytes]) -> int:
    """Return where the one number of `content-length` stands, 0 if there is none, or more than that."""
    if b"content-length" in repeated or not values.get(b"content-length", b"").isdigit():
        return 0
    return length_offset(raw)


def _request_line_error(raw: bytes) -> MeshError:
    versioned = _VERSIONED_LINE.match(raw)
    if versioned and versioned[1] not in (b"1.0", b"1.1"):
        return _version_error()
    return malformed("The request line is not METHOD SP TARGET SP HTTP/1.1.")


def _version_error() -> MeshError:
    return MeshError("http_version_not_supported", "Only HTTP/1.0 and HTTP/1.1 are served.", is_closing=True)


def _read_fields(
    raw: bytes,
    parser_class: type[httptools.HttpRequestParser] | type[httptools.HttpResponseParser],
    method: bytes,
    complaint: str,
) -> list[Field]:
    if len(raw.translate(None, _CONTROL)) != len(raw) or b"\r\n " in raw or b"\r\n\t" in raw:
        raise malformed(complaint)
    fields: list[Field] = []
    if method and method not in _PARSER_METHODS:
        raw = b"GET" + raw[len(method) :]
    try:
        parser_class(_FieldReader(fields)).feed_data(raw)
    except httptools.HttpParserUpgrade:
        pass  # an offer to upgrade is ignored (RFC 9110 §7.8); only the head was fed, so no body is lost
    except httptools.HttpParserError as error:
        if b"transfer-encoding" not in raw.lower() and b"content-length" not in raw.lower():
            raise malformed(complaint) from error
        # llhttp stopped at a framing field; the caller's own framing rules name the fault.
        return _split_fields(raw, complaint)
    if b" \r\n" in raw or b"\t\r\n" in raw:  # llhttp keeps white space after a value
        return [(name, value.rstrip(b" \t")) for name, value in fields]
    return fields


def _split_fields(raw: bytes, complaint: str) -> list[Field]:
    """Split field lines without judging framing: only for heads that llhttp refused."""
    fields = []
    for text in raw[raw.index(b"\r\n") + 2 : -4].split(b"\r\n"):
        name, colon, value = text.partition(b":")
        if not colon or re.fullmatch(TOKEN_BYTE + rb"+", name) is None:
            raise malformed(complaint)
        fields.append((name, value.strip(b" \t")))
    return fields


def _index(fields: list[Field]) -> tuple[dict[bytes, bytes], frozenset[bytes]]:
    values: dict[bytes, bytes] = {}
    repeated: list[bytes] = []
    for name, value in fields:
        key = name.lower()
        if key in values:
            repeated.append(key)
        else:
            values[key] = value
    return values, frozenset(repeated)


def _tokens(fields: list[Field], values: dict[bytes, bytes], name: bytes) -> frozenset[bytes]:
    if name not in values:
        return frozenset()
    joined = b",".join(v for n, v in fields if n.lower() == name)
    return frozenset(part.strip(b" \t").lower() for part in joined.split(b",")) - {b""}


def _origin_form(target: bytes, host: bytes | None) -> bytes:
    if target.startswith(b"/") or target == b"*":
        return target
    absolute = _ABSOLUTE.fullmatch(target)
    if absolute is None or host is None or absolute[1].lower() != host.lower():
        raise malformed("The request target is not a path, and no absolute URL of this host.")
    return (absolute[2] or b"/") + (absolute[3] or b"")


def _content_length(
    fields: list[Field], values: dict[bytes, bytes], repeated: frozenset[bytes]
) -> int | None:
    value = values.get(b"content-length")
    if value is None:
        return None
    if b"content-length" in repeated or b"," in value:
        parts = {
            part.strip(b" \t")
            for name, text in fields
            if name.lower() == b"content-length"
            for part in text.split(b",")
        }
        if len(parts) != 1:
            raise malformed("Content-Length came with different values.")
        value = parts.pop()
    if not value.isdigit() or len(value) > MAX_LENGTH_DIGITS:
        raise malformed("Content-Length is not a number of 1 to 19 digits.")
    return int(value)


def _check_transfer_encoding(value: bytes, is_repeated: bool, is_http11: bool) -> None:
    codings = [part.strip(b" \t").lower() for part in value.split(b",")]
    if is_repeated or not is_http11 or codings[-1] != b"chunked" or b"" in codings:
        raise malformed("Transfer-Encoding must be the single coding chunked.")
    if codings.count(b"chunked") > 1 or any(b";" in coding for coding in codings):
        raise malformed("Transfer-Encoding must be the single coding chunked.")
    if len(codings) > 1:
        raise MeshError(
            "unsupported_transfer_encoding",
            "The only transfer coding served is chunked.",
            is_closing=True,
        )


# --------------------------------------------------------------------------------------- responses


def parse_response_head(raw: bytes, request_method: str) -> ResponseHead:
    """Parse one whole response head; raise UpstreamProtocolError when it is not valid."""
    try:
        return _parse_response_head(raw, request_method)
    except MeshError as error:
        raise UpstreamProtocolError(error.message) from error


def _parse_response_head(raw: bytes, request_method: str) -> ResponseHead:
    lines = raw.count(b"\r\n")
    if lines != raw.count(b"\n") or lines != raw.count(b"\r"):
        raise UpstreamProtocolError("a line of the response head does not end with CRLF")
    line = _STATUS_LINE.match(raw)
    if line is None:
        raise UpstreamProtocolError("malformed status line")
    if lines - 2 > MAX_RESPONSE_FIELDS or len(raw) > MAX_RESPONSE_HEAD_BYTES:
        raise UpstreamProtocolError("response head too large")
    status = int(line[2])
    if status == 101:
        raise UpstreamProtocolError("101 Switching Protocols was not asked for")
    is_http11 = line[1] == b"1"
    fields = _read_fields(raw, httptools.HttpResponseParser, b"", "bad field line in the response head")
    values, repeated = _index(fields)
    has_body = request_method != "HEAD" and status >= 200 and status not in (204, 304)
    content_length = None if status == 204 else _content_length(fields, values, repeated)
    is_chunked = False
    if b"transfer-encoding" in values and status != 204:
        coding = values[b"transfer-encoding"].lower()
        if content_length is not None or not is_http11:
            raise UpstreamProtocolError("conflicting framing fields")
        if coding != b"chunked" or b"transfer-encoding" in repeated:
            raise UpstreamProtocolError("transfer coding other than chunked")
        is_chunked = has_body
    return ResponseHead(
        status,
        line[3] or b"",
        is_http11,
        tuple(fields),
        values,
        content_length,
        is_chunked,
        has_body,
        values.get(b"content-type", b"").lower().startswith(b"text/event-stream"),
        values.get(b"content-encoding", b"identity").lower() != b"identity",
        _tokens(fields, values, b"connection"),
        raw,
        0 if content_length is None else _length_at(raw, values, repeated),
        {},
    )
