"""Request heads: what meshd accepts is what a strict reader and h11 read, wherever the bytes are cut."""

from __future__ import annotations

import h11
from hypothesis import strategies as st

from meshd.errors import CODES, MeshError
from meshd.io.headers import forwarded_fields, upstream_head
from meshd.io.http1 import RequestHead, check_partial_head, find_head_end, parse_request_head
from tests.fakes.heads import facts
from tests.fuzz.engine import Target, cuts, main, mutated
from tests.fuzz.strict import TOKEN, fields_of, length_of, lines_of, values

LIMIT, MOST_FIELDS = 2000, 12
REQUEST_ID = "req-0"

WORDS = [
    b"\r\n", b"\n", b"\r", b"\r\n\r\n", b"\n\n", b"\0", b" ", b"\t", b":", b": ", b",", b";", b"\x7f",
    b"\x80", b"\x0b", b"HTTP/1.1", b"HTTP/1.0", b"HTTP/2.0", b"http://h/", b"https://", b"*", b"#",
    b"?", b"//", b"@", b"content-length: 5\r\n", b"Content-Length: 0\r\n", b"content-length: 5, 5\r\n",
    b"content-length: +5\r\n", b"transfer-encoding: chunked\r\n",
    b"Transfer-Encoding: gzip, chunked\r\n", b"transfer-encoding: identity\r\n",
    b"connection: close\r\n", b"Connection: upgrade, x\r\n", b"upgrade: h2c\r\n", b"te: trailers\r\n",
    b"expect: 100-continue\r\n", b"host: h\r\n", b"host: i\r\n", b"x-request-id: a\r\n",
    b"authorization: b\r\n", b" x: folded\r\n", b"x-mesh-client: 1\r\n", b"PRI * HTTP/2.0\r\n\r\n",
    b"CONNECT ", b"chunked", b"x: y\r\n" * 12,
]  # fmt: skip


@st.composite
def _heads(draw: st.DrawFn) -> bytes:
    method = draw(st.sampled_from([b"GET", b"POST", b"HEAD", b"DELETE", b"OPTIONS", b"FROB", b"get"]))
    target = draw(
        st.sampled_from([b"/", b"/v1/x?a=b", b"http://h/a?b", b"*", b"//a", b"HTTP://H?x", b"/%41;a"])
    )
    version = draw(st.sampled_from([b"HTTP/1.1", b"HTTP/1.1", b"HTTP/1.0"]))
    fields = draw(st.lists(st.sampled_from([word for word in WORDS if word.endswith(b"\r\n")]), max_size=4))
    host = draw(st.sampled_from([b"host: h\r\n", b"Host:h\r\n", b"host:\r\n", b"", b"Host: [::1]:80\r\n"]))
    return method + b" " + target + b" " + version + b"\r\n" + host + b"".join(fields) + b"\r\n"


def _read(pieces: list[bytes]) -> tuple[str, RequestHead | None, bytes]:
    """Read as a connection does: the code of a refusal, or a head and what follows it, or nothing yet."""
    pending, scan_from = b"", 0
    for index, piece in enumerate(pieces):
        pending += piece
        end = find_head_end(pending, scan_from)
        try:
            if end < 0:
                check_partial_head(pending, LIMIT, max(0, scan_from - 1))
                scan_from = max(0, len(pending) - 3)
                continue
            head = parse_request_head(pending[:end], LIMIT, MOST_FIELDS)
        except MeshError as error:
            assert error.is_closing and error.code in CODES
            return error.code, None, b""
        return "", head, pending[end:] + b"".join(pieces[index + 1 :])
    return "", None, b""


def check(data: bytes) -> None:
    code, head, rest = _read([data])
    for pieces in cuts(data):
        other_code, other, other_rest = _read(pieces)
        assert (facts(other), other_rest) == (facts(head), rest), pieces
        # A head that is bad in several ways may show another of them first, when its end is not there yet.
        assert bool(other_code) == bool(code), pieces
    if head is not None:
        raw = data[: len(data) - len(rest)]
        _compare(raw.removeprefix(b"\r\n"), head)
        _forward(head)
        _repeat(raw, head)


def _compare(raw: bytes, head: RequestHead) -> None:
    """The head means what a strict reader and what h11 make of its bytes."""
    line, *others = lines_of(raw)
    fields = fields_of(others)
    assert list(head.fields) == fields
    method, target, version = line.split(b" ")
    assert head.method.encode() == method and TOKEN.issuperset(method) and method != b"CONNECT"
    assert all(0x21 <= byte <= 0x7E and byte != 0x23 for byte in target)
    assert version == (b"HTTP/1.1" if head.is_http11 else b"HTTP/1.0")
    assert head.target == b"*" or head.target.startswith(b"/")
    assert target == head.target or target.lower().startswith((b"http://", b"https://"))
    assert head.path.encode() + head.query == head.target
    assert len(values(fields, b"host")) <= 1 and (values(fields, b"host") or not head.is_http11)
    assert head.content_length == length_of(fields)
    codings = values(fields, b"transfer-encoding")
    assert [coding.lower() for coding in codings] == ([b"chunked"] if head.is_chunked else [])
    assert not (head.is_chunked and (head.content_length is not None or not head.is_http11))
    server = h11.Connection(h11.SERVER)
    server.receive_data(raw)
    request = server.next_event()
    assert isinstance(request, h11.Request)
    assert (request.method, request.target) == (method, target)
    merged = [(name.lower(), value) for name, value in fields if name.lower() != b"content-length"]
    assert [
        field for field in request.headers if field[0] not in (b"content-length", b"transfer-encoding")
    ] == [field for field in merged if field[0] != b"transfer-encoding"]


def _forward(head: RequestHead) -> None:
    """What goes upstream is one request with one framing, whatever the client sent."""
    sent = upstream_head(
        head,
        base_path="",
        authority="u:1",
        fields=forwarded_fields(head, passes_credentials=True),
        body_bytes=7,
        request_id=REQUEST_ID,
        api_key=None,
        sends_x_api_key=False,
    )
    assert find_head_end(sent) == len(sent)
    line, *others = lines_of(sent)
    fields = fields_of(others)
    assert line == head.method.encode() + b" " + head.target + b" HTTP/1.1"
    assert values(fields, b"host") == [b"u:1"] and length_of(fields) == 7
    assert values(fields, b"x-request-id") == [REQUEST_ID.encode()]
    assert len(values(fields, b"content-length")) == 1
    for name in (b"transfer-encoding", b"upgrade", b"expect", b"keep-alive", b"trailer", b"x-mesh-client"):
        assert values(fields, name) == []
    assert values(fields, b"connection") in ([], [b"te"])
    names = [name.lower() for name, _ in fields]
    assert not (head.connection_tokens - {b"te", b"host", b"content-length", b"x-request-id"}) & set(names)


def _repeat(raw: bytes, head: RequestHead) -> None:
    """The same head with other digits in it is known again as what the parser makes of it, or not at all."""
    assert head.again(raw) is head
    for other in (raw.replace(b"5", b"67"), raw.replace(b"0", b""), raw.replace(b": 5", b": 05")):
        again = head.again(other)
        if again is not None:
            assert facts(again) == facts(parse_request_head(again.raw, LIMIT, MOST_FIELDS))
            assert find_head_end(other) == len(again.raw)


TARGET = Target("request_head", mutated(_heads(), WORDS), check)

if __name__ == "__main__":
    main(TARGET)
