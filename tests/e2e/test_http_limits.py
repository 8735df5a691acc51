"""Limits and timers at a real node: slow clients, silent ones, ones that do not read, too many of them."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import resource
import select
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.node import Backend, Node, running, wait_until
from tests.fakes.scripted_upstream import Script, ScriptedUpstream
from tests.fakes.wire import Client, post

BODY = b'{"model":"m1","prompt":"a"}'
REQUEST = post(b"/v1/completions", BODY)
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: h\r\ncontent-type: application/json\r\n"
GOOD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"
FLAGS = ("--io-processes", "1", "--prepare-workers", "1", "--disable-health-check")
MEBIBYTE = 1 << 20


@pytest.fixture(scope="module")
def hasty() -> Iterator[tuple[Node, ScriptedUpstream]]:
    """A node whose client timers are all one second."""
    timers = (
        "--client-header-timeout-secs", "1", "--client-body-timeout-secs", "1",
        "--client-idle-timeout-secs", "1", "--stream-idle-timeout-secs", "1",
    )  # fmt: skip
    with (
        ScriptedUpstream(Script(GOOD)) as upstream,
        running(*FLAGS, *timers, "--worker-urls", upstream.url) as node,
    ):
        yield node, upstream


def dribble(client: Client, wire: bytes, pause_s: float) -> int:
    """Send ``wire`` byte by byte until an answer comes; return how many bytes went out."""
    for count in range(len(wire)):
        if select.select([client.socket], [], [], pause_s)[0]:
            return count
        client.send(wire[count : count + 1])
    return len(wire)


# ------------------------------------------------------------------------------------------------- timers


@pytest.mark.parametrize("before", [b"", REQUEST], ids=["first request", "second request"])
def test_head_sent_byte_by_byte_is_cut_with_408(hasty, before):
    node, _ = hasty
    with Client(node.host, node.port) as client:
        if before:
            client.send(before)
            assert client.read().status == 200
        assert dribble(client, HEAD, 0.1) < len(HEAD)
        answer = client.read()
        assert (answer.status, answer.code, answer.value("connection")) == (408, "request_timeout", "close")
        assert answer.json()["error"]["code"] == "request_timeout"
        assert client.ends()


def test_empty_line_alone_is_a_head_that_never_comes(hasty):
    node, _ = hasty
    with Client(node.host, node.port) as client:
        client.send(b"\r\n")
        assert client.read().code == "request_timeout"
        assert client.ends()


@pytest.mark.parametrize("before", [b"", REQUEST], ids=["never used", "between requests"])
def test_silent_connection_is_closed_without_a_word(hasty, before):
    node, _ = hasty
    with Client(node.host, node.port) as client:
        if before:
            client.send(before)
            assert client.read().status == 200
        assert client.ends()


@pytest.mark.parametrize(
    "wire",
    [
        HEAD + b"content-length: 100\r\n\r\n" + BODY,
        HEAD + b"content-length: 100\r\n\r\n",
        HEAD + b"transfer-encoding: chunked\r\n\r\n1b\r\n" + BODY,
        HEAD + b"transfer-encoding: chunked\r\n\r\n",
    ],
    ids=["length", "length, no byte", "chunked", "chunked, no byte"],
)
def test_body_that_stalls_is_cut_with_408(hasty, wire):
    node, upstream = hasty
    upstream.forget()
    with Client(node.host, node.port) as client:
        client.send(wire)
        answer = client.read()
        assert (answer.status, answer.code, answer.value("connection")) == (408, "request_timeout", "close")
        assert client.ends()
    wait_until(lambda: not node.held(), f"left behind: {node.held()}")
    assert upstream.seen.empty()


def test_body_that_is_only_slow_is_served(hasty):
    """Each byte puts the timer back: the whole takes twice the time-out."""
    node, _ = hasty
    with Client(node.host, node.port) as client:
        client.send(HEAD + b"content-length: %d\r\n\r\n" % len(BODY))
        assert dribble(client, BODY, 2.0 / len(BODY)) == len(BODY)
        assert client.read().status == 200


def endless(head: bytes, piece: bytes) -> Iterator[bytes]:
    return itertools.chain((head,), itertools.repeat(piece))


LENGTH = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 1073741824\r\n\r\n"
CHUNKED = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
PIECE = b"x" * 65536
EVENT = b'data: {"choices":[{"text":"%b"}]}\n\n' % (b"y" * 4000)
ENDLESS = {
    "a length": (LENGTH, PIECE),
    "chunks": (CHUNKED, b"10000\r\n" + PIECE + b"\r\n"),
    "events": (STREAM, b"%x\r\n%b\r\n" % (len(EVENT), EVENT)),
    "one event without end": (STREAM, b"10000\r\n" + PIECE + b"\r\n"),
}


def test_client_that_takes_no_byte_is_given_up(hasty):
    node, upstream = hasty
    upstream.forget()
    upstream.script = Script(lambda _: endless(*ENDLESS["a length"]))
    with Client(node.host, node.port) as client:
        client.send(REQUEST)
        upstream.take()
        wait_until(lambda: upstream.broken == 1, "the upstream is never let go")
    upstream.script = Script(GOOD)
    wait_until(lambda: not node.held(), f"left behind: {node.held()}")


# -------------------------------------------------------------------------------------------- back-pressure


@pytest.fixture(scope="module")
def patient() -> Iterator[tuple[Node, ScriptedUpstream]]:
    with ScriptedUpstream(Script(GOOD)) as upstream, running(*FLAGS, "--worker-urls", upstream.url) as node:
        yield node, upstream


def private_bytes(pid: int) -> int:
    """Return the memory that only this process has: what it would give back if it ended."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return (
        sum(int(line.split()[1]) for line in lines if line.startswith(("Private_Clean", "Private_Dirty")))
        << 10
    )


