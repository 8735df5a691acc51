"""What goes in comes out: bodies, fields, queries and streams, byte for byte, both ways.

Both directions are read by h11 (`fakes/wire.py`, `fakes/scripted_upstream.py`): whatever meshd emits has to
be the message it meant also for a reader that shares none of its code.
"""

from __future__ import annotations

import json
import random
import re
import string
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from meshd.io.headers import HOP_BY_HOP
from tests.fakes.node import Node, running, wait_until
from tests.fakes.scripted_upstream import Script, ScriptedUpstream, Seen
from tests.fakes.wire import Client, chunked, post

JSON = b"content-type: application/json\r\n"
BODY = b'{"model":"m1","prompt":"a"}'
OURS = {b"host", b"content-length", b"x-request-id"}


def echo(seen: Seen) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (
        len(seen.body),
        seen.body,
    )


@pytest.fixture(scope="module")
def echoing() -> Iterator[tuple[Node, ScriptedUpstream]]:
    flags = ("--io-processes", "1", "--prepare-workers", "1", "--disable-health-check")
    with ScriptedUpstream(Script(echo)) as upstream, running(*flags, "--worker-urls", upstream.url) as node:
        yield node, upstream
        assert upstream.faults == []


def json_of(size: int, rng: random.Random) -> bytes:
    """Return a JSON object of exactly ``size`` bytes with incompressible text in it."""
    opening = b'{"model":"m1","prompt":"'
    text = rng.randbytes(size)
    alphabet = (string.ascii_letters + string.digits).encode()
    return (
        opening
        + text.translate(bytes(alphabet[i % 62] for i in range(256)))[: size - len(opening) - 2]
        + b'"}'
    )


SIZES = [
    27,
    100,
    1023,
    4095,
    4096,
    4097,
    16383,
    16384,
    16385,
    65535,
    65536,
    65537,
    262144,
    1 << 20,
    (1 << 20) + 1,
]
SIZES += [5_000_003, 8 << 20]


@pytest.mark.parametrize("size", SIZES)
def test_body_passes_both_ways_byte_for_byte(echoing, size):
    node, upstream = echoing
    upstream.forget()
    upstream.script = Script(echo)
    rng = random.Random(size)
    body = json_of(size, rng)
    assert len(body) == size
    head = b"POST /v1/completions?x=%2F HTTP/1.1\r\nhost: h\r\n" + JSON
    with Client(node.host, node.port, timeout=30) as client:
        for wire in (
            head + b"content-length: %d\r\n\r\n" % size + body,
            head
            + b"transfer-encoding: chunked\r\n\r\n"
            + chunked(body, [rng.randint(1, size) for _ in range(20)]),
        ):
            client.send_in_background(wire)
            assert client.read().body == body
            seen = upstream.take()
            assert seen.body == body and seen.target == b"/v1/completions?x=%2F"
            assert seen.values("content-length") == [b"%d" % size]
            assert seen.values("transfer-encoding") == []
    wait_until(lambda: not node.held(), f"left behind: {node.held()}")


def test_unusual_json_passes_unchanged(echoing):
    """Unknown members, a user, a 40-digit integer, repeats, escapes and white space are the client's."""
    node, upstream = echoing
    upstream.script = Script(echo)
    body = (
        b'\n{ "unknown" : {"a":[1,2.50,1e400,null]} , "user":"u\\u00e9\\ud83d\\ude00","n":'
        + b"1234567890" * 4
        + b',"model":"m1", "prompt":"a","prompt":"\xc3\xa9" }\r\n '
    )
    status, _, answer = node.request("POST", "/v1/completions", body)
    assert (status, answer) == (200, body)


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses", "/generate"]
)
def test_empty_and_odd_answers_pass_on_every_endpoint(echoing, path):
    node, upstream = echoing
    bodies = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
        "/v1/messages": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
        "/v1/responses": {"input": "a"},
        "/generate": {"text": "a"},
    }
    request = json.dumps({"model": "m1", **bodies.get(path, {"prompt": "a"})}).encode()
    for status, body in ((200, b""), (200, b"\0\xff not JSON"), (500, b"<html>"), (429, b"slow")):
        upstream.script = Script(
            b"HTTP/1.1 %d Own\r\ncontent-length: %d\r\n\r\n%b" % (status, len(body), body)
        )
        with Client(node.host, node.port) as client:
            client.send(post(path.encode(), request))
            answer = client.read()
            assert (answer.status, answer.reason, answer.body) == (status, b"Own", body)
            assert answer.value("content-type") is None, "nothing is added"


