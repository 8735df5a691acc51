"""What clients see of responses that break after their head: never a success, always a visible break.

Cuts at every byte and the success markers of each API are in tests/io/test_relay.py; here are timers, sockets
and counters of a whole node.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import time
from collections.abc import Iterator

import pytest

from tests.fakes.node import Node, running, wait_until
from tests.fakes.scripted_upstream import Script, ScriptedUpstream

BODIES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "stream": True},
    "/v1/completions": {"prompt": "a", "stream": True},
    "/v1/messages": {"max_tokens": 9, "messages": [{"role": "user", "content": "a"}], "stream": True},
    "/v1/responses": {"input": "a", "store": False, "stream": True},
}
SSE = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
EVENT = b'data: {"sequence_number":41,"text":"x"}\n\n'
MARKERS = (b"[DONE]", b"message_stop", b"response.completed")
FLAGS = (
    "--io-processes", "1", "--prepare-workers", "1", "--disable-health-check", "--disable-circuit-breaker",
    "--stream-idle-timeout-secs", "0.5", "--request-timeout-secs", "1", "--worker-urls",
)  # fmt: skip


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


@pytest.fixture(scope="module")
def scene() -> Iterator[tuple[Node, ScriptedUpstream]]:
    with ScriptedUpstream(Script(b"")) as upstream, running(*FLAGS, upstream.url) as node:
        wait_until(lambda: node.request("GET", "/readiness")[0] == 200, "not ready")
        yield node, upstream


def ask(node: Node, path: str = "/v1/chat/completions") -> tuple[int, bytes]:
    status, _, body = node.request("POST", path, {"model": "m1", **BODIES[path]})
    return status, body


def error_of(path: str, body: bytes) -> dict[str, object]:
    """Return the error in the last event, in whatever form its API gives it."""
    last = body.split(b"\n\n")[-2]
    payload = json.loads(last.split(b"data: ", 1)[1])
    if path == "/v1/responses":
        assert last.startswith(b"event: error\n") and payload["type"] == "error"
        return payload
    if path == "/v1/messages":
        assert last.startswith(b"event: error\n") and payload["type"] == "error"
    return payload["error"]


def trickle(pieces: list[bytes], pause_s: float) -> Iterator[bytes]:
    for piece in pieces:
        yield piece
        time.sleep(pause_s)


@pytest.mark.parametrize("path", BODIES)
def test_silent_stream_ends_with_the_error_event_of_its_api_and_no_success_marker(scene, path):
    node, upstream = scene
    failures = node.metric("mesh_stream_failures_total", reason="idle")
    upstream.script = Script(lambda seen: trickle([SSE + chunk(EVENT) + chunk(b'data: {"half'), b""], 2))
    status, body = ask(node, path)
    assert status == 200 and body.startswith(EVENT) and b"half" not in body
    assert not any(marker in body for marker in MARKERS)
    for event in body.split(b"\n\n")[:-1]:
        json.loads(event.split(b"data: ", 1)[1])
    error = error_of(path, body)
    if path == "/v1/responses":
        assert (error["code"], error["sequence_number"]) == ("upstream_timeout", 42)
    elif path != "/v1/messages":
        assert error["code"] == "upstream_timeout"
    wait_until(
        lambda: node.metric("mesh_stream_failures_total", reason="idle") == failures + 1, "it is not counted"
    )


@pytest.mark.parametrize("ending", ["reset", "close"])
def test_cut_stream_ends_with_an_error_event_and_a_closed_connection(scene, ending):
    node, upstream = scene
    upstream.script = Script(SSE + chunk(EVENT) + chunk(EVENT[:10]), ending)
    connection = http.client.HTTPConnection(node.host, node.port, timeout=10)
    with contextlib.closing(connection):
        body = json.dumps({"model": "m1", **BODIES["/v1/chat/completions"]})
        connection.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
        answer = connection.getresponse()
        body = answer.read()  # its framing is whole
        error = error_of("/v1/chat/completions", body)
        assert body.startswith(EVENT) and error["code"] == "upstream_connection_failed"
        assert connection.sock is None or connection.sock.recv(1) == b""


def test_clean_end_without_the_end_of_the_stream_is_an_error_event(scene):
    node, upstream = scene
    upstream.script = Script(SSE + chunk(EVENT) + b"0\r\n\r\n")
    _, body = ask(node)
    assert error_of("/v1/chat/completions", body)["code"] == "upstream_protocol_error"


def test_cut_after_the_end_of_the_stream_is_a_normal_end(scene):
    node, upstream = scene
    whole = EVENT + b"data: [DONE]\n\n"
    upstream.script = Script(SSE + chunk(whole), "reset")
    assert ask(node) == (200, whole)
    wait_until(lambda: node.access_lines()[-1]["bytes_out"] == len(whole), "no access line")
    assert node.access_lines()[-1]["outcome"] == "completed"


def test_error_event_of_the_upstream_passes_alone_with_what_follows(scene):
    node, upstream = scene
    whole = EVENT + b'data: {"error":{"message":"mine"}}\n\ndata: after\n\n'
    upstream.script = Script(SSE + chunk(whole) + b"0\r\n\r\n")
    assert ask(node) == (200, whole)
    upstream.script = Script(SSE + chunk(whole), "reset")
    assert ask(node) == (200, whole)


def test_cut_body_is_short_or_lacks_its_last_chunk(scene):
    node, upstream = scene
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
    length = head + b"content-length: 100\r\n\r\n" + b"{" * 50
    chunked = head + b"transfer-encoding: chunked\r\n\r\n" + chunk(b"{" * 50)
    for reply in (length, chunked):
        for ending in ("close", "reset"):
            upstream.script = Script(reply, ending)
            with pytest.raises((http.client.IncompleteRead, ConnectionError)):
                ask(node)


def test_request_timer_cuts_a_slow_body_and_never_a_stream_that_goes_on(scene):
    node, upstream = scene
    done = chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
    upstream.script = Script(lambda seen: trickle([SSE, *[chunk(EVENT)] * 10, done], 0.2))
    began_at = time.monotonic()
    status, body = ask(node)
    assert (status, body) == (200, EVENT * 10 + b"data: [DONE]\n\n")
    assert time.monotonic() - began_at > 1.5  # well beyond the request timer
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n"
    upstream.script = Script(lambda seen: trickle([head, *[b"{" * 10] * 10], 0.2))
    with pytest.raises((http.client.IncompleteRead, ConnectionError)):
        ask(node)


def test_broken_responses_count_against_their_upstream_and_leave_nothing(scene):
    node, upstream = scene
    wait_until(lambda: not node.held(), f"left behind: {node.held()}")
    failures = node.metric("mesh_worker_cb_outcomes_total", outcome="failure")
    upstream.script = Script(SSE + chunk(EVENT), "reset")
    for _ in range(5):
        ask(node)
    wait_until(
        lambda: node.metric("mesh_worker_cb_outcomes_total", outcome="failure") == failures + 5, "not counted"
    )
    wait_until(lambda: not node.held(), f"left behind: {node.held()}")
    assert node.metric("mesh_worker_retries_total") == 0
