"""A client on a raw socket whose answers are read by h11: an independent opinion on every byte meshd emits.

h11 is laxer than meshd about what it receives, so it never judges what must be refused; but whatever it
cannot read, or reads as a different message, is a fault of ours.
"""

from __future__ import annotations

import json
import socket
import threading
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import h11

MAX_HEAD_BYTES = 1 << 20


@dataclass
class Answer:
    """One final response as h11 read it; ``fields`` in order, with lower-case names."""

    status: int
    reason: bytes
    http_version: bytes
    fields: list[tuple[bytes, bytes]]
    body: bytes = b""
    interim: list[int] = field(default_factory=list)

    def values(self, name: str) -> list[str]:
        return [value.decode("latin-1") for key, value in self.fields if key == name.encode()]

    def value(self, name: str) -> str | None:
        """Return the only value of a field; a repeated one is a fault here."""
        found = self.values(name)
        assert len(found) <= 1, f"{name} came {len(found)} times"
        return found[0] if found else None

    @property
    def code(self) -> str | None:
        return self.value("x-mesh-error-code")

    def json(self) -> Any:
        return json.loads(self.body)


class Client:
    """One connection to a node; ``read`` gives the next answer, ``ends`` whether it ended clean."""

    def __init__(self, host: str, port: int, timeout: float = 10.0) -> None:
        self.socket = socket.create_connection((host, port), timeout=timeout)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._rest = b""
        self._has_ended = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _t: type[BaseException] | None, _e: BaseException | None, _b: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self.socket.close()

    def send(self, wire: bytes, piece: int = 0) -> None:
        """Send ``wire``, in pieces of so many bytes; who refused early may have closed meanwhile."""
        try:
            if not piece:
                self.socket.sendall(wire)
            for at in range(0, len(wire) if piece else 0, piece or 1):
                self.socket.sendall(wire[at : at + piece])
        except (BrokenPipeError, ConnectionResetError):
            pass

    def read(self, method: str = "POST") -> Answer:
        """Read one answer to a request of ``method``; interim responses are noted in it."""
        connection = h11.Connection(h11.CLIENT, max_incomplete_event_size=MAX_HEAD_BYTES)
        connection.send(
            h11.Request(method=method, target="/", headers=[("host", "h"), ("content-length", "0")])
        )
        connection.send(h11.EndOfMessage())
        answer: Answer | None = None
        interim: list[int] = []
        body: list[bytes] = []
        if self._rest:
            connection.receive_data(self._rest)
        while True:
            event = connection.next_event()
            if event is h11.NEED_DATA:
                piece = b"" if self._has_ended else self.socket.recv(65536)
                self._has_ended = self._has_ended or not piece
                assert piece or answer is not None, "the connection ended before a whole head"
                connection.receive_data(piece)
            elif isinstance(event, h11.InformationalResponse):
                interim.append(event.status_code)
            elif isinstance(event, h11.Response):
                answer = Answer(event.status_code, event.reason, event.http_version, list(event.headers))
            elif isinstance(event, h11.Data):
                body.append(bytes(event.data))
            elif isinstance(event, h11.EndOfMessage):
                assert not event.headers, "trailers never pass"
                assert answer is not None
                answer.body, answer.interim = b"".join(body), interim
                self._rest = connection.trailing_data[0]
                return answer
            else:
                raise AssertionError(f"h11 read {event!r}")

    @property
    def has_more(self) -> bool:
        """Whether bytes came behind the last answer that was read."""
        return bool(self._rest)

    def send_in_background(self, wire: bytes) -> None:
        """Send while this thread reads: neither side then waits for the other to take bytes."""
        threading.Thread(target=self.send, args=(wire,), daemon=True).start()

    def receive_exactly(self, count: int) -> bytes:
        """Return the next bytes as they are."""
        while len(self._rest) < count:
            piece = self.socket.recv(65536)
            assert piece, self._rest
            self._rest += piece
        data, self._rest = self._rest[:count], self._rest[count:]
        return data

    def ends(self) -> bool:
        """Wait for the end of the connection; true if nothing came before it."""
        if self._rest:
            return False
        if self._has_ended:
            return True
        try:
            return self.socket.recv(65536) == b""
        except ConnectionResetError:
            return False


def post(path: bytes, body: bytes, fields: bytes = b"content-type: application/json\r\n") -> bytes:
    """Return a whole POST with Content-Length."""
    return b"POST %b HTTP/1.1\r\nhost: h\r\n%bcontent-length: %d\r\n\r\n%b" % (path, fields, len(body), body)


def chunked(body: bytes, sizes: list[int], extension: bytes = b"", trailers: bytes = b"") -> bytes:
    """Return ``body`` in chunks of the given sizes; the rest goes into a last one."""
    parts = []
    for size in [*sizes, len(body)]:
        piece, body = body[:size], body[size:]
        if piece:
            parts.append(b"%x%b\r\n%b\r\n" % (len(piece), extension, piece))
    return b"".join(parts) + b"0" + extension + b"\r\n" + trailers + b"\r\n"
