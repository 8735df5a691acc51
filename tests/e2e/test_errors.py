"""Every error that meshd makes: its shape on each path, its advice, and what it never tells."""

from __future__ import annotations

import json
import re

import pytest

from tests.fakes.node import Backend, running, wait_until

CHAT = ("/v1/chat/completions", {"model": "m1", "messages": [{"role": "user", "content": "a"}]})
MESSAGES = ("/v1/messages", {"model": "m1", "max_tokens": 9, "messages": [{"role": "user", "content": "a"}]})
ADDRESS = re.compile(rb"\d+\.\d+\.\d+\.\d+|localhost|:\d{4,5}")


def fault(node, spec: str, request=CHAT):
    path, body = request
    return node.request("POST", path, body, {"x-backend-fault": spec})


@pytest.mark.parametrize(
    ("change", "status", "code"),
    [({"messages": []}, 400, "invalid_request"), ({"model": "nope"}, 404, "model_not_found")],
)
def test_same_failure_has_the_same_status_and_code_in_two_shapes(node, change, status, code):
    answers = []
    for path, body in (CHAT, MESSAGES):
        got, headers, data = node.request("POST", path, {**body, **change})
        assert (got, headers["x-mesh-error-code"]) == (status, code)
        answers.append(json.loads(data))
    chat, messages = answers
    assert list(chat["error"]) == ["message", "type", "param", "code"] and chat["error"]["code"] == code
    assert list(messages) == ["type", "error", "request_id"] and messages["type"] == "error"
    assert messages["error"]["type"] == chat["error"]["type"]


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
def test_405_on_messages_paths_has_the_messages_shape(node, method):
    status, headers, data = node.request(method, "/v1/messages")
    answer = json.loads(data)
    assert status == 405 and headers["allow"] == "POST"
    assert answer["error"]["type"] == "invalid_request_error"
    assert answer["request_id"] == headers["x-request-id"]


@pytest.mark.parametrize("status", [400, 422, 429, 500, 529])
def test_error_of_an_upstream_passes_with_status_headers_and_body(node, backends, status):
    got, headers, data = fault(node, f"status={status},retry-after=1")
    assert got == status
    assert headers["retry-after"] == "1" and headers["server"] == "meshd-backend"
    assert "x-mesh-error-code" not in headers
    direct = backends[0].url
    import urllib.error
    import urllib.request

    request = urllib.request.Request(
        direct + CHAT[0],
        json.dumps(CHAT[1]).encode(),
        {"content-type": "application/json", "x-backend-fault": f"status={status},retry-after=1"},
    )
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request)
    assert caught.value.read() == data


@pytest.mark.parametrize(
    ("spec", "status", "code"),
    [
        ("close", 502, "upstream_connection_failed"),
        ("reset", 502, "upstream_connection_failed"),
        ("malformed-head", 502, "upstream_protocol_error"),
    ],
)
def test_failed_upstream_is_502_and_its_address_is_told_to_nobody(node, spec, status, code):
    got, headers, data = fault(node, spec)
    assert (got, json.loads(data)["error"]["code"]) == (status, code)
    assert not ADDRESS.search(data)
    assert not any(ADDRESS.search(value.encode()) for name, value in headers.items() if name != "date")


def test_timers_are_504_and_refusals_502():
    backend = Backend("--model", "m1")
    try:
        flags = ("--io-processes", "1", "--prepare-workers", "1", "--first-byte-timeout-secs", "0.4")
        with running(*flags, backends=[backend]) as node:
            wait_until(lambda: node.request("GET", "/readiness")[0] == 200, "ready")
            status, _, data = fault(node, "delay-head-ms=5000")
            assert (status, json.loads(data)["error"]["code"]) == (504, "upstream_timeout")
            assert not ADDRESS.search(data)
    finally:
        backend.stop()


@pytest.mark.parametrize("name", ["\x01" * 10_000, 'quotes " and \n newlines \u2028', "é" * 3000])
def test_absurd_model_names_break_neither_message_nor_header_nor_log(node, name):
    path, body = CHAT
    status, headers, data = node.request("POST", path, {**body, "model": name})
    assert status in (400, 404), data  # some thousand bytes are no name any more
    message = json.loads(data)["error"]["message"]
    assert len(message.encode()) < 1000
    assert not any(ord(character) < 32 for character in message)

    def lines() -> list[dict]:
        return [line for line in node.access_lines() if line["request_id"] == headers["x-request-id"]]

    wait_until(lines, "the access line is one line of JSON")
    assert len(lines()[0].get("model", "").encode()) <= 128


PREFIXES = {
    "/v1/chat/completions": "chatcmpl-",
    "/v1/completions": "cmpl-",
    "/generate": "gnt-",
    "/v1/messages": "msg-",
    "/v1/messages/count_tokens": "msg-",
    "/v1/responses": "resp-",
    "/v1/responses/resp_1": "resp-",
    "/v1/embeddings": "req-",
    "/nothing": "req-",
    "/health": "req-",
}


@pytest.mark.parametrize("path", PREFIXES)
def test_every_answer_carries_a_request_id_with_the_prefix_of_its_endpoint(node, path):
    is_get = path in ("/v1/responses/resp_1", "/health")
    status, headers, _ = node.request("GET" if is_get else "POST", path, None if is_get else b"{")
    assert status in (200, 400, 404)
    assert re.fullmatch(re.escape(PREFIXES[path]) + "[A-Za-z0-9]{24}", headers["x-request-id"])


@pytest.mark.parametrize("value", ["x" * 257, "caf\xe9", "a\tb"])
def test_request_id_that_cannot_be_printed_or_is_too_long_is_replaced(node, value):
    _, headers, _ = node.request("POST", *CHAT, {"x-request-id": value})
    assert headers["x-request-id"].startswith("chatcmpl-")


def test_all_429_and_503_of_ours_say_when_to_come_back():
    with running("--io-processes", "1", "--prepare-workers", "1") as node:
        for path, body in (CHAT, MESSAGES):
            status, headers, data = node.request("POST", path, body)
            assert status == 503 and int(headers["retry-after"]) >= 1
            assert json.loads(data)["error"]["type"] == "api_error"
        status, headers, _ = node.request("GET", "/v1/models")
        assert (status, headers["x-mesh-error-code"]) == (503, "no_workers")
        assert int(headers["retry-after"]) >= 1
