"""Starts the bundled upstream as a process and speaks to it over raw sockets."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.fakes.offspring import end_with_tests


@dataclass
class Answer:
    """All bytes of one connection, and whether it ended by a reset."""

    data: bytes
    was_reset: bool = False

    @property
    def status(self) -> int:
        return int(self.data.split(b" ", 2)[1])

    @property
    def head(self) -> bytes:
        return self.data.partition(b"\r\n\r\n")[0]

    @property
    def wire_body(self) -> bytes:
        return self.data.partition(b"\r\n\r\n")[2]

    @property
    def is_chunked(self) -> bool:
        return b"transfer-encoding: chunked" in self.head

    def header(self, name: str) -> str | None:
        for line in self.head.decode("latin-1").split("\r\n")[1:]:
            key, _, value = line.partition(": ")
            if key == name:
                return value
        return None

    @property
    def body(self) -> bytes:
        """The body without chunk framing; of an open chunk, the bytes that arrived."""
        if not self.is_chunked:
            return self.wire_body
        wire, pieces, at = self.wire_body, [], 0
        while (line_end := wire.find(b"\r\n", at)) >= 0:
            start, size = line_end + 2, int(wire[at:line_end], 16)
            pieces.append(wire[start : start + size])
            at = start + size + 2
        return b"".join(pieces)

    @property
    def is_complete(self) -> bool:
        if self.is_chunked:
            return self.wire_body.endswith(b"0\r\n\r\n")
        return len(self.wire_body) == int(self.header("content-length") or -1)

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """The data of each SSE event, parsed; ``[DONE]`` stays text."""
        found = []
        for event in self.body.decode().split("\n\n")[:-1]:
            data = event.rpartition("data: ")[2]
            found.append(data if data == "[DONE]" else json.loads(data))
        return found


class Backend:
    """A running upstream process."""

    def __init__(self, *flags: str, **popen: Any) -> None:
        command = [sys.executable, "-m", "meshd.backend", "--port", "0", *flags]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, preexec_fn=end_with_tests(), **popen
        )
        assert self.process.stdout is not None
        self.line = self.process.stdout.readline()
        self.port = int(self.line.rpartition(":")[2])

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=20)

    def ask(self, method: str, path: str, body: Any = b"", **headers: str) -> Answer:
        """Send one request with ``connection: close`` and read to the end of the connection."""
        with self.connect() as sock:
            sock.sendall(request_bytes(method, path, body, **{"connection": "close", **headers}))
            return read_to_end(sock)

    def post(self, path: str, body: Any, fault: str = "") -> Answer:
        return self.ask("POST", path, body, **({"x-backend-fault": fault} if fault else {}))

    def stats(self) -> dict[str, int]:
        stats: dict[str, int] = self.ask("GET", "/_backend/stats").json
        return stats

    def wait_for(self, **wanted: int) -> dict[str, int]:
        """Wait until the counters are as wanted; each look is an exchange with the upstream."""
        for _ in range(2000):
            stats = self.stats()
            if all(stats[name] == value for name, value in wanted.items()):
                return stats
        raise AssertionError(f"{stats} never became {wanted}")

    def stop(self) -> int:
        self.process.terminate()
        code = self.process.wait(20)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code


def request_bytes(method: str, path: str, body: Any = b"", **headers: str) -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"{method} {path} HTTP/1.1", "host: x", f"content-length: {len(data)}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + data


def read_to_end(sock: socket.socket) -> Answer:
    data = b""
    try:
        while piece := sock.recv(65536):
            data += piece
    except ConnectionResetError:
        return Answer(data, was_reset=True)
    return Answer(data)


@pytest.fixture(scope="session")
def shared_backend() -> Iterator[Backend]:
    backend = Backend()
    yield backend
    backend.stop()


@pytest.fixture
def start_backend() -> Iterator[Callable[..., Backend]]:
    started: list[Backend] = []

    def start(*flags: str, **popen: Any) -> Backend:
        started.append(Backend(*flags, **popen))
        return started[-1]

    yield start
    for backend in started:
        if backend.process.poll() is None:
            backend.stop()


@pytest.fixture
def raw_request() -> Callable[..., bytes]:
    return request_bytes


@pytest.fixture
def read_all() -> Callable[[socket.socket], Answer]:
    return read_to_end
