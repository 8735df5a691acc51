"""Upstreams removed while requests run on them (upstream.md §9)."""

from __future__ import annotations

import http.client
import json
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from meshd.control import Role
from tests.e2e.conftest import COMMON
from tests.fakes.node import Backend, Node, running, wait_until
from tests.fakes.workers import add, call, remove_all, served_by, workers

FLAGS = (*COMMON, "--route-headers", "--policy", "least_load")


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    with running(*FLAGS) as running_node:
        yield running_node


@pytest.fixture
def pair(node: Node, backends: tuple[Backend, Backend]) -> Iterator[tuple[str, str]]:
    """Two upstreams in use, the set as it was afterwards."""
    for backend in backends:
        add(node, backend.url)
    yield backends[0].url, backends[1].url
    remove_all(node)


@dataclass
class Stream:
    """A chat stream of ``tokens`` events, one each 50 ms, of which the first has arrived."""

    connection: http.client.HTTPConnection
    answer: http.client.HTTPResponse
    first: bytes

    @classmethod
    def start(cls, node: Node, tokens: int = 60) -> Stream:
        connection = http.client.HTTPConnection(node.host, node.port, timeout=30)
        body = {
            "model": "m1",
            "messages": [{"role": "user", "content": "hi"}],
            "max_tokens": tokens,
            "stream": True,
        }
        headers = {"content-type": "application/json", "x-backend-fault": "token-delay-ms=50"}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        answer = connection.getresponse()
        assert answer.status == 200
        return cls(connection, answer, answer.readline())

    @property
    def upstream(self) -> str:
        return str(self.answer.getheader("x-mesh-upstream"))

    def rest(self) -> str:
        try:
            return (self.first + self.answer.read()).decode()
        finally:
            self.connection.close()


def test_long_stream_finishes_new_requests_go_elsewhere_and_then_the_upstream_is_gone(
    node: Node, pair: tuple[str, str]
) -> None:
    """upstream.md behaviour 26, admin.md behaviour 9."""
    stream = Stream.start(node)
    url = stream.upstream
    (other,) = set(pair) - {url}
    worker = workers(node)[url]["id"]
    assert call(node, "DELETE", f"/workers/{worker}")[0] == 202
    info = call(node, "GET", f"/workers/{worker}")[1]
    assert (info["state"], info["available"], info["load"]) == ("draining", False, 1)
    assert info["job_status"]["job_type"] == "remove"
    assert {served_by(node) for _ in range(8)} == {other}
    assert call(node, "POST", "/workers", {"url": url})[0] == 409
    assert call(node, "GET", f"/workers/{worker}")[0] == 200
    text = stream.rest()
    assert text.endswith("data: [DONE]\n\n")
    assert "error" not in text
    wait_until(lambda: call(node, "GET", f"/workers/{worker}")[0] == 404, "the upstream is still there")
    assert node.metric("mesh_worker_health", worker=url) == -1
    assert node.metric("mesh_worker_cb_state", worker=url) == -1
    assert node.metric("mesh_worker_requests_active", worker=url) == 0
    assert add(node, url) != worker


def test_force_cuts_the_stream_with_the_error_event_and_removes_the_upstream_at_once(
    node: Node, pair: tuple[str, str]
) -> None:
    """upstream.md behaviour 26, its second half."""
    stream, unharmed = Stream.start(node), Stream.start(node, tokens=20)
    url = stream.upstream
    assert unharmed.upstream != url
    worker = workers(node)[url]["id"]
    assert call(node, "DELETE", f"/workers/{worker}?force=true")[0] == 202
    assert call(node, "GET", f"/workers/{worker}")[0] == 404
    text = stream.rest()
    assert "[DONE]" not in text
    assert json.loads(text.strip().rpartition("data: ")[2])["error"]["code"] == "upstream_connection_failed"
    assert unharmed.rest().endswith("data: [DONE]\n\n")
    wait_until(lambda: not node.held(), "something is still held")
    assert add(node, url) != worker


def test_force_ends_the_wait_of_a_resource_operation_for_the_upstream(
    node: Node, pair: tuple[str, str], backends: tuple[Backend, Backend]
) -> None:
    url = pair[0]
    worker = workers(node)[url]["id"]
    backends[0].fault("delay-head-ms=30000,times=1")
    connection = http.client.HTTPConnection(node.host, node.port, timeout=20)
    try:
        connection.request("GET", "/v1/responses/resp_nowhere")
        wait_until(lambda: workers(node)[url]["load"] == 1, "no request waits there")
        call(node, "DELETE", f"/workers/{worker}?force=true")
        assert connection.getresponse().status == 404
        wait_until(lambda: not node.held(), "something is still held")
    finally:
        connection.close()
        backends[0].fault("")


def test_force_moves_a_request_without_an_answer_to_another_upstream(
    node: Node, pair: tuple[str, str], backends: tuple[Backend, Backend]
) -> None:
    url = pair[0]
    worker = workers(node)[url]["id"]
    backends[0].fault("delay-head-ms=30000,times=1")
    connections = []
    try:

        def waits_there() -> bool:
            connection = http.client.HTTPConnection(node.host, node.port, timeout=30)
            connections.append(connection)
            body = {"model": "m1", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
            connection.request(
                "POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"}
            )
            if workers(node)[url]["load"] == 0:
                return False
            node.settle()  # one that is answered ends meanwhile
            return bool(workers(node)[url]["load"] == 1)

        wait_until(waits_there, "no request waits there")
        call(node, "DELETE", f"/workers/{worker}?force=true")
        answers = [connection.getresponse() for connection in connections]
        assert {answer.status for answer in answers} == {200}
        moved = [answer for answer in answers if answer.getheader("x-mesh-attempts") == "2"]
        assert [answer.getheader("x-mesh-upstream") for answer in moved] == [pair[1]]
    finally:
        backends[0].fault("")
        for connection in connections:
            connection.close()


def test_draining_goes_on_when_the_controller_is_killed_in_the_middle(
    node: Node, pair: tuple[str, str]
) -> None:
    stream = Stream.start(node, tokens=80)
    url = stream.upstream
    (other,) = set(pair) - {url}
    worker = workers(node)[url]["id"]
    assert call(node, "DELETE", f"/workers/{worker}")[0] == 202
    (pid,) = [row.pid for row in node.board().rows() if row.role is Role.CONTROLLER and row.is_alive]
    os.kill(pid, signal.SIGKILL)
    assert {served_by(node) for _ in range(8)} == {other}
    assert call(node, "GET", f"/workers/{worker}")[1]["state"] == "draining"
    assert stream.rest().endswith("data: [DONE]\n\n")
    wait_until(lambda: call(node, "GET", f"/workers/{worker}")[0] == 404, "the upstream is still there")


def test_idle_connections_are_closed_at_once(
    node: Node, pair: tuple[str, str], backends: tuple[Backend, Backend]
) -> None:
    for _ in range(8):
        served_by(node)
    assert backends[0].stats()["open_connections"] > 1  # one of them asks for the statistics
    call(node, "DELETE", f"/workers/{workers(node)[pair[0]]['id']}")
    wait_until(lambda: backends[0].stats()["open_connections"] == 1, "connections are left", 2.0)
