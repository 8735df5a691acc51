"""A client that leaves: its upstream connection is closed within 100 ms, and everything is given back."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import struct
import time

import pytest

from tests.e2e.conftest import COMMON
from tests.fakes.node import Node, running, wait_until
from tests.fakes.raw_upstream import RawUpstream

PROMISE_SECS = 0.1
SSE_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
EVENT = b'14\r\ndata: {"text":"x"}\n\n\r\n'
PART_OF_A_BODY = (
    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 5000\r\n\r\n" + b'{"a":"'
)

MOMENTS = {
    "before any head": (b"", b"", False),
    "before the head of a stream": (b"", b"", True),
    "in mid-stream": (SSE_HEAD + EVENT, EVENT, True),
    "in a silent stream": (SSE_HEAD + EVENT, b"", True),
    "in a stream without events yet": (SSE_HEAD, b"", True),
    "in mid-body": (PART_OF_A_BODY, b"y", False),
    "in a silent body": (PART_OF_A_BODY, b"", False),
}


def finish(client: socket.socket) -> None:
    client.close()


def reset(client: socket.socket) -> None:
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()


def half_close(client: socket.socket) -> None:
    client.shutdown(socket.SHUT_WR)


def send_request(node: Node, is_stream: bool) -> socket.socket:
    body = json.dumps({"model": "m1", "prompt": "a", "stream": is_stream}).encode()
    client = node.connect()
    client.sendall(
        b"POST /v1/completions HTTP/1.1\r\nhost: h\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n%b" % (len(body), body)
    )
    return client


@pytest.fixture(scope="module")
def silent_node():
    flags = (*COMMON, "--disable-health-check", "--upstream-keepalive-timeout-secs", "60")
    with RawUpstream(b"") as upstream, running(*flags, "--worker-urls", upstream.url) as node:
        yield node, upstream


@pytest.mark.parametrize("leave", [finish, reset, half_close])
@pytest.mark.parametrize("moment", MOMENTS)
def test_upstream_sees_the_end_within_100_ms(silent_node, moment, leave):
    node, upstream = silent_node
    upstream.reply, upstream.trickle, is_stream = MOMENTS[moment]
    took = []
    for _ in range(5):
        client = send_request(node, is_stream)
        upstream.requests.get(timeout=10)
        if upstream.reply:
            assert client.recv(65536).startswith(b"HTTP/1.1 200")
        left_at = time.monotonic()
        leave(client)
        took.append(upstream.ends.get(timeout=10).ended_at - left_at)
        client.close()
        if took[-1] <= PROMISE_SECS:  # the machine may be busy: one try of five is enough to show that it can
            break
    assert took[-1] <= PROMISE_SECS, took
    wait_until(lambda: not node.held(), f"left behind: {node.held()}")
    wait_until(lambda: node.metric("mesh_worker_connections_active") == 0, "an upstream connection stays")


def test_departure_is_counted_and_logged_once(silent_node):
    node, upstream = silent_node
    upstream.reply, upstream.trickle, is_stream = MOMENTS["in a silent stream"]
    wait_until(lambda: not node.held(), "not at rest")
    node.settle()
    before = node.metric("mesh_http_client_disconnects_total")
    canceled = node.metric("mesh_router_request_errors_total", error_type="canceled")
    lines = len(node.access_lines())
    client = send_request(node, is_stream)
    assert client.recv(65536)
    client.close()
    wait_until(lambda: len(node.access_lines()) == lines + 1, "no access line")
    line = node.access_lines()[-1]
    assert (line["outcome"], line["status"]) == ("canceled", 200)
    node.settle()
    assert node.metric("mesh_http_client_disconnects_total") == before + 1
    assert node.metric("mesh_router_request_errors_total", error_type="canceled") == canceled + 1


def test_upstream_that_takes_no_request_bytes_holds_nothing_after_the_client_left():
    """The body does not fit the socket buffers, and the upstream reads none of it."""
    flags = ("--io-processes", "1", "--prepare-workers", "1", "--disable-health-check", "--worker-urls")
    with RawUpstream(b"", takes_bodies=False) as upstream, running(*flags, upstream.url) as node:
        body = b'{"prompt":"%b"}' % (b"x" * (32 << 20))
        with node.connect() as client:
            client.sendall(
                b"POST /v1/completions HTTP/1.1\r\nhost: h\r\ncontent-type: application/json\r\n"
                b"content-length: %d\r\n\r\n" % len(body)
            )
            client.sendall(body)
            upstream.requests.get(timeout=10)
            assert node.held().keys() == {
                "mesh_worker_requests_active", "mesh_admission_held", "mesh_body_memory_reserved_bytes",
            }  # fmt: skip
        wait_until(lambda: not node.held(), f"left behind: {node.held()}")


def test_client_that_leaves_in_its_body_holds_nothing(node, clean_backends):
    client = node.connect()
    client.sendall(
        b"POST /v1/completions HTTP/1.1\r\nhost: h\r\ncontent-type: application/json\r\n"
        b"content-length: 1000000\r\n\r\n" + b"x" * 400_000
    )
    wait_until(lambda: node.metric("mesh_body_memory_reserved_bytes") > 0, "nothing was reserved")
    client.close()
    wait_until(lambda: not node.held(), f"left behind: {node.held()}")
    assert not any(row["method"] == "POST" for backend in clean_backends for row in backend.requests())


def test_two_hundred_clients_that_leave_at_random_instants_leave_nothing(node, clean_backends):
    rng = random.Random(11)
    stats = [backend.stats() for backend in clean_backends]

    async def leave_early(delay_s: float, is_stream: bool) -> None:
        reader, writer = await asyncio.open_connection(node.host, node.port)
        body = json.dumps({"model": "m1", "prompt": "one two three", "stream": is_stream}).encode()
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: h\r\ncontent-type: application/json\r\n"
            b"x-backend-fault: delay-head-ms=40,token-delay-ms=20\r\ncontent-length: %d\r\n\r\n" % len(body)
        )
        writer.write(body)
        try:
            async with asyncio.timeout(delay_s):
                while await reader.read(65536):
                    pass
        except TimeoutError:
            pass
        writer.transport.abort()

    async def all_of_them(longest_s: float) -> None:
        gate = asyncio.Semaphore(40)

        async def one(delay_s: float, is_stream: bool) -> None:
            async with gate:
                await leave_early(delay_s, is_stream)

        await asyncio.gather(*(one(rng.uniform(0, longest_s), rng.random() < 0.7) for _ in range(200)))

    aborted = 0
    for longest_s in (0.3, 1.0, 3.0):  # on a busy machine few reach an upstream before their client leaves
        asyncio.run(all_of_them(longest_s))
        wait_until(lambda: not node.held(), f"left behind: {node.held()}", 30)
        wait_until(lambda: sum(b.stats()["active"] for b in clean_backends) == 0, "an upstream still works")
        aborted = sum(b.stats()["aborted"] for b in clean_backends) - sum(s["aborted"] for s in stats)
        if aborted > 50:
            break
    assert aborted > 50
    status, _, _ = node.request("POST", "/v1/completions", {"model": "m1", "prompt": "a"})
    assert status == 200