def wait_until_still(upstream: ScriptedUpstream) -> None:
    """Wait until the upstream can send no more."""
    last = [-1, 0]

    def is_still() -> bool:
        last[1] = last[1] + 1 if upstream.sent_bytes == last[0] else 0
        last[0] = upstream.sent_bytes
        return last[1] > 30

    wait_until(is_still, "the upstream sends on and on")


@pytest.mark.parametrize("kind", ENDLESS)
def test_client_that_does_not_read_costs_less_than_a_mebibyte(patient, kind):
    node, upstream = patient
    (pid,) = node.pids("io")
    for is_measured in (False, True):  # once for what the first time alone costs
        upstream.forget()
        before = private_bytes(pid)
        sent = upstream.sent_bytes
        upstream.script = Script(lambda _: endless(*ENDLESS[kind]))
        with Client(node.host, node.port) as client:
            client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
            client.send(REQUEST)
            upstream.take()
            wait_until_still(upstream)
            grown = private_bytes(pid) - before
            taken = 0  # what waits is let through when the client reads: nobody was cut off
            while taken < 8 * MEBIBYTE:
                taken += len(client.socket.recv(1 << 20))
        if is_measured:
            assert grown < MEBIBYTE, f"{grown} bytes for {upstream.sent_bytes - sent} sent"
    upstream.script = Script(GOOD)
    wait_until(lambda: not node.held(), f"left behind: {node.held()}")


# ------------------------------------------------------------------------------------- aborts, many clients


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def test_1000_aborted_requests_leave_nothing(node, clean_backends):
    """Clients leave within the head, within the body, before the answer, and within it."""
    rng = random.Random(5)
    pids = node.pids("io")
    body = b'{"model":"m1","prompt":"one two three four","stream":%b}'
    fault = b"x-backend-fault: delay-head-ms=20,token-delay-ms=10\r\n"

    async def one(number: int) -> None:
        reader, writer = await asyncio.open_connection(node.host, node.port)
        wire = post(
            b"/v1/completions",
            body % rng.choice((b"true", b"false")),
            HEAD.split(b"\r\n")[2] + b"\r\n" + fault,
        )
        kind = number % 4
        writer.write(wire[: rng.randint(1, len(wire) - 1)] if kind == 0 else wire)
        if kind == 1:
            await writer.drain()
        elif kind >= 2:
            try:
                async with asyncio.timeout(rng.uniform(0, 0.08)):
                    while await reader.read(65536):
                        pass
            except TimeoutError:
                pass
        writer.transport.abort() if kind % 2 else writer.close()

    async def all_of_them() -> None:
        gate = asyncio.Semaphore(50)

        async def held(number: int) -> None:
            async with gate:
                await one(number)

        await asyncio.gather(*(held(number) for number in range(1000)))

    asyncio.run(all_of_them())
    wait_until(lambda: not node.held(), f"left behind: {node.held()}")
    wait_until(lambda: sum(b.stats()["active"] for b in clean_backends) == 0, "an upstream still works")
    wait_until(lambda: node.metric("mesh_http_connections_active") == 0, "a client connection stays")
    opened = {pid: descriptors(pid) for pid in pids}
    for _ in range(20):
        assert node.request("POST", "/v1/completions", BODY)[0] == 200
    assert node.pids("io") == pids, "an I/O process died"
    assert all(descriptors(pid) <= opened[pid] + 4 for pid in pids)


