"""Connections seen from raw sockets: framing, order, keep-alive, and clients that leave."""

import base64
import json
from typing import Any

import pytest

CHAT = "/v1/chat/completions"
HI = {"messages": [{"role": "user", "content": "hi"}]}


def read_one(sock: Any) -> bytes:
    """Read one answer with a length, byte-exact."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += sock.recv(1)
    length = int(data.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
    body = b""
    while len(body) < length:
        body += sock.recv(length - len(body))
    return body


def test_connection_is_kept_and_numbered(start_backend: Any, raw_request: Any) -> None:
    backend = start_backend()
    for _ in range(2):
        with backend.connect() as sock:
            for _ in range(2):
                sock.sendall(raw_request("POST", CHAT, HI))
                read_one(sock)
    numbers = [item["connection"] for item in backend.ask("GET", "/_backend/requests").json]
    assert numbers[0] == numbers[1] != numbers[2] == numbers[3]


def test_idle_connection_is_closed_after_the_keep_alive_time(
    start_backend: Any, raw_request: Any, read_all: Any
) -> None:
    backend = start_backend("--keepalive-secs", "0.05")
    with backend.connect() as sock:
        sock.sendall(raw_request("POST", CHAT, HI))
        answer = read_all(sock)
    assert answer.is_complete and answer.header("connection") is None


def test_without_keep_alive_each_answer_closes(start_backend: Any, raw_request: Any, read_all: Any) -> None:
    backend = start_backend("--keepalive-secs", "0")
    with backend.connect() as sock:
        sock.sendall(raw_request("POST", CHAT, HI))
        assert read_all(sock).header("connection") == "close"


def test_pipelined_requests_are_answered_in_order(shared_backend: Any, raw_request: Any) -> None:
    bodies = [{"text": f"number {n}"} for n in range(5)]
    slow = {"x-backend-fault": "delay-head-ms=5"}
    with shared_backend.connect() as sock:
        sock.sendall(b"".join(raw_request("POST", "/generate", body, **slow) for body in bodies))
        texts = [json.loads(read_one(sock))["text"] for _ in bodies]
    assert [text[-1] for text in texts] == ["0", "1", "2", "3", "4"]


def test_chunked_body_in_single_bytes_is_read_and_logged(start_backend: Any, read_all: Any) -> None:
    backend = start_backend()
    head = b"POST /generate HTTP/1.1\r\nHost: x\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n"
    chunks = b'6\r\n{"text\r\n5;a=b\r\n":"x"\r\n1\r\n}\r\n0\r\nx-trailer: 1\r\n\r\n'
    with backend.connect() as sock:
        for byte in head + chunks:
            sock.sendall(bytes([byte]))
        assert read_all(sock).json["text"].endswith("to: x")
    (logged,) = backend.ask("GET", "/_backend/requests").json
    assert base64.b64decode(logged["body"]) == b'{"text":"x"}'
    assert [name for name, _ in logged["headers"]] == ["Host", "connection", "transfer-encoding"]


def test_body_of_several_mebibytes_is_answered(shared_backend: Any) -> None:
    body = {"messages": [{"role": "user", "content": "word " * 800_000}]}
    assert shared_backend.post(CHAT, body).json["usage"]["prompt_tokens"] == 800_000


def test_client_that_expects_continue_gets_it_before_the_body(shared_backend: Any, read_all: Any) -> None:
    head = b"POST /generate HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 12\r\n"
    with shared_backend.connect() as sock:
        sock.sendall(head + b"connection: close\r\n\r\n")
        assert sock.recv(1000) == b"HTTP/1.1 100 Continue\r\n\r\n"
        sock.sendall(b'{"text":"x"}')
        assert read_all(sock).status == 200


def test_http_10_client_gets_a_stream_that_ends_with_the_connection(
    shared_backend: Any, read_all: Any
) -> None:
    body = b'{"text":"x","stream":true}'
    with shared_backend.connect() as sock:
        sock.sendall(b"POST /generate HTTP/1.0\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        answer = read_all(sock)
    assert not answer.is_chunked and answer.events[-1] == "[DONE]"


def test_head_request_has_no_body(shared_backend: Any) -> None:
    answer = shared_backend.ask("HEAD", "/health")
    assert answer.status == 200 and answer.wire_body == b""


@pytest.mark.parametrize("data", [b"nonsense\r\n\r\n", b"GET / HTTP/1.1\r\nbad header\r\n\r\n"])
def test_what_is_no_http_is_a_400_and_closed(shared_backend: Any, read_all: Any, data: bytes) -> None:
    with shared_backend.connect() as sock:
        sock.sendall(data)
        answer = read_all(sock)
    assert answer.status == 400 and answer.json["error"]["code"] == "malformed_request"


@pytest.mark.parametrize("fault", ["delay-head-ms=600000", "token-delay-ms=600000", "stall=0", "stall=30"])
@pytest.mark.parametrize("is_stream", [False, True])
def test_client_that_leaves_is_noticed_at_once_and_counted(
    start_backend: Any, raw_request: Any, fault: str, is_stream: bool
) -> None:
    backend = start_backend()
    with backend.connect() as sock:
        sock.sendall(raw_request("POST", CHAT, {**HI, "stream": is_stream}, **{"x-backend-fault": fault}))
        backend.wait_for(active=1)
    stats = backend.wait_for(active=0)
    assert (stats["aborted"], stats["served"], stats["max_active"]) == (1, 0, 1)


def test_many_streams_at_once_are_all_active_and_all_leave(start_backend: Any, raw_request: Any) -> None:
    backend = start_backend()
    slow = raw_request("POST", CHAT, {**HI, "stream": True}, **{"x-backend-fault": "token-delay-ms=600000"})
    socks = [backend.connect() for _ in range(100)]
    for sock in socks:
        sock.sendall(slow)
    backend.wait_for(active=100)
    for sock in socks:
        sock.close()
    stats = backend.wait_for(active=0, open_connections=1)
    assert (stats["aborted"], stats["max_active"]) == (100, 100)


def test_client_that_stops_reading_a_long_stream_does_not_hinder_others(
    start_backend: Any, raw_request: Any
) -> None:
    backend = start_backend()
    long = {**HI, "stream": True, "max_tokens": 500_000, "ignore_eos": True}
    with backend.connect() as sock:
        sock.sendall(raw_request("POST", CHAT, long))
        backend.wait_for(active=1)
        assert backend.post(CHAT, HI).status == 200
    assert backend.wait_for(active=0)["aborted"] == 1


def test_faults_of_the_connection_count_as_served(start_backend: Any) -> None:
    backend = start_backend()
    for fault in ("close", "reset", "cut=3", "reset-at=3", "malformed-head", "status=500"):
        backend.post(CHAT, HI, fault)
    stats = backend.wait_for(active=0)
    assert (stats["served"], stats["aborted"]) == (6, 0)
