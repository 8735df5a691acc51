"""Which fields pass in each direction, and heads that an independent reader understands."""

from __future__ import annotations

import re
from typing import Any

import h11
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshd.config import Settings
from meshd.errors import CODES, MeshError
from meshd.io.headers import (
    HttpDate,
    RequestIds,
    downstream_head,
    error_fields,
    forwarded_fields,
    local_answer,
    upstream_head,
)
from meshd.io.http1 import RequestHead, ResponseHead, parse_request_head, parse_response_head
from tests.fakes.transport import FakeClock

DATE = b"Sat, 03 Oct 2026 09:12:44 GMT"
DATE_LINE = f"date: {DATE.decode()}\r\n"
Fields = list[tuple[bytes, bytes]]


def ids_of_settings() -> RequestIds:
    """As the settings have it by default."""
    return RequestIds(Settings().request_id_headers)


def request(*fields: str, line: str = "POST /v1/x?beta=true HTTP/1.1") -> RequestHead:
    raw = "\r\n".join([line, "Host: front", *fields, "", ""]).encode("latin-1")
    return parse_request_head(raw, 65536, 256)


def response(*fields: str, status: str = "200 OK", method: str = "POST") -> ResponseHead:
    return parse_response_head("\r\n".join([f"HTTP/1.1 {status}", *fields, "", ""]).encode("latin-1"), method)


def towards_upstream(head: RequestHead, **changes: Any) -> tuple[h11.Request, Fields]:
    """Write the head and read it back with h11."""
    options: dict[str, Any] = {
        "base_path": "",
        "authority": "up:8000",
        "fields": forwarded_fields(head, passes_credentials=changes.pop("passes_credentials", True)),
        "body_bytes": 3,
        "request_id": "req-1",
        "api_key": None,
        "sends_x_api_key": False,
    } | changes
    reader = h11.Connection(h11.SERVER)
    reader.receive_data(upstream_head(head, **options))
    event = reader.next_event()
    assert isinstance(event, h11.Request)
    return event, event.headers.raw_items()


def towards_client(answer: ResponseHead, method: str = "GET", **changes: Any) -> tuple[h11.Response, Fields]:
    options: dict[str, Any] = {
        "request_id": "req-1",
        "framing": "content-length: 2\r\n",
        "closes": False,
        "upstream_authority": "up:8000",
        "date": "" if answer.is_dated else DATE_LINE,
    } | changes
    return read_response(downstream_head(answer, **options), method)


def read_response(raw: bytes, method: str = "GET") -> tuple[h11.Response, Fields]:
    reader = h11.Connection(h11.CLIENT)
    reader.send(h11.Request(method=method, target="/", headers=[("host", "h")]))
    reader.send(h11.EndOfMessage())
    reader.receive_data(raw)
    event = reader.next_event()
    assert isinstance(event, h11.Response)
    return event, event.headers.raw_items()


def values(fields: Fields, name: bytes) -> list[bytes]:
    return [value for key, value in fields if key.lower() == name]


# ------------------------------------------------------------------------------- towards an upstream


def test_surviving_fields_keep_order_repeats_and_bytes():
    head = request("X-Custom: 1", "Cookie: a=b", "x-custom: 1", "Accept-Encoding: gzip", "X: \xff\xe9")
    event, fields = towards_upstream(head)
    assert (event.method, event.target) == (b"POST", b"/v1/x?beta=true")
    assert fields == [
        (b"host", b"up:8000"),
        (b"X-Custom", b"1"),
        (b"Cookie", b"a=b"),
        (b"x-custom", b"1"),
        (b"Accept-Encoding", b"gzip"),
        (b"X", b"\xff\xe9"),
        (b"content-length", b"3"),
        (b"x-request-id", b"req-1"),
    ]


@pytest.mark.parametrize(
    "field",
    [
        "Connection: keep-alive",
        "Keep-Alive: timeout=5",
        "Proxy-Connection: keep-alive",
        "Proxy-Authenticate: Basic",
        "Proxy-Authorization: Basic x",
        "Transfer-Encoding: chunked",
        "Trailer: x",
        "Upgrade: h2c",
        "HTTP2-Settings: AAMAAABk",
        "TE: gzip",
        "TE: trailers, gzip",
        "Expect: 100-continue",
        "Content-Length: 99",
        "X-Request-Id: theirs",
        "X-Mesh-Upstream: forged",
        "x-mesh-anything: forged",
    ],
)
def test_field_of_one_hop_or_our_own_does_not_pass(field):
    name, _, value = field.partition(": ")
    _, fields = towards_upstream(request(field))
    assert value.encode() not in values(fields, name.lower().encode())
    assert len(fields) == 3


