"""Bad input gets a clear JSON error, and the connection stays usable where its framing allows."""

from __future__ import annotations

import json
import socket

import pytest

from tests.fakes.node import Backend, running, wait_until

JSON = b"content-type: application/json\r\n"


def post(path: bytes, body: bytes, fields: bytes = JSON) -> bytes:
    return b"POST %b HTTP/1.1\r\nhost: h\r\n%bcontent-length: %d\r\n\r\n%b" % (path, fields, len(body), body)


def read_answer(client: socket.socket) -> tuple[int, dict[str, str], bytes]:
    data = b""
    while b"\r\n\r\n" not in data:
        piece = client.recv(65536)
        assert piece, data
        data += piece
    head, _, body = data.partition(b"\r\n\r\n")
    lines = head.decode("latin-1").split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines[1:])
    while len(body) < int(headers.get("content-length", 0)):
        piece = client.recv(65536)
        assert piece
        body += piece
    return int(lines[0].split()[1]), headers, body


KEPT = [
    ("malformed JSON", post(b"/v1/completions", b'{"prompt": '), 400, "invalid_request"),
    ("not an object", post(b"/v1/completions", b"[1]"), 400, "invalid_request"),
    ("empty body", post(b"/v1/completions", b""), 400, "invalid_request"),
    ("missing prompt", post(b"/v1/completions", b'{"model":"m1"}'), 400, "invalid_request"),
    ("missing messages", post(b"/v1/chat/completions", b'{"model":"m1"}'), 400, "invalid_request"),
    ("lone surrogate", post(b"/v1/completions", b'{"prompt":"\\ud800"}'), 400, "invalid_request"),
    ("NaN", post(b"/v1/completions", b'{"prompt":"a","x":NaN}'), 400, "invalid_request"),
    (
        "stream not boolean",
        post(b"/v1/completions", b'{"prompt":"a","stream":"true"}'),
        400,
        "invalid_request",
    ),
    (
        "wrong content type",
        post(b"/v1/completions", b"{}", b"content-type: text/plain\r\n"),
        415,
        "unsupported_content_type",
    ),
    ("no content type", post(b"/v1/completions", b"{}", b""), 415, "unsupported_content_type"),
    (
        "compressed",
        post(b"/v1/completions", b"{}", JSON + b"content-encoding: gzip\r\n"),
        415,
        "unsupported_encoding",
    ),
    ("unknown path", post(b"/v1/nothing", b"{}"), 404, "not_found"),
    ("trailing slash", post(b"/v1/completions/", b"{}"), 404, "not_found"),
    ("wrong method", b"GET /v1/completions HTTP/1.1\r\nhost: h\r\n\r\n", 405, "method_not_allowed"),
    ("lower-case method", b"post /v1/completions HTTP/1.1\r\nhost: h\r\n\r\n", 405, "method_not_allowed"),
    ("wrong method on a route", b"DELETE /health HTTP/1.1\r\nhost: h\r\n\r\n", 405, "method_not_allowed"),
    ("unknown model", post(b"/v1/completions", b'{"model":"nope","prompt":"a"}'), 404, "model_not_found"),
]


@pytest.mark.parametrize("row", KEPT, ids=[row[0] for row in KEPT])
def test_refused_request_leaves_the_connection_usable(node, row):
    _, wire, status, code = row
    with node.connect() as client:
        for _ in range(2):
            client.sendall(wire)
            got, headers, body = read_answer(client)
            assert (got, headers["x-mesh-error-code"]) == (status, code), body
            error = json.loads(body)["error"]
            assert error["code"] == code and error["message"]
            assert headers["x-request-id"]
            assert "connection" not in headers
        client.sendall(post(b"/v1/completions", b'{"model":"m1","prompt":"ok"}'))
        assert read_answer(client)[0] == 200


def test_405_names_the_methods_that_are_allowed(node):
    _, headers, _ = node.request("GET", "/v1/messages")
    assert headers["allow"] == "POST"


def test_messages_errors_have_the_messages_envelope(node):
    status, headers, body = node.request("POST", "/v1/messages", {"model": "m1", "messages": []})
    answer = json.loads(body)
    assert status == 400
    assert answer["type"] == "error"
    assert answer["error"]["type"] == "invalid_request_error"
    assert answer["request_id"] == headers["x-request-id"]


@pytest.mark.parametrize(
    "wire",
    [
        b"POST /v1/completions HTTP/1.1\r\nhost: h\r\ncontent-length: 3\r\n"
        b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"GET /health HTTP/1.1\r\nhost: h\r\ncontent-length: 3\r\n"
        b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"GET /health HTTP/1.1\nhost: h\n\n",
        b"NONSENSE\r\n\r\n",
    ],
)
def test_ambiguous_framing_is_400_and_close_and_nothing_behind_it_is_served(node, wire):
    with node.connect() as client:
        client.sendall(wire + b"GET /health HTTP/1.1\r\nhost: h\r\n\r\n")
        status, headers, body = read_answer(client)
        assert status == 400
        assert headers["connection"] == "close"
        assert json.loads(body)["error"]["code"] == "malformed_request"
        assert client.recv(65536) == b""