@pytest.fixture(scope="module")
def narrow(tmp_path_factory) -> Iterator[tuple[Node, Backend]]:
    """A node whose hard limit of descriptors is 250: an I/O process holds 100 clients."""
    wrapper = tmp_path_factory.mktemp("bin") / "python"
    wrapper.write_text(f'#!/bin/sh\nulimit -n 250\nexec "{sys.executable}" "$@"\n')
    wrapper.chmod(0o755)
    backend = Backend("--model", "m1")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", str(wrapper))
        context = running(*FLAGS, backends=[backend])
        node = context.__enter__()
    try:
        yield node, backend
    finally:
        context.__exit__(None, None, None)
        backend.stop()


CAP = 100


def test_one_client_over_the_cap_gets_503_and_disturbs_nobody(narrow):
    node, _ = narrow
    wait_until(lambda: node.metric("mesh_http_connections_active") == 0, "not at rest")
    stream = json.dumps({"model": "m1", "prompt": "a b c d", "stream": True}).encode()
    clients = [Client(node.host, node.port) for _ in range(CAP)]
    try:
        slow = post(
            b"/v1/completions",
            stream,
            b"content-type: application/json\r\nx-backend-fault: token-delay-ms=50\r\n",
        )
        clients[0].send(slow)
        for client in clients[1:]:
            client.send(b"GET /liveness HTTP/1.1\r\nhost: h\r\n\r\n")
            assert client.read("GET").status == 200
        for _ in range(30):
            with Client(node.host, node.port) as turned_away:
                answer = turned_away.read()
                assert (answer.status, answer.code) == (503, "too_many_connections")
                assert answer.value("retry-after") == "1" and answer.value("connection") == "close"
                assert answer.json()["error"]["type"] == "api_error"
                assert turned_away.ends()
        for at in range(1, CAP, 33):  # each opens or reuses an upstream connection
            for client in clients[at : at + 33]:
                client.send(REQUEST)
            assert {client.read().code for client in clients[at : at + 33]} == {None}
        assert clients[0].read().body.endswith(b"data: [DONE]\n\n")
        clients.pop().close()
        wait_until(lambda: _is_served(node), "no place is given back")
    finally:
        for client in clients:
            client.close()


def _is_served(node: Node) -> bool:
    with Client(node.host, node.port) as client:
        client.send(b"GET /liveness HTTP/1.1\r\nhost: h\r\n\r\n")
        return client.read("GET").status == 200


def test_without_descriptors_accepting_waits_and_open_connections_go_on(narrow):
    node, _ = narrow
    (pid,) = node.pids("io")
    limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    with Client(node.host, node.port) as client:
        client.send(REQUEST)
        assert client.read().status == 200
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, limits[1]))
        try:
            late = [Client(node.host, node.port) for _ in range(3)]
            for one in late:
                one.send(b"GET /liveness HTTP/1.1\r\nhost: h\r\n\r\n")
            end = time.monotonic() + 0.5
            while time.monotonic() < end:
                client.send(b"GET /liveness HTTP/1.1\r\nhost: h\r\n\r\n")
                assert client.read("GET").status == 200
        finally:
            resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
        for one in late:
            assert one.read("GET").status == 200, "a queued connection was lost"
            one.close()
        assert node.pids("io") == [pid]