def test_fields_named_by_connection_do_not_pass():
    head = request("Connection: close, X-Secret , ,cookie", "x-secret: 1", "Cookie: a=b", "x-open: 1")
    _, fields = towards_upstream(head)
    assert [name for name, _ in fields] == [b"host", b"x-open", b"content-length", b"x-request-id"]


def test_te_passes_only_as_exactly_trailers():
    _, fields = towards_upstream(request("TE: Trailers", "Connection: TE"))
    assert values(fields, b"te") == [b"trailers"] and values(fields, b"connection") == [b"te"]
    _, fields = towards_upstream(request("TE: trailers", "TE: gzip"))
    assert values(fields, b"te") == values(fields, b"connection") == []


def test_upgrade_offer_leaves_no_trace():
    head = request("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAM", "A: b")
    _, fields = towards_upstream(head)
    assert [name for name, _ in fields] == [b"host", b"A", b"content-length", b"x-request-id"]


CREDENTIALS = ("Authorization: Bearer client", "X-API-Key: client")


@pytest.mark.parametrize(
    ("options", "authorization", "x_api_key"),
    [
        ({"passes_credentials": True}, [b"Bearer client"], [b"client"]),
        ({"passes_credentials": False}, [], []),
        ({"passes_credentials": False, "api_key": "up"}, [b"Bearer up"], []),
        (
            {"passes_credentials": False, "api_key": "up", "sends_x_api_key": True},
            [b"Bearer up"],
            [b"up"],
        ),
    ],
)
def test_credentials_are_the_clients_or_the_upstreams_and_never_both(options, authorization, x_api_key):
    _, fields = towards_upstream(request(*CREDENTIALS), **options)
    assert values(fields, b"authorization") == authorization
    assert values(fields, b"x-api-key") == x_api_key


def test_length_is_ours_and_absent_where_no_body_is_sent():
    _, fields = towards_upstream(request("Content-Length: 9"), body_bytes=0)
    assert values(fields, b"content-length") == [b"0"]
    head = request(line="GET /a HTTP/1.1")
    _, fields = towards_upstream(head, body_bytes=None)
    assert values(fields, b"content-length") == []


def test_base_path_of_the_upstream_comes_first():
    event, _ = towards_upstream(request(), base_path="/base")
    assert event.target == b"/base/v1/x?beta=true"


def test_absolute_target_is_sent_as_path_and_query():
    event, fields = towards_upstream(request(line="POST http://front/v1/x?a HTTP/1.1"))
    assert event.target == b"/v1/x?a" and values(fields, b"host") == [b"up:8000"]


field_name = st.text("abcdefgXYZ-_", min_size=1, max_size=10)
field_value = st.binary(max_size=20).map(lambda raw: bytes(c for c in raw if c >= 33 and c != 127))


@given(st.lists(st.tuples(field_name, field_value), max_size=12), st.booleans())
def test_whatever_a_client_sends_the_upstream_reads_one_request(fields, passes):
    head = request(*(f"{name}: {value.decode('latin-1')}" for name, value in fields))
    _, seen = towards_upstream(head, passes_credentials=passes)
    for name in (b"host", b"content-length", b"x-request-id"):
        assert len(values(seen, name)) == 1


# ---------------------------------------------------------------------------------- towards a client


def test_response_fields_pass_in_order_with_repeats():
    answer = response(
        "Server: up", "Set-Cookie: a=1", "Content-Type: text/plain", "Date: then", "Set-Cookie: b=2",
        "Content-Encoding: gzip", "Content-Length: 2", status="201 Made It",
    )  # fmt: skip
    event, fields = towards_client(answer)
    assert (event.status_code, event.reason) == (201, b"Made It")
    assert fields == [
        (b"Server", b"up"),
        (b"Set-Cookie", b"a=1"),
        (b"Content-Type", b"text/plain"),
        (b"Date", b"then"),
        (b"Set-Cookie", b"b=2"),
        (b"Content-Encoding", b"gzip"),
        (b"content-length", b"2"),
        (b"x-request-id", b"req-1"),
    ]


