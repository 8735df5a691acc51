"""An upstream that answers each POST with given bytes, keeps what it received, and counts connections.

It reads requests with h11 as a server: an independent check of every request that meshd emits. A thread of
its own for each connection keeps it simple enough to be believed.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Self

import h11

NOT_FOUND = b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n"
RESET = struct.pack("ii", 1, 0)
MAX_HEAD_BYTES = 1 << 20
_ESTABLISHED = 1  # TCP_INFO's first byte


@dataclass
class Seen:
    """One POST as h11 read it; ``head`` are its bytes. ``connection`` numbers the connections from 1."""

    head: bytes
    connection: int
    target: bytes = b""
    fields: list[tuple[bytes, bytes]] = field(default_factory=list)
    body: bytes = b""

    def values(self, name: str) -> list[bytes]:
        return [value for key, value in self.fields if key == name.encode()]


@dataclass
class Script:
    """What to answer. ``ending`` after the bytes: `keep` the connection, `close` it, or `reset` it.

    ``reply`` may be pieces without end. ``pieces``: send in pieces of so many bytes, 0 for all at once.
    ``answers_early``: answer after the head of the request, and read none of its body until the peer closes.
    """

    reply: bytes | Callable[[Seen], bytes | Iterable[bytes]]
    ending: str = "keep"
    pieces: int = 0
    answers_early: bool = False


class ScriptedUpstream:
    """Answers GET with 404, so that probes and discovery learn nothing, and every POST by ``script``."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.seen: queue.Queue[Seen] = queue.Queue()
        self.sent_bytes = 0  # of all replies
        self.broken = 0  # replies that the peer did not take whole
        self.faults: list[str] = []  # what h11 said of requests it could not read
        self._numbers = 0
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for sock in list(self._open):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def take(self, timeout: float = 10.0) -> Seen:
        return self.seen.get(timeout=timeout)

    def forget(self) -> None:
        """Drop what was seen so far."""
        with contextlib.suppress(queue.Empty):
            while True:
                self.seen.get_nowait()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self._listener.accept()
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        self._open.add(sock)
        number = 0
        data = b""
        try:
            while True:
                head, data = _read_head(sock, data)
                if head.startswith(b"POST") and not number:
                    with self._lock:
                        self._numbers += 1
                        number = self._numbers
                data = self._exchange(sock, head, data, number)
        except (OSError, EOFError):
            pass
        finally:
            self._open.discard(sock)
            sock.close()

    def _exchange(self, sock: socket.socket, head: bytes, data: bytes, number: int) -> bytes:
        seen = Seen(head, number)
        script = self.script
        is_post = head.startswith(b"POST")
        if not (is_post and script.answers_early):
            try:
                data = _read_request(sock, seen, data)
            except h11.RemoteProtocolError as error:
                self.faults.append(f"{error}: {head!r}")
                raise EOFError from error
        if not is_post:
            sock.sendall(NOT_FOUND)
            return data
        self.seen.put(seen)
        reply = script.reply if isinstance(script.reply, bytes) else script.reply(seen)
        try:
            for piece in _pieces(reply, script.pieces) if isinstance(reply, bytes) else reply:
                sock.sendall(piece)
                self.sent_bytes += len(piece)
        except OSError:
            self.broken += 1
            raise
        if is_post and script.answers_early:
            while sock.recv(1 << 20, socket.MSG_PEEK) and not _peer_has_closed(sock):
                time.sleep(0.005)
            raise EOFError
        if script.ending == "reset":
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        if script.ending != "keep":
            raise EOFError
        return data


def _pieces(data: bytes, size: int) -> Iterator[bytes]:
    step = size or len(data) or 1
    return (data[at : at + step] for at in range(0, len(data), step))


def _peer_has_closed(sock: socket.socket) -> bool:
    """Say whether the peer has closed, without taking what it sent before."""
    state = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
    return state != _ESTABLISHED


def _read_head(sock: socket.socket, data: bytes) -> tuple[bytes, bytes]:
    while b"\r\n\r\n" not in data:
        data += _receive(sock)
    end = data.index(b"\r\n\r\n") + 4
    return data[:end], data[end:]


def _read_request(sock: socket.socket, seen: Seen, data: bytes) -> bytes:
    """Read the request whose head is known with h11; return the bytes behind it."""
    connection = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD_BYTES)
    connection.receive_data(seen.head + data)
    body: list[bytes] = []
    while True:
        event: Any = connection.next_event()
        if event is h11.NEED_DATA:
            connection.receive_data(_receive(sock))
        elif isinstance(event, h11.Request):
            seen.target, seen.fields = event.target, list(event.headers)
        elif isinstance(event, h11.Data):
            body.append(bytes(event.data))
        else:
            assert isinstance(event, h11.EndOfMessage), event
            seen.body = b"".join(body)
            return connection.trailing_data[0]


def _receive(sock: socket.socket) -> bytes:
    piece = sock.recv(1 << 20)
    if not piece:
        raise EOFError
    return piece
