"""Connections to upstreams that close, break, stay silent or move, behind a whole node (upstream.md §1)."""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from time import sleep

import pytest

from tests.fakes.node import Node, running, wait_until
from tests.fakes.raw_upstream import NOT_FOUND, RawUpstream
from tests.fakes.scripted_upstream import Script, ScriptedUpstream, Seen

FLAGS = ("--io-processes", "1", "--prepare-workers", "1", "--disable-health-check")
BODY = {"model": "m1", "prompt": "a"}
OK = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"
SSE = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
EVENT = b'19\r\ndata: {"choices":[{}]} \n\n\r\n'
OPEN = "mesh_worker_connections_active"


@pytest.fixture(scope="module")
def upstream() -> Iterator[ScriptedUpstream]:
    with ScriptedUpstream(Script(OK)) as upstream:
        yield upstream


@pytest.fixture(scope="module")
def node(upstream: ScriptedUpstream) -> Iterator[Node]:
    """Without retries: what is replaced unseen is no attempt."""
    with running(*FLAGS, "--disable-retries", "--worker-urls", upstream.url) as node:
        wait_until(lambda: node.request("GET", "/readiness")[0] == 200, "not ready")
        yield node


def play(upstream: ScriptedUpstream, script: Script) -> None:
    upstream.script = script
    upstream.forget()


def ask(node: Node, body: object = BODY) -> tuple[int, dict[str, str], bytes]:
    return node.request("POST", "/v1/completions", body)


def answers(node: Node, model: str, status: int) -> bool:
    return ask(node, {**BODY, "model": model})[0] == status


def connections(upstream: ScriptedUpstream) -> list[int]:
    """Take the numbers of the connections on which requests came."""
    found = []
    while not upstream.seen.empty():
        found.append(upstream.take().connection)
    return found


# ------------------------------------------------------------------------------------------- behaviour 1