@pytest.mark.parametrize(
    "field",
    [
        "Connection: keep-alive",
        "Keep-Alive: timeout=5",
        "Proxy-Connection: x",
        "Proxy-Authenticate: Basic",
        "Proxy-Authorization: x",
        "Trailer: x",
        "Upgrade: h2c",
        "TE: x",
        "X-Request-Id: theirs",
        "X-Mesh-Upstream: forged",
        "x-mesh-prefill-upstream: forged",
        "x-mesh-attempts: 9",
        "x-mesh-route-reason: forged",
        "x-mesh-model-version: 9",
        "x-mesh-policy-version: 9",
    ],
)
def test_response_field_of_one_hop_or_our_own_does_not_pass(field):
    _, fields = towards_client(response(field, "Date: then"))
    assert fields == [(b"Date", b"then"), (b"content-length", b"2"), (b"x-request-id", b"req-1")]


def test_error_code_and_retry_after_of_an_upstream_pass():
    _, fields = towards_client(response("X-Mesh-Error-Code: admission_full", "Retry-After: 7"))
    assert values(fields, b"x-mesh-error-code") == [b"admission_full"]
    assert values(fields, b"retry-after") == [b"7"]


def test_fields_named_by_the_upstreams_connection_do_not_pass():
    _, fields = towards_client(response("Connection: close, X-Inner", "X-Inner: 1", "X-Outer: 1"))
    assert values(fields, b"x-inner") == [] and values(fields, b"x-outer") == [b"1"]


def test_date_is_added_only_where_it_is_missing():
    assert values(towards_client(response())[1], b"date") == [DATE]
    assert values(towards_client(response("DATE: then"))[1], b"date") == [b"then"]


def test_framing_is_ours():
    answer = response("Transfer-Encoding: chunked")
    _, fields = towards_client(answer, framing="transfer-encoding: chunked\r\n")
    assert values(fields, b"transfer-encoding") == [b"chunked"]
    _, fields = towards_client(response("Content-Length: 2"), framing="")
    assert values(fields, b"content-length") == []


def test_end_of_the_connection_is_announced():
    _, fields = towards_client(response(), closes=True)
    assert values(fields, b"connection") == [b"close"]
    _, fields = towards_client(response(), closes=False)
    assert values(fields, b"connection") == []


def test_fields_of_route_headers_are_added():
    _, fields = towards_client(response("x-mesh-upstream: forged"), extra=((b"x-mesh-upstream", b"u"),))
    assert values(fields, b"x-mesh-upstream") == [b"u"]


@pytest.mark.parametrize("name", ["Location", "Content-Location"])
@pytest.mark.parametrize(
    ("authority", "value", "passed"),
    [
        ("up:8000", "http://up:8000/a?b=c", "/a?b=c"),
        ("up:8000", "http://UP:8000/a", "/a"),
        ("up:8000", "http://up:8000", "/"),
        ("up:8000", "http://up:8000?x", "/?x"),
        ("up:8000", "http://user@up:8000/a", "/a"),
        ("up:8000", "//up:8000/a", "/a"),
        ("up:8000", "http://up:8001/a", "http://up:8001/a"),
        ("up:8000", "http://other/a", "http://other/a"),
        ("up:8000", "/a?b", "/a?b"),
        ("up:8000", "a", "a"),
        ("up:8000", "http://[", "http://["),
        ("up:8000", "http://up:99999/", "http://up:99999/"),
        ("up:8000", "http://up:8000 /a", "/a"),
        ("up:8000", "http://up:8000x/a", "/a"),
        ("up", "http://up/a", "/a"),
        ("up", "http://up:80/a", "/a"),
        ("up", "https://up:443/a", "/a"),
        ("[::1]:8000", "http://[::1]:8000/a", "/a"),
    ],
)
def test_reference_to_the_upstream_itself_is_reduced(name, authority, value, passed):
    _, fields = towards_client(response(f"{name}: {value}"), upstream_authority=authority)
    assert values(fields, name.lower().encode()) == [passed.encode()]


@given(st.lists(st.tuples(field_name, field_value), max_size=12))
def test_whatever_an_upstream_sends_the_client_reads_one_response(fields):
    answer = response(*(f"{name}: {value.decode('latin-1')}" for name, value in fields))
    _, seen = towards_client(answer)
    for name in (b"content-length", b"x-request-id", b"date"):
        assert len(values(seen, name)) >= 1


# ------------------------------------------------------------------------------------- local answers


def test_local_answer_has_its_fields_once_and_its_body():
    raw = local_answer(200, b'{"a":1}', request_id="req-1", date=DATE, closes=False)
    event, fields = read_response(raw)
    assert event.reason == b"OK"
    assert fields == [
        (b"content-type", b"application/json"),
        (b"content-length", b"7"),
        (b"date", DATE),
        (b"server", b"meshd"),
        (b"x-request-id", b"req-1"),
    ]
    assert raw.endswith(b'\r\n\r\n{"a":1}')


