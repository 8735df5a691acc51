"""More clients than a process may hold: the cap, and what happens when descriptors run short."""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.certificates import Authority
from tests.fakes.node import Backend, Node, running, wait_until

DESCRIPTORS = 256
CAP = int(DESCRIPTORS * 0.4)
CHAT = json.dumps({"model": "m1", "messages": [{"role": "user", "content": "hello"}]}).encode()
ASK = (
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: m\r\ncontent-type: application/json\r\n"
    b"content-length: %d\r\n\r\n%b" % (len(CHAT), CHAT)
)
SMALL = ("--io-processes", "1", "--prepare-workers", "1", "--prepare-queue-capacity", "1000")
LIVENESS = b"GET /liveness HTTP/1.1\r\nhost: m\r\n\r\n"


@pytest.fixture(scope="module")
def few_descriptors(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python whose processes have few descriptors."""
    path = tmp_path_factory.mktemp("python") / "python"
    path.write_text(f'#!/bin/sh\nulimit -n {DESCRIPTORS}\nexec "{sys.executable}" "$@"\n')
    path.chmod(0o755)
    return path


@contextlib.contextmanager
def small_node(python: Path, monkeypatch: pytest.MonkeyPatch, *flags: str) -> Iterator[Node]:
    backend = Backend("--model", "m1")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", str(python))
        starting = running(*SMALL, *flags, backends=(backend,))
        node = starting.__enter__()
    try:
        yield node
    finally:
        starting.__exit__(None, None, None)
        backend.stop()


def exchange(client: socket.socket, request: bytes) -> bytes:
    """Send one request and read its whole answer by content-length."""
    client.sendall(request)
    return answer_of(client)


def answer_of(client: socket.socket) -> bytes:
    data = b""
    while b"\r\n\r\n" not in data:
        data += _some(client)
    head, body = data.split(b"\r\n\r\n", 1)
    length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
    while len(body) < length:
        body += _some(client)
    return head + b"\r\n\r\n" + body


def _some(client: socket.socket) -> bytes:
    data = client.recv(65536)
    assert data, "the connection was closed without a whole answer"
    return data


def test_at_the_cap_a_new_client_gets_503_and_the_others_are_not_disturbed(
    few_descriptors: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with small_node(few_descriptors, monkeypatch) as node, contextlib.ExitStack() as stack:
        clients = [stack.enter_context(node.connect(20)) for _ in range(CAP)]
        for client in clients:
            assert exchange(client, LIVENESS).startswith(b"HTTP/1.1 200")
        with node.connect(20) as late:
            refused = answer_of(late)
            head, body = refused.split(b"\r\n\r\n", 1)
            assert head.startswith(b"HTTP/1.1 503")
            assert b"connection: close" in head
            assert b"retry-after: 1" in head
            assert json.loads(body)["error"]["code"] == "too_many_connections"
            assert late.recv(10) == b""
        # Every one of them at once also gets an upstream connection of its own.
        for client in clients:
            client.sendall(ASK)
        for client in clients:
            assert answer_of(client).startswith(b"HTTP/1.1 200")
        clients[0].close()
        wait_until(lambda: _is_served(node), "a free place was not given to the next client")


def test_a_rush_of_clients_is_answered_without_one_being_dropped(
    few_descriptors: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with small_node(few_descriptors, monkeypatch) as node, contextlib.ExitStack() as stack:
        clients = [stack.enter_context(node.connect(20)) for _ in range(CAP)]
        for client in clients:
            assert exchange(client, LIVENESS).startswith(b"HTTP/1.1 200")
        rush = [stack.enter_context(node.connect(20)) for _ in range(300)]
        for client in clients:
            client.sendall(ASK)
        for client in clients:
            assert answer_of(client).startswith(b"HTTP/1.1 200")
        for client in rush:
            assert answer_of(client).startswith(b"HTTP/1.1 503")
            client.close()
        assert any(line.get("event") == "accepting_paused" for line in node.lines)
        clients.pop().close()
        wait_until(lambda: _is_served(node), "accepting did not go on")


def test_over_tls_the_cap_answers_too_and_silent_handshakes_do_not_use_it_up(
    few_descriptors: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    authority = Authority(tmp_path)
    pair = authority.issue()
    flags = ("--tls-cert-path", pair.cert, "--tls-key-path", pair.key, "--client-header-timeout-secs", "0.5")
    context = authority.client_context()
    with small_node(few_descriptors, monkeypatch, *flags) as node, contextlib.ExitStack() as stack:

        def dial() -> ssl.SSLSocket:
            return stack.enter_context(context.wrap_socket(node.connect(20), server_hostname="127.0.0.1"))

        # More than there are descriptors: they time out by turns, and nobody else is dropped for them.
        silent = [stack.enter_context(node.connect(20)) for _ in range(DESCRIPTORS)]
        clients = [dial()]
        assert exchange(clients[0], ASK).startswith(b"HTTP/1.1 200")
        for client in silent:
            client.close()
        while len(clients) < CAP:
            clients.append(dial())
            assert exchange(clients[-1], LIVENESS).startswith(b"HTTP/1.1 200")
        assert answer_of(dial()).startswith(b"HTTP/1.1 503")
        assert exchange(clients[-1], ASK).startswith(b"HTTP/1.1 200")


def _is_served(node: Node) -> bool:
    with node.connect() as client:
        return exchange(client, LIVENESS).startswith(b"HTTP/1.1 200")
