"""Every endpoint through a real node: answers, streams, and the client's own bytes at the upstream."""

from __future__ import annotations

import base64
import json

import pytest

PLAIN = {
    "/v1/chat/completions": {"model": "m1", "messages": [{"role": "user", "content": "Name a river"}]},
    "/v1/completions": {"model": "m1", "prompt": "Name a river"},
    "/v1/messages": {
        "model": "m1",
        "max_tokens": 50,
        "messages": [{"role": "user", "content": "Name a river"}],
    },
    "/v1/responses": {"model": "m1", "input": "Name a river", "store": False},
    "/generate": {"text": "Name a river"},
    "/v1/embeddings": {"model": "m1", "input": "Name a river"},
}
TEXT = "This is a deterministic answer to: Name a river"


def text_of(path: str, answer: dict) -> str:
    if path == "/v1/chat/completions":
        return answer["choices"][0]["message"]["content"]
    if path == "/v1/completions":
        return answer["choices"][0]["text"]
    if path == "/v1/messages":
        return answer["content"][0]["text"]
    if path == "/v1/responses":
        return answer["output"][0]["content"][0]["text"]
    return answer["text"]


@pytest.mark.parametrize("path", PLAIN)
def test_plain_request_is_answered_by_an_upstream(node, path):
    status, headers, body = node.request("POST", path, PLAIN[path])
    assert status == 200, body
    assert headers["x-request-id"]
    answer = json.loads(body)
    if path == "/v1/embeddings":
        assert len(answer["data"][0]["embedding"]) == 16
    else:
        assert text_of(path, answer) == TEXT


@pytest.mark.parametrize("path", [p for p in PLAIN if p != "/v1/embeddings"])
def test_stream_reaches_the_client_whole(node, path):
    status, headers, body = node.request("POST", path, {**PLAIN[path], "stream": True})
    assert status == 200
    assert headers["content-type"].startswith("text/event-stream")
    assert b"river" in body
    end = {"/v1/messages": b"message_stop", "/v1/responses": b"response.completed"}.get(path, b"data: [DONE]")
    assert end in body


def test_upstream_gets_the_clients_own_bytes(node, clean_backends):
    body = (
        b' { "model" : "m1", "prompt":"Name a river" , "user":"u-1",\n'
        b'"big":' + b"1" * 40 + b', "unknown":{"a":[1,2.50]}, "prompt":"Name a river"}\n'
    )
    sent = {
        "X-Custom": "one",
        "Cookie": "a=b; c=d",
        "Authorization": "Bearer k",
    }
    status, _, answer = node.request("POST", "/v1/completions?beta=true&x=%2F", body, sent)
    assert status == 200, answer
    seen = [r for backend in clean_backends for r in backend.requests() if r["target"].startswith("/v1/c")]
    assert len(seen) == 1
    assert base64.b64decode(seen[0]["body"]) == body
    assert seen[0]["target"] == "/v1/completions?beta=true&x=%2F"
    headers = {name.lower(): value for name, value in seen[0]["headers"]}
    assert headers["x-custom"] == "one"
    assert headers["cookie"] == "a=b; c=d"
    assert headers["authorization"] == "Bearer k"
    assert headers["content-length"] == str(len(body))
    names = [name.lower() for name, _ in seen[0]["headers"]]
    assert names.count("host") == names.count("content-length") == names.count("x-request-id") == 1


def test_chunked_body_reaches_the_upstream_whole(node, clean_backends):
    body = json.dumps({"model": "m1", "prompt": "word " * 60000}).encode()
    with node.connect() as client:
        client.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: h\r\ncontent-type: application/json\r\n"
            b"connection: close\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        for at in range(0, len(body), 7000):
            piece = body[at : at + 7000]
            client.sendall(b"%x\r\n%b\r\n" % (len(piece), piece))
        client.sendall(b"0\r\nauthorization: trailer\r\n\r\n")
        answer = b""
        while data := client.recv(65536):
            answer += data
    assert answer.startswith(b"HTTP/1.1 200"), answer[:500]
    seen = [r for backend in clean_backends for r in backend.requests() if r["target"] == "/v1/completions"]
    assert base64.b64decode(seen[0]["body"]) == body
    assert "authorization" not in {name.lower() for name, _ in seen[0]["headers"]}


def test_models_lists_what_upstreams_serve(node):
    status, _, body = node.request("GET", "/v1/models")
    assert status == 200
    assert [row["id"] for row in json.loads(body)["data"]] == ["m1"]


@pytest.mark.parametrize(
    ("path", "status_word"),
    [("/health", "ok"), ("/liveness", "ok"), ("/readiness", "ready"), ("/livez", "ok"), ("/readyz", "ready")],
)
def test_health_routes_answer(node, path, status_word):
    status, headers, body = node.request("GET", path)
    assert status == 200
    assert json.loads(body)["status"] == status_word
    assert headers["cache-control"] == "no-store"
    status, headers, body = node.request("HEAD", path)
    assert (status, body) == (200, b"")


def test_workers_are_listed_by_the_controller(node, backends):
    status, _, body = node.request("GET", "/workers")
    assert status == 200
    assert {row["url"] for row in json.loads(body)["workers"]} == {backend.url for backend in backends}


def test_request_id_of_the_client_comes_back(node):
    for name in ("x-request-id", "x-correlation-id"):
        _, headers, _ = node.request("POST", "/v1/completions", PLAIN["/v1/completions"], {name: "abc-1"})
        assert headers["x-request-id"] == "abc-1"
    _, headers, _ = node.request("POST", "/v1/completions", PLAIN["/v1/completions"])
    assert headers["x-request-id"].startswith("cmpl-") and len(headers["x-request-id"]) == 29


def test_ten_pipelined_requests_are_answered_in_order(node):
    one = json.dumps({"model": "m1", "prompt": "p%d"})
    wire = b""
    for number in range(10):
        body = (one % number).encode()
        wire += (
            b"POST /v1/completions HTTP/1.1\r\nhost: h\r\ncontent-type: application/json\r\n"
            b"x-backend-fault: delay-head-ms=%d\r\ncontent-length: %d\r\n\r\n%b"
            % (20 * (10 - number), len(body), body)
        )
    with node.connect() as client:
        client.sendall(wire)
        client.settimeout(20)
        answer = b""
        while answer.count(b"HTTP/1.1 200") < 10 or b" p9" not in answer:
            data = client.recv(65536)
            assert data
            answer += data
    places = [answer.index(b"answer to: p%d" % number) for number in range(10)]
    assert places == sorted(places)
