"""Heads: every row of the strictness table, and any way to cut the bytes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshd.errors import MeshError
from meshd.io.http1 import (
    UpstreamProtocolError,
    check_partial_head,
    find_head_end,
    parse_request_head,
    parse_response_head,
)


def head(text: str) -> bytes:
    return text.replace("\n", "\r\n").encode("latin-1")


def parse(raw: bytes, max_head_bytes: int = 65536, max_fields: int = 256):
    return parse_request_head(raw, max_head_bytes, max_fields)


def test_fields_keep_order_repeats_and_bytes():
    parsed = parse(head("POST /v1/x?a=1 HTTP/1.1\nHost: h\nX-B: 2\nx-a: \xff1 \nX-B: 3\n\n"))
    assert parsed.method == "POST" and parsed.path == "/v1/x" and parsed.query == b"?a=1"
    assert parsed.fields == ((b"Host", b"h"), (b"X-B", b"2"), (b"x-a", b"\xff1"), (b"X-B", b"3"))
    assert parsed.repeated == {b"x-b"}
    assert parsed.values[b"x-b"] == b"2"


@pytest.mark.parametrize(
    ("text", "keeps"),
    [
        ("GET / HTTP/1.1\nHost: h\n\n", True),
        ("GET / HTTP/1.1\nHost: h\nConnection: Close\n\n", False),
        ("GET / HTTP/1.0\n\n", False),
        ("GET / HTTP/1.0\nConnection: keep-alive\n\n", False),
    ],
)
def test_keep_alive_is_decided_by_version_and_connection(text, keeps):
    assert parse(head(text)).keeps_alive is keeps


REFUSED = [
    ("bare LF", b"GET / HTTP/1.1\nHost: h\r\n\r\n", "malformed_request"),
    ("bare CR", b"GET / HTTP/1.1\r\nHost: h\rX: y\r\n\r\n", "malformed_request"),
    ("two empty lines first", b"\r\n\r\nGET / HTTP/1.1\r\nHost: h\r\n\r\n", "malformed_request"),
    ("two spaces", head("GET  / HTTP/1.1\nHost: h\n\n"), "malformed_request"),
    ("no version", head("GET /\nHost: h\n\n"), "malformed_request"),
    ("lower-case version", head("GET / http/1.1\nHost: h\n\n"), "malformed_request"),
    ("method not a token", head("G@T / HTTP/1.1\nHost: h\n\n"), "malformed_request"),
    ("method too long", head("G" * 33 + " / HTTP/1.1\nHost: h\n\n"), "malformed_request"),
    ("fragment in target", head("GET /#a HTTP/1.1\nHost: h\n\n"), "malformed_request"),
    ("byte above 0x7f in target", head("GET /\xe9 HTTP/1.1\nHost: h\n\n"), "malformed_request"),
    ("target without slash", head("GET v1 HTTP/1.1\nHost: h\n\n"), "malformed_request"),
    ("absolute of another host", head("GET http://other/ HTTP/1.1\nHost: h\n\n"), "malformed_request"),
    ("absolute with userinfo", head("GET http://u@h/ HTTP/1.1\nHost: h\n\n"), "malformed_request"),
    ("absolute of another scheme", head("GET ftp://h/ HTTP/1.1\nHost: h\n\n"), "malformed_request"),
    ("CONNECT", head("CONNECT h:443 HTTP/1.1\nHost: h\n\n"), "method_not_allowed"),
    ("HTTP/2.0", head("GET / HTTP/2.0\nHost: h\n\n"), "http_version_not_supported"),
    ("HTTP/1.2", head("GET / HTTP/1.2\nHost: h\n\n"), "http_version_not_supported"),
    ("HTTP/2 preface", b"PRI * HTTP/2.0\r\n\r\n", "http_version_not_supported"),
    ("field without colon", head("GET / HTTP/1.1\nHost: h\nbad\n\n"), "malformed_request"),
    ("empty field name", head("GET / HTTP/1.1\nHost: h\n: x\n\n"), "malformed_request"),
    ("space before colon", head("GET / HTTP/1.1\nHost : h\n\n"), "malformed_request"),
    (
        "space before colon beside framing",
        head("POST / HTTP/1.1\nHost: h\nContent-Length : 3\n\n"),
        "malformed_request",
    ),
    ("obs-fold", head("GET / HTTP/1.1\nHost: h\nX: a\n b\n\n"), "malformed_request"),
    ("NUL in value", head("GET / HTTP/1.1\nHost: h\nX: a\0b\n\n"), "malformed_request"),
    ("DEL in value", head("GET / HTTP/1.1\nHost: h\nX: a\x7fb\n\n"), "malformed_request"),
    ("control byte in value", head("GET / HTTP/1.1\nHost: h\nX: a\x01b\n\n"), "malformed_request"),
    ("no Host", head("GET / HTTP/1.1\n\n"), "malformed_request"),
    ("two Hosts", head("GET / HTTP/1.1\nHost: h\nHost: h\n\n"), "malformed_request"),
    ("invalid Host", head("GET / HTTP/1.1\nHost: a b\n\n"), "malformed_request"),
    (
        "CL.TE",
        head("POST / HTTP/1.1\nHost: h\nContent-Length: 3\nTransfer-Encoding: chunked\n\n"),
        "malformed_request",
    ),
    (
        "TE.CL",
        head("POST / HTTP/1.1\nHost: h\nTransfer-Encoding: chunked\nContent-Length: 3\n\n"),
        "malformed_request",
    ),
    (
        "TE.TE",
        head("POST / HTTP/1.1\nHost: h\nTransfer-Encoding: chunked\nTransfer-Encoding: x\n\n"),
        "malformed_request",
    ),
    ("signed length", head("POST / HTTP/1.1\nHost: h\nContent-Length: +3\n\n"), "malformed_request"),
    ("hexadecimal length", head("POST / HTTP/1.1\nHost: h\nContent-Length: 0x3\n\n"), "malformed_request"),
    (
        "20-digit length",
        head(f"POST / HTTP/1.1\nHost: h\nContent-Length: {'1' * 20}\n\n"),
        "malformed_request",
    ),
    (
        "two lengths",
        head("POST / HTTP/1.1\nHost: h\nContent-Length: 3\nContent-Length: 4\n\n"),
        "malformed_request",
    ),
    ("empty length", head("POST / HTTP/1.1\nHost: h\nContent-Length:\n\n"), "malformed_request"),
    (
        "chunked twice",
        head("POST / HTTP/1.1\nHost: h\nTransfer-Encoding: chunked, chunked\n\n"),
        "malformed_request",
    ),
    (
        "chunked not last",
        head("POST / HTTP/1.1\nHost: h\nTransfer-Encoding: chunked, gzip\n\n"),
        "malformed_request",
    ),
    ("empty coding", head("POST / HTTP/1.1\nHost: h\nTransfer-Encoding: , chunked\n\n"), "malformed_request"),
    (
        "coding with parameter",
        head("POST / HTTP/1.1\nHost: h\nTransfer-Encoding: chunked;a=b\n\n"),
        "malformed_request",
    ),
    (
        "identity coding",
        head("POST / HTTP/1.1\nHost: h\nTransfer-Encoding: identity\n\n"),
        "malformed_request",
    ),
    ("TE on HTTP/1.0", head("POST / HTTP/1.0\nTransfer-Encoding: chunked\n\n"), "malformed_request"),
    (
        "gzip, chunked",
        head("POST / HTTP/1.1\nHost: h\nTransfer-Encoding: gzip, chunked\n\n"),
        "unsupported_transfer_encoding",
    ),
]


@pytest.mark.parametrize(("raw", "code"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED])
def test_bad_head_is_refused_and_the_connection_closed(raw, code):
    with pytest.raises(MeshError) as caught:
        parse(raw)
    assert caught.value.code == code
    assert caught.value.is_closing


ACCEPTED = [
    ("one empty line first", b"\r\nGET / HTTP/1.1\r\nHost: h\r\n\r\n"),
    ("unknown method", head("FROB / HTTP/1.1\nHost: h\nX: y\n\n")),
    ("asterisk", head("GET * HTTP/1.1\nHost: h\n\n")),
    ("absolute of this host", head("GET http://H:80/a?b HTTP/1.1\nHost: h:80\n\n")),
    ("empty Host", head("GET / HTTP/1.1\nHost:\n\n")),
    ("IPv6 Host", head("GET / HTTP/1.1\nHost: [::1]:80\n\n")),
    ("HTTP/1.0 without Host", head("GET / HTTP/1.0\n\n")),
    ("same length twice", head("POST / HTTP/1.1\nHost: h\nContent-Length: 5\nContent-Length: 5\n\n")),
    ("length list of equals", head("POST / HTTP/1.1\nHost: h\nContent-Length: 5, 5\n\n")),
    ("Chunked in capitals", head("POST / HTTP/1.1\nHost: h\nTransfer-Encoding: CHUNKED\n\n")),
    (
        "upgrade offer",
        head(
            "POST / HTTP/1.1\nHost: h\nUpgrade: h2c\nConnection: Upgrade, HTTP2-Settings\n"
            "Content-Length: 5\n\n"
        ),
    ),
    ("websocket offer", head("GET / HTTP/1.1\nHost: h\nUpgrade: websocket\nConnection: Upgrade\n\n")),
    ("bytes above 0x7f in a value", head("GET / HTTP/1.1\nHost: h\nX: \xff\xe9\n\n")),
]


@pytest.mark.parametrize("raw", [row[1] for row in ACCEPTED], ids=[row[0] for row in ACCEPTED])
def test_unusual_but_valid_head_is_accepted(raw):
    assert parse(raw).target.startswith((b"/", b"*"))


def test_unknown_method_keeps_its_name_and_fields():
    parsed = parse(head("FROB /p HTTP/1.1\nHost: h\nX: y\n\n"))
    assert parsed.method == "FROB"
    assert parsed.fields == ((b"Host", b"h"), (b"X", b"y"))


def test_absolute_form_gives_its_path_and_query():
    parsed = parse(head("GET https://h HTTP/1.1\nHost: h\n\n"))
    assert parsed.target == b"/"
    assert parse(head("GET http://h/a?b=c HTTP/1.1\nHost: h\n\n")).target == b"/a?b=c"


def test_head_limits_name_what_is_too_long():
    with pytest.raises(MeshError, match="request line") as caught:
        check_partial_head(b"GET /" + b"a" * 2000, 1024)
    assert caught.value.code == "uri_too_long"
    with pytest.raises(MeshError) as caught:
        check_partial_head(b"GET / HTTP/1.1\r\nX: " + b"a" * 2000, 1024)
    assert caught.value.code == "header_too_large"
    with pytest.raises(MeshError) as caught:
        parse(head("GET / HTTP/1.1\nHost: h\n" + "X: y\n" * 300 + "\n"))
    assert caught.value.code == "header_too_large"
    with pytest.raises(MeshError) as caught:
        parse(head("GET / HTTP/1.1\nHost: h\nX: " + "y" * 2000 + "\n\n"), max_head_bytes=1024)
    assert caught.value.code == "header_too_large"


def test_head_end_is_found_wherever_the_bytes_were_cut():
    raw = head("GET / HTTP/1.1\nHost: h\n\nrest")
    for cut in range(len(raw)):
        scan = max(0, cut - 3)
        assert find_head_end(raw, scan if find_head_end(raw[:cut]) < 0 else 0) == len(raw) - 4


token = st.text("abcXYZ-_09", min_size=1, max_size=12).filter(
    lambda name: (
        name.lower() not in ("host", "connection", "te", "content-length", "transfer-encoding", "upgrade")
    )
)
value = st.binary(max_size=30).map(lambda b: bytes(c for c in b if c >= 32 and c != 127).strip(b" \t"))


@given(st.lists(st.tuples(token, value), max_size=20))
def test_any_field_list_survives_parsing(fields):
    raw = b"POST /p HTTP/1.1\r\nhost: h\r\n"
    for name, content in fields:
        raw += name.encode() + b": " + content + b"\r\n"
    parsed = parse(raw + b"\r\n")
    assert list(parsed.fields[1:]) == [(name.encode(), content) for name, content in fields]


@given(st.binary(max_size=200))
def test_arbitrary_bytes_never_crash_the_head_parser(raw):
    for prefix in (b"", b"GET / HTTP/1.1\r\nHost: h\r\n"):
        try:
            parse(prefix + raw + b"\r\n\r\n")
        except MeshError as error:
            assert 400 <= error.status <= 505


# ------------------------------------------------------------------------------------------ responses


def response(text: str, method: str = "POST"):
    return parse_response_head(head(text), method)


def test_response_framing_follows_status_method_and_fields():
    assert response("HTTP/1.1 200 OK\nContent-Length: 3\n\n").content_length == 3
    assert response("HTTP/1.1 200 OK\nTransfer-Encoding: chunked\n\n").is_chunked
    assert response("HTTP/1.1 200 OK\n\n").is_close_delimited
    assert not response("HTTP/1.1 204 No Content\nContent-Length: 3\n\n").has_body
    assert not response("HTTP/1.1 304 Not Modified\nContent-Length: 3\n\n").has_body
    assert not response("HTTP/1.1 200 OK\nContent-Length: 3\n\n", "HEAD").has_body
    assert response("HTTP/1.0 200 OK\n\n").keeps_alive is False
    assert response("HTTP/1.1 200\n\n").reason == b""


@pytest.mark.parametrize(
    "text",
    [
        "HTTP/1.1 99 X\n\n",
        "HTTP/1.1 600 X\n\n",
        "HTTP/2 200 OK\n\n",
        "HTP/1.1 200 OK\n\n",
        "HTTP/1.1 101 Switching Protocols\nUpgrade: x\n\n",
        "HTTP/1.1 200 OK\nContent-Length: 3\nTransfer-Encoding: chunked\n\n",
        "HTTP/1.1 200 OK\nContent-Length: 3\nContent-Length: 4\n\n",
        "HTTP/1.1 200 OK\nContent-Length: -3\n\n",
        "HTTP/1.1 200 OK\nTransfer-Encoding: gzip, chunked\n\n",
        "HTTP/1.0 200 OK\nTransfer-Encoding: chunked\n\n",
        "HTTP/1.1 200 OK\nX: a\n b\n\n",
        "HTTP/1.1 200 OK\nX: a\0\n\n",
        "HTTP/1.1 200 OK\n" + "X: y\n" * 300 + "\n",
        "HTTP/1.1 200 OK\nX: " + "y" * 70000 + "\n\n",
    ],
)
def test_invalid_response_head_is_a_protocol_error(text):
    with pytest.raises(UpstreamProtocolError):
        response(text)


def test_bare_lf_in_a_response_head_is_a_protocol_error():
    with pytest.raises(UpstreamProtocolError):
        parse_response_head(b"HTTP/1.1 200 OK\nX: y\r\n\r\n", "GET")


@given(st.binary(max_size=200))
def test_arbitrary_bytes_never_crash_the_response_parser(raw):
    for prefix in (b"", b"HTTP/1.1 200 OK\r\n"):
        try:
            parse_response_head(prefix + raw + b"\r\n\r\n", "GET")
        except UpstreamProtocolError:
            pass


@pytest.mark.parametrize(
    "raw", [b"GET / HTTP/1.1\rHost: h\r\r", b"GET / HTTP/1.1\n", b"\nGET", b"GET / HTTP/1.1\r\nX: a\rb"]
)
def test_head_that_can_never_end_well_is_refused_before_it_ends(raw):
    with pytest.raises(MeshError) as refused:
        check_partial_head(raw, 1000)
    assert refused.value.code == "malformed_request"


def test_no_beginning_of_a_good_head_is_refused():
    raw = head("\nPOST / HTTP/1.1\nHost: h\nX: y\n")
    for size in range(len(raw)):
        for start in range(size):
            check_partial_head(raw[:size], 1000, start)


def test_empty_line_before_a_long_request_line_does_not_hide_that_it_is_long():
    with pytest.raises(MeshError) as refused:
        check_partial_head(b"\r\nGET /" + b"a" * 1000, 1000)
    assert refused.value.code == "uri_too_long"
