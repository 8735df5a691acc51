"""Bodies of the largest size: 512 MiB pass byte for byte, one byte more is 413, memory comes back."""

from __future__ import annotations

import hashlib
import json
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.fakes.node import Node, running, wait_until
from tests.fakes.raw_upstream import RawUpstream, Received

LARGEST = 512 << 20
PIECE = 1 << 20
SLACK = 48 << 20
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: h\r\ncontent-type: application/json\r\n"
OPENING, CLOSING = b'{"model":"m1","prompt":"', b'"}'


def summary(received: Received) -> bytes:
    body = json.dumps({"bytes": received.body_bytes, "sha256": received.digest.hexdigest()}).encode()
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (
        len(body),
        body,
    )


@pytest.fixture(scope="module")
def large_node() -> Iterator[tuple[Node, RawUpstream]]:
    flags = (
        "--io-processes", "1", "--prepare-workers", "1", "--disable-health-check",
        "--prepare-timeout-ms", "60000", "--body-memory-bytes", str(2 << 30),
    )  # fmt: skip
    with (
        RawUpstream(summary, keeps_alive=True) as upstream,
        running(*flags, "--worker-urls", upstream.url) as node,
    ):
        yield node, upstream


def pieces(size: int) -> Iterator[bytes]:
    """A JSON body of exactly so many bytes; nobody holds it whole."""
    left = size - len(OPENING) - len(CLOSING)
    yield OPENING
    text = b"0123456789abcdef" * (PIECE // 16)
    while left >= PIECE:
        yield text
        left -= PIECE
    yield text[:left]
    yield CLOSING


def send_sized(client: socket.socket, size: int) -> str:
    """Send with Content-Length; return the digest of what was sent."""
    digest = hashlib.sha256()
    client.sendall(HEAD + b"content-length: %d\r\n\r\n" % size)
    for piece in pieces(size):
        digest.update(piece)
        client.sendall(piece)
    return digest.hexdigest()


def send_chunked(client: socket.socket, size: int) -> str:
    digest = hashlib.sha256()
    client.sendall(HEAD + b"transfer-encoding: chunked\r\n\r\n")
    for piece in pieces(size):
        digest.update(piece)
        if piece:
            client.sendall(b"%x\r\n" % len(piece))
            client.sendall(piece)
            client.sendall(b"\r\n")
    client.sendall(b"0\r\n\r\n")
    return digest.hexdigest()


def read_answer(client: socket.socket) -> tuple[bytes, bytes]:
    with client.makefile("rb") as file:
        head = b"".join(iter(file.readline, b"\r\n"))
        length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length"))
        return head, file.read(int(length.split(b":")[1]))


@pytest.mark.parametrize("send", [send_sized, send_chunked])
def test_512_mib_pass_byte_for_byte_and_their_memory_comes_back(large_node, send):
    node, _ = large_node
    before = memory(node)
    with node.connect(timeout=60) as client:
        digest = send(client, LARGEST)
        head, body = read_answer(client)
        assert head.startswith(b"HTTP/1.1 200"), body
        assert json.loads(body) == {"bytes": LARGEST, "sha256": digest}
        # The connection is still open, so this is not the work of its end.
        wait_until(lambda: not node.held(), f"left behind: {node.held()}")
        wait_until(lambda: shrunk(before, memory(node)), f"memory stays: {before} {memory(node)}")


def memory(node: Node) -> dict[str, int]:
    return {f"{row['role']}{row['index']}": row["rss_bytes"] for row in node.ps()}


def shrunk(before: dict[str, int], now: dict[str, int]) -> bool:
    return before.keys() == now.keys() and all(now[name] - before[name] < SLACK for name in now)


def test_one_byte_more_is_413(large_node):
    node, upstream = large_node
    seen = upstream.requests.qsize()
    with node.connect() as client:
        client.sendall(HEAD + b"content-length: %d\r\n\r\n" % (LARGEST + 1))
        head, body = read_answer(client)
    assert head.startswith(b"HTTP/1.1 413")
    assert json.loads(body)["error"]["code"] == "body_too_large"
    assert upstream.requests.qsize() == seen


def test_limit_is_512_mib_unless_told_otherwise():
    command = [sys.executable, "-m", "meshd", "--print-config"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert f"max_payload_size = {LARGEST}  # default" in text


def test_chunked_body_that_grows_over_the_limit_is_413_without_being_kept():
    with RawUpstream(summary) as upstream:
        flags = ("--io-processes", "1", "--prepare-workers", "1", "--disable-health-check")
        limits = ("--max-payload-size", str(8 << 20))
        with running(*flags, *limits, "--worker-urls", upstream.url) as node:
            for size, status in ((8 << 20, b"200"), ((8 << 20) + 1, b"413")):
                with node.connect() as client:
                    send_chunked(client, size)
                    assert read_answer(client)[0].split()[1] == status
            assert upstream.requests.qsize() == 1
            wait_until(lambda: not node.held(), f"left behind: {node.held()}")