def test_local_answer_to_head_is_the_head_alone():
    raw = local_answer(200, b"12345", request_id="r", date=DATE, closes=True, is_head=True)
    _, fields = read_response(raw, "HEAD")
    assert values(fields, b"content-length") == [b"5"] and values(fields, b"connection") == [b"close"]
    assert raw.endswith(b"\r\n\r\n")


@pytest.mark.parametrize("code", [name for name, row in CODES.items() if row.status != 499])
def test_each_error_carries_its_code_and_advice(code):
    error = MeshError(code, "x", allow=("GET", "HEAD") if code == "method_not_allowed" else ())
    raw = local_answer(
        error.status, b"{}", request_id="r", date=DATE, closes=False, extra=error_fields(error)
    )
    event, fields = read_response(raw)
    assert event.status_code == error.status and event.reason
    assert values(fields, b"x-mesh-error-code") == [code.encode()]
    advice = values(fields, b"retry-after")
    assert len(advice) == (error.status in (429, 503)) and all(int(seconds) >= 1 for seconds in advice)
    assert values(fields, b"allow") == ([b"GET, HEAD"] if error.status == 405 else [])


# ---------------------------------------------------------------------------------------- request ids


def test_generated_id_has_its_prefix_and_24_letters_or_digits():
    ids = ids_of_settings()
    made = [ids.choose(request(), "chatcmpl-") for _ in range(2000)]
    assert all(re.fullmatch(r"chatcmpl-[A-Za-z0-9]{24}", one) for one in made)
    assert len(set(made)) == len(made)
    letters = {letter for one in made for letter in one.removeprefix("chatcmpl-")}
    assert len(letters) == 62


@pytest.mark.parametrize(
    ("fields", "chosen"),
    [
        (("X-Request-Id: a", "X-Correlation-Id: b"), "a"),
        (("Request-Id: d", "X-Trace-Id: c", "X-Correlation-Id: b"), "b"),
        (("Request-Id: d", "X-Trace-Id: c"), "c"),
        (("Request-Id: d",), "d"),
        (("X-Request-Id: first", "X-Request-Id: second"), "first"),
        (("X-Request-Id:", "X-Correlation-Id: b"), ""),
        (("X-Request-Id: with space ~",), "with space ~"),
        (("X-Request-Id: " + "a" * 256,), "a" * 256),
    ],
)
def test_id_of_the_client_is_taken_from_the_first_field_present(fields, chosen):
    assert ids_of_settings().choose(request(*fields), "p-") == chosen


@pytest.mark.parametrize("bad", ["a" * 257, "caf\xe9", "a\tb"])
def test_unfit_id_is_replaced_even_if_another_field_has_one(bad):
    chosen = ids_of_settings().choose(request(f"X-Request-Id: {bad}", "X-Trace-Id: b"), "p-")
    assert re.fullmatch(r"p-[A-Za-z0-9]{24}", chosen)


def test_own_list_of_id_headers_is_the_whole_list():
    ids = RequestIds(("X-Mine",))
    assert ids.choose(request("x-mine: m", "X-Request-Id: a"), "p-") == "m"
    assert ids.choose(request("X-Request-Id: a"), "p-").startswith("p-")


def test_empty_id_comes_back_as_an_empty_field():
    _, fields = towards_client(response(), request_id="")
    assert values(fields, b"x-request-id") == [b""]


# ----------------------------------------------------------------------------------------------- date


def test_date_is_made_once_a_second_in_the_form_of_http():
    clock = FakeClock(1_790_932_364.0)
    date = HttpDate(clock)
    first = date.value()
    assert first == b"Fri, 02 Oct 2026 09:12:44 GMT"
    clock.advance(0.9)
    assert date.value() is first
    clock.advance(0.2)
    assert date.value() == b"Fri, 02 Oct 2026 09:12:45 GMT"


def test_date_line_changes_with_the_second_of_the_wall_clock_by_any_even_clock():
    wall = FakeClock(1_790_932_364.75)
    date = HttpDate(wall)
    first = date.line(50.0)
    assert first == "date: Fri, 02 Oct 2026 09:12:44 GMT\r\n"
    wall.advance(0.2)
    assert date.line(50.2) is first
    wall.advance(0.1)
    assert date.line(50.3) == "date: Fri, 02 Oct 2026 09:12:45 GMT\r\n"
    assert date.line(49.0) == date.line(50.3), "of a moment before: the newest there is"