def test_body_over_the_limit_is_413_before_it_is_read():
    backend = Backend("--model", "m1")
    try:
        with running("--max-payload-size", "100000", "--io-processes", "1", backends=[backend]) as node:
            wait_until(lambda: node.request("GET", "/readiness")[0] == 200, "not ready")
            with node.connect() as client:
                client.sendall(
                    b"POST /v1/completions HTTP/1.1\r\nhost: h\r\n"
                    + JSON
                    + b"content-length: 600000000\r\n\r\n"
                )
                status, headers, _ = read_answer(client)
                assert (status, headers["x-mesh-error-code"]) == (413, "body_too_large")
                assert headers["connection"] == "close"
            with node.connect() as client:
                client.sendall(
                    b"POST /v1/completions HTTP/1.1\r\nhost: h\r\n"
                    + JSON
                    + b"transfer-encoding: chunked\r\n\r\n"
                )
                client.sendall(b"20000\r\n" + b"x" * 0x20000 + b"\r\n")
                assert read_answer(client)[0] == 413
            exact = b'{"prompt":"%b"}' % (b"x" * (100000 - 13))
            assert node.request("POST", "/v1/completions", exact)[0] == 200
    finally:
        backend.stop()


def test_without_an_upstream_the_answer_is_503_with_retry_after():
    with running("--io-processes", "1", "--prepare-workers", "1") as node:
        status, headers, body = node.request("POST", "/v1/completions", {"model": "m1", "prompt": "a"})
        assert status == 503
        assert json.loads(body)["error"]["code"] == "no_workers"
        assert int(headers["retry-after"]) >= 1
        assert node.request("GET", "/readiness")[0] == 503
        assert node.request("GET", "/liveness")[0] == 200


def test_refused_upstream_is_502_without_its_address():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    flags = ("--io-processes", "1", "--prepare-workers", "1", "--disable-health-check", "--worker-urls", url)
    with running(*flags) as node:
        status, _, body = node.request("POST", "/v1/completions", {"prompt": "a"})
        assert status == 502
        assert json.loads(body)["error"]["code"] == "upstream_connection_failed"
        assert b"127.0.0.1" not in body


def fault(node, spec: str, body: dict | None = None, path: str = "/v1/completions"):
    return node.request("POST", path, body or {"model": "m1", "prompt": "a"}, {"x-backend-fault": spec})


def test_upstream_that_ends_before_the_head_is_502(node):
    for spec in ("close", "reset"):
        status, _, body = fault(node, spec)
        assert (status, json.loads(body)["error"]["code"]) == (502, "upstream_connection_failed")


def test_upstream_that_sends_no_http_is_502(node):
    status, _, body = fault(node, "malformed-head")
    assert (status, json.loads(body)["error"]["code"]) == (502, "upstream_protocol_error")


def test_error_of_the_upstream_passes_unchanged(node):
    status, headers, body = fault(node, "status=429,retry-after=1")
    assert (status, headers["retry-after"]) == (429, "1")
    assert "x-mesh-error-code" not in headers
    assert json.loads(body)


def test_cut_plain_response_is_visibly_truncated(node):
    import http.client

    with pytest.raises((http.client.IncompleteRead, ConnectionResetError)):
        fault(node, "cut=20")


STREAMS = [
    ("/v1/completions", {"model": "m1", "prompt": "a b c d e f", "stream": True}),
    (
        "/v1/chat/completions",
        {"model": "m1", "stream": True, "messages": [{"role": "user", "content": "a b c"}]},
    ),
    (
        "/v1/messages",
        {"model": "m1", "max_tokens": 9, "stream": True, "messages": [{"role": "user", "content": "a b"}]},
    ),
    ("/v1/responses", {"model": "m1", "input": "a b c", "stream": True, "store": False}),
]


@pytest.mark.parametrize(("path", "body"), STREAMS)
@pytest.mark.parametrize("spec", ["cut=200", "cut=333", "reset-at=250", "no-done"])
def test_broken_stream_gets_one_error_event_and_no_success_marker(node, path, body, spec):
    status, _, stream = fault(node, spec, body, path)
    assert status == 200
    events = [e for e in stream.split(b"\n\n") if e]
    payloads = [
        json.loads(line[6:])
        for event in events
        for line in event.split(b"\n")
        if line.startswith(b"data: ") and line != b"data: [DONE]"
    ]
    last = payloads[-1]
    assert last.get("error") or last["type"] == "error"
    assert sum(1 for p in payloads if p.get("error") or p.get("type") == "error") == 1
    assert b"[DONE]" not in stream
    assert not {"message_stop", "response.completed"} & {p.get("type") for p in payloads}
