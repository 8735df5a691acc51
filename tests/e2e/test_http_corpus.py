"""Every shape of tests/corpus/http, sent to a real node: status, code, connection fate, nothing behind it.

A `.http` file holds the bytes of one or more requests, the `.expect` file beside it what must come of them:
``answers`` in order, whether the ``connection`` is `kept` or `closed`, and what the ``upstream`` received;
without that, nothing may reach an upstream. Most refused shapes have a whole good request behind them that
must never be served. ``on_any_path``: the head is refused before anybody looks at the path.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.node import Backend, Node, running
from tests.fakes.wire import Answer, Client, chunked, post

CORPUS = Path(__file__).parents[1] / "corpus" / "http"
NAMES = sorted(path.stem for path in CORPUS.glob("*.http"))
PROBE = b"GET /liveness HTTP/1.1\r\nhost: h\r\n\r\n"
PATHS = ("/v1/chat/completions", "/v1/messages", "/v1/models", "/health", "/workers", "/nothing")
BODY = b'{"model":"m1","prompt":"a"}'
JSON = b"content-type: application/json\r\n"


def load(name: str) -> tuple[bytes, dict[str, Any]]:
    return (CORPUS / f"{name}.http").read_bytes(), json.loads((CORPUS / f"{name}.expect").read_text())


def on_any_path() -> list[str]:
    return [name for name in NAMES if load(name)[1].get("on_any_path")]


def received(backends: tuple[Backend, ...]) -> list[dict[str, Any]]:
    """Return the POSTs that reached an upstream since the logs were cleared."""
    return [row for backend in backends for row in backend.requests() if row["method"] == "POST"]


def check_answer(answer: Answer, expected: dict[str, Any], closes: bool) -> None:
    assert answer.status == expected["status"], answer
    assert answer.http_version == b"1.1"
    assert answer.code == expected.get("code"), answer
    assert answer.interim == expected.get("interim", [])
    assert answer.value("x-request-id")
    assert answer.value("date") and answer.value("server") and answer.value("content-type")
    assert answer.value("connection") == ("close" if closes else None)
    if "allow" in expected:
        assert answer.value("allow") == expected["allow"]
    if "request_id" in expected:
        assert answer.value("x-request-id") == expected["request_id"]
    if expected.get("method") == "HEAD":
        assert answer.body == b""
    elif "code" in expected:
        check_error_body(answer)


def check_error_body(answer: Answer) -> None:
    assert answer.value("content-type") == "application/json"
    assert answer.value("server") == "meshd"
    body = answer.json()
    if body.get("type") == "error":
        assert body["error"]["message"] and body["request_id"] == answer.value("x-request-id")
    else:
        assert body["error"]["code"] == answer.code and body["error"]["message"]


def judge(node: Node, wire: bytes, expected: dict[str, Any], piece: int = 0) -> None:
    """Send ``wire`` and compare the answers and the fate of the connection."""
    closes = expected["connection"] == "closed"
    with Client(node.host, node.port) as client:
        client.send(wire, piece)
        for index, one in enumerate(expected["answers"]):
            is_last = index == len(expected["answers"]) - 1
            check_answer(client.read(one.get("method", "POST")), one, closes and is_last)
        if closes:
            assert client.ends(), "something came behind the last answer, or the connection stays"
        else:
            client.send(PROBE)
            assert client.read("GET").status == 200
            assert not client.has_more, "an answer too many"


def check_upstream(rows: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert [row["target"] for row in rows] == [one["target"] for one in expected]
    for row, one in zip(rows, expected, strict=True):
        assert base64.b64decode(row["body"]) == one["body"].encode()
        names = {name for name, _ in row["headers"]} | {name.lower() for name, _ in row["headers"]}
        assert not names & set(one.get("absent", ())), row["headers"]
        wanted = one.get("fields", [])
        chosen = {name for name, _ in wanted}
        assert [field for field in row["headers"] if field[0] in chosen] == wanted


@pytest.mark.parametrize("name", NAMES)
def test_shape_gets_its_answers_and_nothing_more(node, clean_backends, name):
    wire, expected = load(name)
    judge(node, wire, expected)
    check_upstream(received(clean_backends), expected.get("upstream", []))


def test_shapes_are_the_same_byte_by_byte(node, clean_backends):
    wanted = 0
    for name in NAMES:
        wire, expected = load(name)
        if len(wire) < 2000 and not expected.get("whole_only"):
            judge(node, wire, expected, piece=1)
            wanted += len(expected.get("upstream", []))
    assert len(received(clean_backends)) == wanted


def test_shapes_are_the_same_in_two_pieces(node, clean_backends):
    wanted = 0
    for number, name in enumerate(NAMES):
        wire, expected = load(name)
        if not expected.get("whole_only"):
            judge(node, wire, expected, piece=1 + (number * 37) % len(wire))
            wanted += len(expected.get("upstream", []))
    assert len(received(clean_backends)) == wanted


@pytest.mark.parametrize("path", PATHS)
def test_bad_heads_are_refused_on_every_path_alike(node, clean_backends, path):
    for name in on_any_path():
        wire, expected = load(name)
        line, end, rest = wire.partition(b"host")
        judge(node, line.replace(b"/v1/completions", path.encode(), 1) + end + rest, expected)
    assert received(clean_backends) == []


def test_corpus_has_an_expectation_for_every_file():
    assert len(NAMES) > 200
    assert {path.stem for path in CORPUS.glob("*.expect")} == set(NAMES)
    assert all(b"\n" in load(name)[0] or b"\r" in load(name)[0] for name in NAMES)


# ------------------------------------------------------------------------------- shapes too big for files


def closed(status: int, code: str) -> dict[str, Any]:
    return {"answers": [{"status": status, "code": code}], "connection": "closed"}


SMUGGLED = post(b"/v1/completions", b'{"model":"m1","prompt":"smuggled"}')


def padded(line: bytes, field: bytes, size: int) -> bytes:
    """Return a head of exactly ``size`` bytes, padded in its request line or in a field."""
    rest = b"host: h\r\ncontent-length: 0\r\n"
    if not field:
        return line + b"a" * (size - len(line) - len(rest) - 13) + b" HTTP/1.1\r\n" + rest + b"\r\n"
    return (
        line
        + b" HTTP/1.1\r\n"
        + rest
        + field
        + b"a" * (size - len(line) - len(rest) - 15 - len(field))
        + b"\r\n\r\n"
    )


def test_request_line_over_the_limit_is_414(node, clean_backends):
    for prefix in (b"", b"\r\n"):
        wire = prefix + b"POST /v1/completions?" + b"a" * 65536 + b" HTTP/1.1\r\nhost: h\r\n\r\n" + SMUGGLED
        judge(node, wire, closed(414, "uri_too_long"))
        judge(node, wire, closed(414, "uri_too_long"), piece=1000)
        judge(node, wire[:66000], closed(414, "uri_too_long"))
    assert received(clean_backends) == []


def test_head_over_the_limit_is_431_and_one_of_the_limit_is_not(node, clean_backends):
    for line, field in ((b"POST /nothing", b"x: "), (b"POST /nothing?", b"")):
        wire = padded(line, field, 65536)
        assert len(wire) == 65536
        judge(node, wire, {"answers": [{"status": 404, "code": "not_found"}], "connection": "kept"})
        longer = padded(line, field, 65537) + SMUGGLED
        judge(node, longer, closed(431, "header_too_large"))
        judge(node, longer, closed(431, "header_too_large"), piece=999)
    endless = b"POST /nothing HTTP/1.1\r\nhost: h\r\n" + b"x: y\r\n" * 20000
    judge(node, endless, closed(431, "header_too_large"))
    assert received(clean_backends) == []


def test_257_fields_are_431_and_256_are_not(node, clean_backends):
    for count, is_refused in ((256, False), (257, True)):
        fields = b"host: h\r\ncontent-length: 0\r\n" + b"x: y\r\n" * (count - 2)
        wire = b"POST /nothing HTTP/1.1\r\n" + fields + b"\r\n"
        if is_refused:
            judge(node, wire + SMUGGLED, closed(431, "header_too_large"))
        else:
            judge(node, wire, {"answers": [{"status": 404, "code": "not_found"}], "connection": "kept"})
    assert received(clean_backends) == []


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"1b;" + b"e" * 1100 + b"\r\n" + BODY + b"\r\n0\r\n\r\n", id="a long size line"),
        pytest.param(b"0" * 2000, id="a size line that never ends"),
        pytest.param(b"".join(b"1;%b\r\na\r\n" % (b"e" * 900) for _ in range(1200)), id="framing over 1 MiB"),
        pytest.param(b"0\r\n" + b"x: y\r\n" * 300 + b"\r\n", id="300 trailers"),
        pytest.param(b"0\r\nx: " + b"y" * 70000 + b"\r\n\r\n", id="a trailer of 70000 bytes"),
    ],
)  # fmt: skip
def test_chunked_framing_over_its_limits_is_400(node, clean_backends, body):
    head = b"POST /v1/completions HTTP/1.1\r\nhost: h\r\n" + JSON + b"transfer-encoding: chunked\r\n\r\n"
    judge(node, head + body + SMUGGLED, closed(400, "malformed_request"))
    assert received(clean_backends) == []


def test_chunk_line_of_the_limit_passes(node, clean_backends):
    extension = b";" + b"e" * (1024 - 5)
    head = b"POST /v1/completions HTTP/1.1\r\nhost: h\r\n" + JSON + b"transfer-encoding: chunked\r\n\r\n"
    judge(node, head + chunked(BODY, [], extension), {"answers": [{"status": 200}], "connection": "kept"})
    assert len(received(clean_backends)) == 1


def test_refused_body_of_more_than_64_kib_ends_the_connection_and_is_never_parsed(node, clean_backends):
    for size in (400_000, 3 << 20):
        body = (SMUGGLED * (size // len(SMUGGLED) + 1))[:size]
        judge(node, post(b"/nothing", body), closed(404, "not_found"))
    for size in (65536, 60_000):
        body = (SMUGGLED * (size // len(SMUGGLED) + 1))[:size]
        kept = {"answers": [{"status": 404, "code": "not_found"}], "connection": "kept"}
        judge(node, post(b"/nothing", body), kept)
        judge(node, post(b"/nothing", body), kept, piece=7919)
    assert received(clean_backends) == []


def test_100_continue_comes_before_the_body_and_only_if_asked(node, clean_backends):
    head, body = post(b"/v1/completions", BODY).split(b"\r\n\r\n")
    with Client(node.host, node.port) as client:
        for _ in range(2):
            client.send(head + b"\r\nexpect: 100-continue\r\n\r\n")
            assert client.receive_exactly(25) == b"HTTP/1.1 100 Continue\r\n\r\n"
            client.send(body)
            answer = client.read()
            assert (answer.status, answer.interim) == (200, [])
            client.send(head + b"\r\n\r\n" + body)
            assert client.read().interim == []
    assert len(received(clean_backends)) == 4
    assert not any(name == "expect" for row in received(clean_backends) for name, _ in row["headers"])


@pytest.mark.parametrize(
    ("head", "status", "code"),
    [
        (b"POST /nothing HTTP/1.1\r\nhost: h\r\n", 404, "not_found"),
        (b"PUT /v1/completions HTTP/1.1\r\nhost: h\r\n", 405, "method_not_allowed"),
        (b"POST /v1/messages HTTP/1.1\r\nhost: h\r\ncontent-type: a/b\r\n", 415, "unsupported_content_type"),
    ],
)  # fmt: skip
def test_refused_expectation_gets_its_final_status_no_100_and_a_close(node, head, status, code):
    with Client(node.host, node.port) as client:
        client.send(head + b"expect: 100-continue\r\ncontent-length: 27\r\n\r\n")
        answer = client.read()
        assert (answer.status, answer.code, answer.interim) == (status, code, [])
        assert answer.value("connection") == "close"
        assert client.ends()


def test_pipelining_far_beyond_the_buffer_is_served_in_order(node, clean_backends):
    body = b'{"model":"m1","prompt":"%b"}' % (b"x" * 900)
    wire = b"".join(
        post(b"/v1/completions", body, b"content-type: application/json\r\nx-request-id: q%d\r\n" % i)
        for i in range(400)
    )
    with Client(node.host, node.port, timeout=30) as client:
        client.send_in_background(wire)
        for i in range(400):
            answer = client.read()
            assert (answer.status, answer.value("x-request-id")) == (200, f"q{i}")


def test_431_on_a_messages_path_has_the_messages_shape(node):
    with Client(node.host, node.port) as client:
        client.send(b"POST /v1/messages HTTP/1.1\r\nhost: h\r\n" + b"x: y\r\n" * 300 + b"\r\n")
        answer = client.read()
        assert (answer.status, answer.json()["type"]) == (431, "error")


def test_other_limits_are_obeyed(backends):
    flags = (
        "--io-processes",
        "1",
        "--prepare-workers",
        "1",
        "--max-header-bytes",
        "8192",
        "--max-headers",
        "16",
    )
    with running(*flags, backends=backends) as small:
        judge(small, padded(b"POST /nothing", b"x: ", 8193) + SMUGGLED, closed(431, "header_too_large"))
        kept = {"answers": [{"status": 404, "code": "not_found"}], "connection": "kept"}
        judge(small, padded(b"POST /nothing", b"x: ", 8192), kept)
        judge(small, b"GET /" + b"a" * 8192 + b" HTTP/1.1\r\n", closed(414, "uri_too_long"))
        many = b"POST /nothing HTTP/1.1\r\nhost: h\r\n" + b"x: y\r\n" * 16 + b"\r\n"
        judge(small, many + SMUGGLED, closed(431, "header_too_large"))