TOKEN = st.text(string.ascii_letters + string.digits + "!#$%&'*+-.^_`|~", min_size=1, max_size=24)
VALUE = st.one_of(
    st.text(string.printable[:95], max_size=40).map(str.encode),
    st.binary(max_size=40).map(lambda raw: bytes(b for b in raw if b == 9 or 32 <= b < 127 or b >= 128)),
).map(lambda value: value.strip(b" \t"))
MEANT = {name.decode() for name in HOP_BY_HOP | OURS} | {
    "expect", "content-type", "content-encoding", "http2-settings", "date", "location", "content-location",
    "server",
}  # fmt: skip
NAME = TOKEN.filter(lambda name: name.lower() not in MEANT and not name.lower().startswith("x-mesh-"))
FIELDS = st.lists(st.tuples(NAME.map(str.encode), VALUE), max_size=12)


def lines(fields: list[tuple[bytes, bytes]]) -> bytes:
    return b"".join(name + b": " + value + b"\r\n" for name, value in fields)


@pytest.fixture(scope="module")
def one_client(echoing) -> Iterator[Client]:
    node, _ = echoing
    with Client(node.host, node.port) as client:
        yield client


MODERATE = settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@MODERATE
@given(
    FIELDS, st.text(string.ascii_letters + "/?&=%+;,@!$'()*:~._-[]{}|\\^`\"<>", max_size=30), st.booleans()
)
def test_any_fields_and_query_arrive_in_order_in_number_and_unchanged(
    echoing, one_client, fields, query, chunks
):
    """All examples over one connection on each side: an example that left a byte behind breaks the next."""
    _, upstream = echoing
    upstream.forget()
    upstream.script = Script(echo)
    framing, body = (
        (b"transfer-encoding: chunked\r\n", chunked(BODY, [3, 5]))
        if chunks
        else (b"content-length: %d\r\n" % len(BODY), BODY)
    )
    target = b"/v1/completions?" + query.encode()
    one_client.send(
        b"POST " + target + b" HTTP/1.1\r\nhost: h\r\n" + JSON + lines(fields) + framing + b"\r\n" + body
    )
    answer = one_client.read()
    assert answer.status == 200 and not one_client.has_more
    seen = upstream.take()
    assert (seen.target, seen.body) == (target, BODY)
    arrived = [field for field in raw_fields(seen.head) if field[0].lower() not in OURS]
    assert arrived == [(b"content-type", b"application/json"), *fields]


def raw_fields(head: bytes) -> list[tuple[bytes, bytes]]:
    return [tuple(line.split(b": ", 1)) for line in head.split(b"\r\n")[1:-2]]  # type: ignore[misc]


@MODERATE
@given(
    FIELDS,
    st.integers(200, 599).filter(lambda status: status not in (204, 304)),
    st.text(string.printable[:95], max_size=30),
    st.binary(max_size=300),
    st.booleans(),
    st.integers(1, 200),
)
def test_any_answer_comes_back_in_order_in_number_and_unchanged(
    echoing, one_client, fields, status, reason, body, chunks, pieces
):
    _, upstream = echoing
    framing, framed = (
        (b"transfer-encoding: chunked\r\n", chunked(body, [7, 1]))
        if chunks
        else (b"content-length: %d\r\n" % len(body), body)
    )
    reply = b"HTTP/1.1 %d %b\r\n" % (status, reason.encode()) + lines(fields) + framing + b"\r\n" + framed
    upstream.script = Script(reply, pieces=pieces)
    one_client.send(post(b"/v1/completions", BODY))
    answer = one_client.read()
    assert (answer.status, answer.reason, answer.body) == (status, reason.encode(), body)
    assert not one_client.has_more
    ours = {b"date", b"x-request-id", b"content-length", b"transfer-encoding"}
    assert [field for field in answer.fields if field[0] not in ours] == [(n.lower(), v) for n, v in fields]
    upstream.take()


