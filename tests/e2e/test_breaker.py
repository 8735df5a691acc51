"""One breaker an upstream for the whole node, with two I/O processes and the real timers, made short."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from tests.fakes.fleet import Fleet, answer
from tests.fakes.node import Node, running, wait_until
from tests.fakes.scripted_upstream import Script, Seen

CHAT = {"model": "m1", "messages": [{"role": "user", "content": "hello"}]}
OPEN_S = 0.6
FLAGS = (
    "--io-processes", "2", "--prepare-workers", "1", "--disable-health-check", "--disable-retries",
    "--cb-failure-threshold", "10", "--cb-timeout-duration-secs", str(OPEN_S),
    "--upstream-keepalive-timeout-secs", "0",
)  # fmt: skip
CLOSED, OPEN, HALF_OPEN = 0, 1, 2
SSE = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
EVENT = b'14\r\ndata: {"text":"x"}\n\n\r\n'


class Gate:
    """A reply that is held until ``open`` is called; counts how many are held at one time."""

    def __init__(self, reply: bytes) -> None:
        self.reply = reply
        self.held = self.most_held = 0
        self._lock = threading.Lock()
        self._may_go = threading.Event()

    def __call__(self, seen: Seen) -> bytes:
        with self._lock:
            self.held += 1
            self.most_held = max(self.most_held, self.held)
        self._may_go.wait(20)
        with self._lock:
            self.held -= 1
        return self.reply

    def open(self) -> None:
        self._may_go.set()


@pytest.fixture(scope="module")
def scene() -> Iterator[tuple[Node, Fleet]]:
    """One upstream, so that what becomes of a request shows the state of its breaker."""
    with Fleet(1) as fleet, running(*FLAGS, "--worker-urls", *fleet.urls) as node:
        wait_until(lambda: node.request("GET", "/readiness")[0] == 200, "not ready")
        yield node, fleet


@pytest.fixture
def closed(scene: tuple[Node, Fleet]) -> tuple[Node, Fleet]:
    """The scene with its breaker closed and no failures counted."""
    node, fleet = scene
    fleet.play(Script(answer(200)))
    wait_until(lambda: ask(node)[0] == 200 and state(node) == CLOSED and failures(node) == 0, "not closed")
    fleet.visits()
    return node, fleet


def ask(node: Node) -> tuple[int, dict[str, str], bytes]:
    return node.request("POST", "/v1/chat/completions", CHAT)


def state(node: Node) -> float:
    return node.metric("mesh_worker_cb_state")


def failures(node: Node) -> float:
    return node.metric("mesh_worker_cb_consecutive_failures")


def open_breaker(node: Node, fleet: Fleet) -> None:
    fleet.play(Script(answer(500)))
    for _ in range(10):
        ask(node)
    wait_until(lambda: state(node) != CLOSED, "the breaker does not open")


def begin(node: Node) -> socket.socket:
    """Send a request and wait for nothing."""
    body = json.dumps(CHAT | {"stream": True}).encode()
    client = node.connect()
    client.sendall(
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: h\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n%b" % (len(body), body)
    )
    return client


def test_answers_that_blame_the_client_or_the_load_never_open_it(closed):
    node, fleet = closed
    for status in (400, 404, 429):
        fleet.play(Script(answer(status)))
        with ThreadPoolExecutor(8) as pool:
            assert {pool.submit(ask, node).result()[0] for _ in range(30)} == {status}
    assert (state(node), failures(node)) == (CLOSED, 0)


def test_ten_500s_in_a_row_open_it_whichever_process_saw_them_and_nine_do_not(closed):
    node, fleet = closed
    fleet.play(Script(answer(500)))
    for _ in range(9):
        assert ask(node)[0] == 500
    wait_until(lambda: failures(node) == 9, "nine failures are not counted")
    assert state(node) == CLOSED
    fleet.play(Script(answer(200)))
    assert ask(node)[0] == 200
    wait_until(lambda: failures(node) == 0, "a success does not end the run")
    fleet.play(Script(answer(500)))
    for _ in range(10):
        assert ask(node)[0] == 500
    wait_until(lambda: state(node) == OPEN, "the breaker does not open")
    visits = sum(fleet.counts())
    status, headers, _body = ask(node)
    assert (status, headers["x-mesh-error-code"], headers["retry-after"]) == (
        503,
        "no_available_workers",
        "1",
    )
    assert visits == 10 and sum(fleet.counts()) == 0
    io = {line["io_process"] for line in node.access_lines()[-12:]}
    assert len(io) == 2, "the kernel gave all connections to one process"
    node.settle()
    assert node.metric("mesh_worker_cb_transitions_total", to="open") >= 1
    assert node.metric("mesh_worker_cb_outcomes_total", outcome="failure") >= 19


def test_open_breaker_makes_the_node_unready(closed):
    node, fleet = closed
    open_breaker(node, fleet)
    if state(node) == OPEN:
        status, _, body = node.request("GET", "/readiness")
        assert (status, json.loads(body)["reason"]) == (503, "no_available_workers") or state(node) != OPEN
    wait_until(lambda: state(node) == HALF_OPEN, "it does not become half open")
    assert node.request("GET", "/readiness")[0] == 200


def test_clients_that_leave_change_nothing(closed):
    node, fleet = closed
    gate = Gate(answer(200))
    fleet.play(Script(gate))
    for _ in range(12):
        client = begin(node)
        fleet.members[0].take()
        client.close()
    gate.open()
    wait_until(lambda: not node.held(), "something is held")
    assert (state(node), failures(node)) == (CLOSED, 0)


def test_ten_streams_cut_in_the_middle_open_it(closed):
    node, fleet = closed
    fleet.play(Script(SSE + EVENT, "reset"))
    opened = node.metric("mesh_worker_cb_transitions_total", **{"from": "closed", "to": "open"})
    for _ in range(10):
        status, _, body = ask(node)
        assert status == 200 and b"upstream_connection_failed" in body
    wait_until(
        lambda: node.metric("mesh_worker_cb_transitions_total", **{"from": "closed", "to": "open"}) > opened,
        "the breaker does not open",
    )


def test_half_open_has_one_request_in_flight_and_three_successes_close_it(closed):
    node, fleet = closed
    open_breaker(node, fleet)
    gate = Gate(answer(200))
    fleet.play(Script(gate))
    wait_until(lambda: state(node) == HALF_OPEN, "it does not become half open")
    with ThreadPoolExecutor(12) as pool:
        asked = [pool.submit(ask, node) for _ in range(12)]
        wait_until(lambda: sum(future.done() for future in asked) == 11, "not refused at once")
        assert (gate.held, gate.most_held) == (1, 1)
        gate.open()
        assert sorted(future.result()[0] for future in asked) == [200] + [503] * 11
    wait_until(lambda: ask(node)[0] == 200 and state(node) == CLOSED, "it does not close")
    node.settle()
    assert node.metric("mesh_worker_cb_transitions_total", **{"from": "half_open", "to": "closed"}) >= 1


def test_canceled_trial_makes_way_and_a_failed_one_opens_it_again(closed):
    node, fleet = closed
    open_breaker(node, fleet)
    gate = Gate(answer(200))
    fleet.play(Script(gate))
    wait_until(lambda: state(node) == HALF_OPEN, "it does not become half open")
    client = begin(node)
    fleet.members[0].take()
    assert ask(node)[0] == 503
    client.close()
    fleet.play(Script(answer(500)))
    gate.open()
    opened = node.metric("mesh_worker_cb_transitions_total", **{"from": "half_open", "to": "open"})
    wait_until(lambda: ask(node)[0] == 500, "the next one may not try")
    transitions = {"from": "half_open", "to": "open"}
    wait_until(
        lambda: node.metric("mesh_worker_cb_transitions_total", **transitions) == opened + 1,
        "it stays half open",
    )


def test_trial_of_a_killed_process_makes_way(closed):
    node, fleet = closed
    open_breaker(node, fleet)
    gate = Gate(answer(200))
    fleet.play(Script(gate))
    wait_until(lambda: state(node) == HALF_OPEN, "it does not become half open")
    client = begin(node)
    fleet.members[0].take()
    port = int(fleet.urls[0].rsplit(":", 1)[1])
    (pid,) = [pid for pid in node.pids("io") if is_connected(pid, port)]
    fleet.play(Script(answer(200)))
    os.kill(pid, signal.SIGKILL)

    def is_served() -> bool:
        # It may reach the place of the dead one, before its successor is there.
        with contextlib.suppress(OSError):
            return node.request("POST", "/v1/chat/completions", CHAT, timeout=0.5)[0] == 200
        return False

    wait_until(is_served, "the trial of the dead is not ended")
    gate.open()
    client.close()


def is_connected(pid: int, port: int) -> bool:
    connections = psutil.Process(pid).net_connections("tcp")
    return any(
        each.raddr and each.raddr.port == port and each.status == "ESTABLISHED" for each in connections
    )


def test_state_outlives_the_controller(closed):
    node, fleet = closed
    open_breaker(node, fleet)
    fleet.play(Script(answer(200)))
    (pid,) = node.pids("controller")
    os.kill(pid, signal.SIGKILL)
    # while there is no controller the state stands still; its successor goes on with the time that has passed
    wait_until(lambda: ask(node)[0] == 200, "its successor does not go on", timeout=60)
    wait_until(lambda: ask(node)[0] == 200 and state(node) == CLOSED, "it does not close", timeout=60)


def test_disabled_breaker_counts_and_never_opens():
    flags = (*FLAGS, "--disable-circuit-breaker", "--cb-failure-threshold", "2")
    with Fleet(1) as fleet, running(*flags, "--worker-urls", *fleet.urls) as node:
        fleet.play(Script(answer(500)))
        wait_until(lambda: ask(node)[0] == 500, "not ready")
        for _ in range(20):
            assert ask(node)[0] == 500
        wait_until(lambda: failures(node) == 21, "failures are not counted")
        assert state(node) == CLOSED