@pytest.mark.parametrize(("idle_secs", "clients", "origins"), [(1.0, 125, 100), (0.02, 20, 10)])
def test_upstream_that_closes_idle_connections_causes_no_error_over_1000_requests(
    idle_secs, clients, origins
):
    """An origin is asked about as often as it closes, so that requests meet the closing.

    All origins are one server: every address of 127.0.0.0/8 is this host.
    """
    rng = random.Random(4)
    pauses = [[rng.uniform(0, 1.3 * idle_secs) for _ in range(1000 // clients)] for _ in range(clients)]
    flags = (*FLAGS, "--disable-retries", "--policy", "random", "--worker-urls")
    with RawUpstream(OK, keeps_alive=True, idle_secs=idle_secs, host="0.0.0.0") as upstream:
        urls = [f"http://127.0.0.{number}:{upstream.port}" for number in range(1, origins + 1)]
        check_no_client_sees(upstream, pauses, *flags, *urls)


def check_no_client_sees(upstream: RawUpstream, pauses: list[list[float]], *flags: str) -> None:
    with running(*flags) as node:
        wait_until(lambda: node.request("GET", "/readiness")[0] == 200, "not ready")
        before = upstream.connections

        def play_client(mine: list[float]) -> list[int]:
            client = http.client.HTTPConnection(node.host, node.port, timeout=30)
            got = []
            for pause in mine:
                sleep(pause)
                client.request(
                    "POST", "/v1/completions", json.dumps(BODY), {"content-type": "application/json"}
                )
                answer = client.getresponse()
                answer.read()
                got.append(answer.status)
            client.close()
            return got

        with ThreadPoolExecutor(len(pauses)) as pool:
            assert [status for got in pool.map(play_client, pauses) for status in got] == [200] * 1000
        node.settle()
        assert node.metric("mesh_http_responses_total", status_code="200", error_code="") >= 1000
        assert len(flags) < upstream.connections - before < 900  # many were closed, and many used again
        wait_until(lambda: node.metric(OPEN) == upstream.open_connections == 0, "one is left open")


# ------------------------------------------------------------------------------------------- behaviour 2


def test_reused_connection_closed_before_any_response_byte_is_replaced_once_unseen(node, upstream):
    play(upstream, Script(OK))
    assert ask(node)[0] == 200
    (first,) = connections(upstream)
    replaced = node.metric("mesh_worker_reuse_retries_total")

    def dies_when_reused(seen: Seen) -> bytes:
        if seen.connection == first:
            raise OSError
        return OK

    upstream.script = Script(dies_when_reused)
    assert ask(node)[0] == 200
    used = connections(upstream)
    assert len(used) == 2 and used[0] == first != used[1]
    node.settle()
    assert node.metric("mesh_worker_reuse_retries_total") == replaced + 1


def test_replacement_that_dies_too_is_not_replaced(node, upstream):
    play(upstream, Script(OK))
    assert ask(node)[0] == 200
    play(upstream, Script(b"", ending="close"))
    status, _, body = ask(node)
    assert status == 502 and json.loads(body)["error"]["code"] == "upstream_connection_failed"
    assert len(set(connections(upstream))) == 2


def test_reused_connection_closed_after_one_response_byte_is_not_replaced(node, upstream):
    play(upstream, Script(OK))
    assert ask(node)[0] == 200
    (first,) = connections(upstream)
    play(upstream, Script(b"H", ending="close"))
    status, _, body = ask(node)
    assert status == 502 and json.loads(body)["error"]["code"] == "upstream_connection_failed"
    assert connections(upstream) == [first]


# ------------------------------------------------------------------------------------------- behaviour 3


@pytest.mark.parametrize(
    "reply",
    [
        OK + b"x",
        OK.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"),
        OK.replace(b"1.1", b"1.0", 1),
    ],
    ids=["unread byte", "connection: close", "http 1.0"],
)
def test_connection_with_unread_bytes_or_a_close_is_never_reused(node, upstream, reply):
    play(upstream, Script(reply))
    for _ in range(5):
        assert ask(node)[0] == 200
    assert len(set(connections(upstream))) == 5


def test_connection_that_got_bytes_while_idle_is_never_reused(node, upstream):
    answered = threading.Event()

    def unasked(seen: Seen) -> Iterator[bytes]:
        yield OK
        assert answered.wait(10)
        answered.clear()
        yield b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\n\r\n"

    play(upstream, Script(unasked))
    for _ in range(3):
        assert ask(node)[0] == 200
        wait_until(lambda: not node.held(), "the exchange has not ended")
        answered.set()
        wait_until(lambda: node.metric(OPEN) == 0, "it is kept")
    assert len(set(connections(upstream))) == 3


def test_connection_of_a_cancelled_exchange_is_never_reused(node, upstream):
    def endless(seen: Seen) -> Iterator[bytes]:
        yield SSE
        while True:
            yield EVENT
            sleep(0.01)

    play(upstream, Script(endless))
    body = json.dumps({**BODY, "stream": True}).encode()
    for _ in range(3):
        with node.connect() as client:
            client.sendall(
                b"POST /v1/completions HTTP/1.1\r\nhost: h\r\ncontent-type: application/json\r\n"
                b"content-length: %d\r\n\r\n%b" % (len(body), body)
            )
            assert client.recv(100).startswith(b"HTTP/1.1 200")
        wait_until(lambda: node.metric(OPEN) == 0, "it is kept")
    assert len(set(connections(upstream))) == 3


# ------------------------------------------------------------------------------------------- behaviour 4


class GoesSilent:
    """Answers 404, for registration, until `go_silent`; then its port completes no connection.

    It stops accepting, and the queue of those that it has not accepted is filled.
    """

    def __init__(self) -> None:
        self._listener = socket.socket()
        self._listener.bind(("127.0.0.1", 0))
        self._listener.listen(0)
        self._listener.settimeout(0.02)
        self._address = self._listener.getsockname()
        self.url = f"http://127.0.0.1:{self._address[1]}"
        self._fill: list[socket.socket] = []
        self._is_silent = threading.Event()
        self._thread = threading.Thread(target=self._answer, daemon=True)
        self._thread.start()

    def __enter__(self) -> GoesSilent:
        return self

    def __exit__(self, *_: object) -> None:
        self._is_silent.set()
        self._thread.join(10)
        for sock in (self._listener, *self._fill):
            sock.close()

    def _answer(self) -> None:
        while not self._is_silent.is_set():
            with contextlib.suppress(OSError):
                sock, _ = self._listener.accept()
                with sock:
                    sock.settimeout(5)
                    sock.recv(65536)
                    sock.sendall(NOT_FOUND)

    def go_silent(self) -> None:
        self._is_silent.set()
        self._thread.join(10)
        for _ in range(4):
            sock = socket.socket()
            sock.setblocking(False)
            sock.connect_ex(self._address)
            self._fill.append(sock)


def test_upstream_that_never_answers_a_connect_delays_no_request_to_another(tmp_path):
    with GoesSilent() as silent, ScriptedUpstream(Script(OK)) as good:
        file = tmp_path / "meshd.toml"
        file.write_text(
            f'[[workers]]\nurl = "{silent.url}"\nmodel_id = "silent"\n'
            f'[[workers]]\nurl = "{good.url}"\nmodel_id = "good"\n'
        )
        flags = (*FLAGS, "--disable-retries", "--upstream-connect-timeout-secs", "3", "--config", str(file))
        with running(*flags) as node, ThreadPoolExecutor(30) as pool:
            for model, status in (("good", 200), ("silent", 404)):
                wait_until(partial(answers, node, model, status), f"{model} is not ready")
            silent.go_silent()
            stuck = [pool.submit(ask, node, {**BODY, "model": "silent"}) for _ in range(30)]
            held = "mesh_worker_requests_active"
            wait_until(lambda: node.metric(held, worker=silent.url) == 30, "they do not try")
            for _ in range(20):
                assert ask(node, {**BODY, "model": "good"})[0] == 200
            assert not any(each.done() for each in stuck)
            for each in stuck:
                status, _, body = each.result(30)
                assert status == 504 and json.loads(body)["error"]["code"] == "upstream_connect_timeout"
            wait_until(lambda: not node.held(), f"left behind: {node.held()}")


# ------------------------------------------------------------------------------------- behaviours 27, 28


def test_1000_aborted_streams_leave_no_busy_connection_and_no_load():
    body = json.dumps({**BODY, "stream": True}).encode()
    request = (
        b"POST /v1/completions HTTP/1.1\r\nhost: h\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n%b" % (len(body), body)
    )
    with (
        RawUpstream(SSE + EVENT, trickle=EVENT) as upstream,
        running(*FLAGS, "--worker-urls", upstream.url) as node,
        ThreadPoolExecutor(10) as pool,
    ):
        wait_until(lambda: node.request("GET", "/readiness")[0] == 200, "not ready")

        def abort(number: int) -> None:
            with node.connect() as client:
                client.sendall(request)
                if number % 4:  # some leave before the head
                    assert client.recv(100).startswith(b"HTTP/1.1 200")

        list(pool.map(abort, range(1000)))
        wait_until(lambda: not node.held() and node.metric(OPEN) == 0, f"left behind: {node.held()}")
        wait_until(lambda: upstream.open_connections == 0, "an upstream connection is left")
        node.settle()
        assert node.metric("mesh_http_client_disconnects_total") == 1000


@pytest.mark.parametrize(
    "head",
    [
        b"HTTP/1.1 200 OK\r\nx: " + b"y" * 70 * 1024 + b"\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1 2000 OK\r\ncontent-length: 0\r\n\r\n",
        b"ICY 200 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    ],
    ids=["head of 70 KiB", "bad status", "bad status line", "both length fields"],
)
def test_malformed_head_is_502_upstream_protocol_error(node, upstream, head):
    play(upstream, Script(head))
    status, headers, body = ask(node)
    assert status == 502 and json.loads(body)["error"]["code"] == "upstream_protocol_error"
    assert headers["x-mesh-error-code"] == "upstream_protocol_error"


# ------------------------------------------------------------------------------------------------- names


def test_upstream_may_be_a_name_and_one_that_nobody_knows_is_502(tmp_path):
    with ScriptedUpstream(Script(OK)) as good:
        port = good.url.rpartition(":")[2]
        file = tmp_path / "meshd.toml"
        file.write_text(
            f'[[workers]]\nurl = "http://localhost:{port}"\nmodel_id = "good"\n'
            '[[workers]]\nurl = "http://no-such-name.invalid:80"\nmodel_id = "lost"\n'
        )
        with running(*FLAGS, "--disable-retries", "--config", str(file)) as node:
            wait_until(lambda: ask(node, {**BODY, "model": "good"})[0] == 200, "not ready")
            assert good.take().values("host") == [f"localhost:{port}".encode()]
            status, _, body = ask(node, {**BODY, "model": "lost"})
            assert status == 502 and json.loads(body)["error"]["code"] == "upstream_connection_failed"
            assert b"no-such-name" not in body


def test_no_reuse_at_all_with_an_idle_time_of_0(upstream):
    play(upstream, Script(OK))
    with running(*FLAGS, "--upstream-keepalive-timeout-secs", "0", "--worker-urls", upstream.url) as node:
        wait_until(lambda: ask(node)[0] == 200, "not ready")
        upstream.forget()
        for _ in range(4):
            assert ask(node)[0] == 200
        assert len(set(connections(upstream))) == 4
        wait_until(lambda: node.metric(OPEN) == 0, "one is kept")