EVENTS = (
    b"".join(b'data: {"choices":[{"text":"w%d"}]}\n\n' % i for i in range(4)) + b": c\n\ndata: [DONE]\n\n"
)


def test_stream_cut_at_every_byte_offset_arrives_byte_identical(echoing):
    """The upstream writes the stream in two pieces, cut at each offset, chunk lines included."""
    node, upstream = echoing
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    events = EVENTS.split(b"\n\n")[:-1]
    reply = head + b"".join(b"%x\r\n%b\n\n\r\n" % (len(event) + 2, event) for event in events) + b"0\r\n\r\n"
    body = b'{"model":"m1","prompt":"a","stream":true}'
    with Client(node.host, node.port) as client:
        for cut in range(1, len(reply)):
            upstream.script = Script(reply, pieces=cut)
            client.send(post(b"/v1/completions", body))
            answer = client.read()
            assert answer.body == EVENTS, cut
            upstream.take()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a b c"}]}),
        ("/v1/completions", {"prompt": "a b c"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a b c"}], "max_tokens": 9}),
        ("/v1/responses", {"input": "a b c", "store": False}),
        ("/generate", {"text": "a b c"}),
    ],
)
def test_streams_of_every_endpoint_are_the_same_however_the_upstream_writes(node, clean_backends, path, body):
    request = json.dumps({"model": "m1", "stream": True, **body}).encode()
    head = JSON + b"x-request-id: same\r\n"
    whole: set[bytes] = set()
    with Client(node.host, node.port, timeout=30) as client:
        for split in (0, 1, 2, 3, 5, 7, 11, 64, 1000):
            fields = head + (b"x-backend-fault: split=%d\r\n" % split if split else b"")
            client.send(post(path.encode(), request, fields))
            answer = client.read()
            assert answer.status == 200
            whole.add(without_time(answer.body))
    assert len(whole) == 1


def without_time(stream: bytes) -> bytes:
    """Drop what differs between two runs of the same request: ids and times."""
    stream = re.sub(rb'"(created|created_at|completed_at|e2e_latency)":[0-9.]+', b"", stream)
    return re.sub(rb'"(id|item_id|response_id)":"[^"]*"', b"", stream)


def test_everything_meshd_says_itself_is_read_by_h11(node):
    """Endpoints, routes and errors over one connection, with GET, HEAD and POST."""
    asked = [
        ("GET", "/health"), ("HEAD", "/health"), ("GET", "/liveness"), ("GET", "/readiness"),
        ("GET", "/v1/models"), ("HEAD", "/v1/models"), ("GET", "/workers"), ("GET", "/workers/none"),
        ("GET", "/nothing"), ("HEAD", "/nothing"), ("OPTIONS", "*"), ("DELETE", "/v1/messages"),
        ("FROB", "/v1/chat/completions"), ("PUT", "/workers"), ("OPTIONS", "/v1/completions"),
    ]  # fmt: skip
    with Client(node.host, node.port) as client:
        for method, path in asked * 2:
            client.send(f"{method} {path} HTTP/1.1\r\nhost: h\r\n\r\n".encode())
            answer = client.read(method)
            assert not client.has_more
            assert answer.value("x-request-id") and answer.value("date")
            assert answer.value("connection") is None
            if method == "HEAD":
                assert answer.body == b""
            elif answer.value("content-type") == "application/json":
                answer.json()
