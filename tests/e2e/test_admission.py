"""Tickets over several I/O processes: the bound, the queue, and what a waiting client sees."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator

import pytest

from tests.fakes.node import Backend, Node, running, wait_until

PATH = "/v1/completions"
BODY = {"model": "m1", "prompt": "a"}


@pytest.fixture(scope="module")
def narrow() -> Iterator[tuple[Node, Backend]]:
    """One ticket, one place in the queue, one second of waiting; two I/O processes."""
    backend = Backend("--model", "m1")
    flags = ("--io-processes", "2", "--prepare-workers", "1", "--max-concurrent-requests", "1")
    try:
        with running(*flags, "--queue-size", "1", "--queue-timeout-secs", "1.5", backends=[backend]) as node:
            wait_until(lambda: node.request("GET", "/readiness")[0] == 200, "ready")
            yield node, backend
    finally:
        backend.stop()


class Slow:
    """A request that holds the one ticket until its upstream answers."""

    def __init__(self, node: Node, backend: Backend, delay_ms: int) -> None:
        self.status = 0
        headers = {"x-backend-fault": f"delay-head-ms={delay_ms}"}

        def ask() -> None:
            self.status = node.request("POST", PATH, BODY, headers)[0]

        self._thread = threading.Thread(target=ask)
        self._thread.start()
        wait_until(lambda: backend.stats()["active"] == 1, "the ticket is held")

    def end(self) -> int:
        self._thread.join(20)
        return self.status


def test_second_waits_and_third_is_refused_at_once(narrow):
    node, backend = narrow
    slow = Slow(node, backend, 800)
    second: list[tuple[int, dict[str, str], bytes]] = []
    waiting = threading.Thread(target=lambda: second.append(node.request("POST", PATH, BODY)))
    waiting.start()
    wait_until(lambda: node.metric("mesh_admission_waiting") == 1, "the second waits")
    status, headers, body = node.request("POST", PATH, BODY)
    assert (status, json.loads(body)["error"]["code"]) == (429, "admission_full")
    assert int(headers["retry-after"]) >= 1
    assert slow.end() == 200
    waiting.join(20)
    assert second[0][0] == 200


def test_waiting_too_long_is_503_with_a_json_body(narrow):
    node, backend = narrow
    slow = Slow(node, backend, 4000)
    status, headers, body = node.request("POST", PATH, BODY)
    assert (status, json.loads(body)["error"]["code"]) == (503, "admission_timeout")
    assert int(headers["retry-after"]) >= 1
    assert slow.end() == 200


def test_continue_is_not_sent_while_the_request_waits_for_a_ticket(narrow):
    node, backend = narrow
    slow = Slow(node, backend, 1000)
    body = json.dumps(BODY).encode()
    with node.connect() as client:
        client.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: h\r\ncontent-type: application/json\r\n"
            b"expect: 100-continue\r\ncontent-length: %d\r\n\r\n" % len(body)
        )
        wait_until(lambda: node.metric("mesh_admission_waiting") == 1, "it waits")
        client.setblocking(False)
        with pytest.raises(BlockingIOError):
            client.recv(1)
        client.setblocking(True)
        client.settimeout(10)
        assert slow.end() == 200
        assert client.recv(65536) == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.sendall(body)
        assert client.recv(65536).startswith(b"HTTP/1.1 200 ")


def test_client_that_leaves_the_queue_gives_its_place_up(narrow):
    node, backend = narrow
    slow = Slow(node, backend, 1500)
    leaver = socket.create_connection((node.host, node.port))
    body = json.dumps(BODY).encode()
    leaver.sendall(
        b"POST /v1/completions HTTP/1.1\r\nhost: h\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n%b" % (len(body), body)
    )
    wait_until(lambda: node.metric("mesh_admission_waiting") == 1, "it waits")
    leaver.close()
    wait_until(lambda: node.metric("mesh_admission_waiting") == 0, "its place is free")
    assert node.request("POST", PATH, BODY)[0] == 200
    assert slow.end() == 200


def test_bound_holds_over_all_io_processes(narrow):
    node, backend = narrow
    seen = []

    def ask() -> None:
        seen.append(node.request("POST", PATH, BODY)[0])

    threads = [threading.Thread(target=ask) for _ in range(40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert backend.stats()["max_active"] == 1
    assert set(seen) <= {200, 429, 503} and 200 in seen
    wait_until(lambda: node.metric("mesh_admission_held") == 0, "every ticket came back")
