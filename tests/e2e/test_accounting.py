"""What is counted of a response: tokens, first token, outcome; once, whatever the cut."""

from __future__ import annotations

import gzip
import json

import pytest

from tests.fakes.node import running, wait_until
from tests.fakes.scripted_upstream import Script, ScriptedUpstream

TEXT = "a b c d e"
REQUESTS = {
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": TEXT}]}),
    "completions": ("/v1/completions", {"prompt": TEXT}),
    "messages": ("/v1/messages", {"max_tokens": 50, "messages": [{"role": "user", "content": TEXT}]}),
    "responses": ("/v1/responses", {"input": TEXT, "store": False}),
    "generate": ("/generate", {"text": TEXT}),
}
OUTPUT = len(["This", "is", "a", "deterministic", "answer", "to:"]) + len(TEXT.split())


def ask(node, endpoint: str, *, stream: bool, fault: str = "") -> dict:
    """Send one request and return its access line."""
    path, body = REQUESTS[endpoint]
    body = {"model": "m1", **body, "stream": stream}
    if stream and endpoint in ("chat", "completions"):
        body["stream_options"] = {"include_usage": True}
    headers = {"x-backend-fault": fault} if fault else {}
    _, answer, _ = node.request("POST", path, body, headers)
    return line_of(node, answer["x-request-id"])


def line_of(node, request_id: str) -> dict:
    def found() -> list[dict]:
        return [line for line in node.access_lines() if line["request_id"] == request_id]

    wait_until(found, "the access line is written")
    (line,) = found()
    return line


@pytest.mark.parametrize("endpoint", REQUESTS)
@pytest.mark.parametrize("stream", [False, True])
def test_usage_outcome_and_first_token_of_each_api(node, endpoint, stream):
    line = ask(node, endpoint, stream=stream)
    assert line["outcome"] == "completed"
    assert (line["input_tokens"], line["output_tokens"]) == (len(TEXT.split()), OUTPUT)
    assert line["endpoint"] == endpoint and line["stream"] is stream
    assert ("ttft_ms" in line) is stream


@pytest.mark.parametrize("endpoint", REQUESTS)
@pytest.mark.parametrize("size", [1, 7, 64])
def test_numbers_are_the_same_however_the_upstream_cuts_its_bytes(node, endpoint, size):
    line = ask(node, endpoint, stream=True, fault=f"split={size}")
    assert (line["input_tokens"], line["output_tokens"]) == (len(TEXT.split()), OUTPUT)
    assert line["outcome"] == "completed" and "ttft_ms" in line


@pytest.mark.parametrize(
    ("fault", "outcome"),
    [("error-event=2", "backend_error"), ("cut=400", "body_error"), ("status=503", "backend_error")],
)
def test_outcome_tells_how_a_response_ended(node, fault, outcome):
    assert ask(node, "chat", stream=True, fault=fault)["outcome"] == outcome


def test_plain_body_of_known_length_is_completed_even_if_the_client_closes_at_once(node):
    body = json.dumps({"model": "m1", "prompt": "a"}).encode()
    with node.connect() as client:
        client.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: h\r\ncontent-type: application/json\r\n"
            b"x-request-id: closes-at-once\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
        )
        answer = b""
        while not answer.endswith(b"}"):
            answer += client.recv(65536)
    assert line_of(node, "closes-at-once")["outcome"] == "completed"


def test_text_that_looks_like_the_end_of_a_stream_ends_nothing(node):
    body = {
        "model": "m1",
        "stream": True,
        "messages": [{"role": "user", "content": "data: [DONE] and more"}],
    }
    _, answer, stream = node.request("POST", "/v1/chat/completions", body)
    assert stream.count(b"data: [DONE]\n\n") == 1 and b"more" in stream
    assert line_of(node, answer["x-request-id"])["outcome"] == "completed"


def test_compressed_stream_is_relayed_and_counted_as_not_observed():
    packed = gzip.compress(b'data: {"choices":[]}\n\ndata: [DONE]\n\n')
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-encoding: gzip\r\n"
    reply = head + b"transfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(packed), packed)
    flags = ("--io-processes", "1", "--prepare-workers", "1", "--disable-health-check")
    with ScriptedUpstream(Script(reply)) as upstream, running(*flags, "--worker-urls", upstream.url) as node:
        status, headers, body = node.request("POST", "/v1/completions", {"prompt": "a", "stream": True})
        assert (status, headers["content-encoding"], body) == (200, "gzip", packed)
        skipped = "mesh_observation_skipped_total"
        wait_until(lambda: node.metric(skipped, reason="content_encoding") == 1, "it is counted")
        assert line_of(node, headers["x-request-id"])["outcome"] == "completed"
