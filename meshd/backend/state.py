"""What the upstream remembers of its traffic: counters, and the last requests with their bodies."""

from __future__ import annotations

import base64
from collections import deque
from dataclasses import asdict, dataclass
from typing import Any, Final

KEPT_REQUESTS: Final = 1000
KEPT_BODY_BYTES: Final = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Request:
    """One request as it was received; header names and values keep their bytes and order."""

    method: str
    target: str
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes
    connection: int
    is_keep_alive: bool = True
    is_http_10: bool = False

    @property
    def path(self) -> str:
        return self.target.partition("?")[0]

    def header(self, name: bytes) -> bytes | None:
        """Return the first value of ``name`` (lower case)."""
        return next((value for key, value in self.headers if key.lower() == name), None)

    def to_dict(self) -> dict[str, Any]:
        return {
            "method": self.method,
            "target": self.target,
            "headers": [[k.decode("latin-1"), v.decode("latin-1")] for k, v in self.headers],
            "body": base64.b64encode(self.body).decode(),
            "connection": self.connection,
        }


class RequestLog:
    """The last requests, oldest dropped first once either bound is passed; the newest always stays."""

    def __init__(self, capacity: int = KEPT_REQUESTS, body_bytes: int = KEPT_BODY_BYTES) -> None:
        self._capacity = capacity
        self._max_body_bytes = body_bytes
        self._requests: deque[Request] = deque()
        self._body_bytes = 0

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request: Request) -> None:
        self._requests.append(request)
        self._body_bytes += len(request.body)
        while len(self._requests) > 1 and (
            len(self._requests) > self._capacity or self._body_bytes > self._max_body_bytes
        ):
            self._body_bytes -= len(self._requests.popleft().body)

    def clear(self) -> int:
        """Forget all; return how many there were."""
        count = len(self._requests)
        self._requests.clear()
        self._body_bytes = 0
        return count

    def to_list(self) -> list[dict[str, Any]]:
        return [request.to_dict() for request in self._requests]


@dataclass(slots=True)
class Stats:
    """Counters of API requests; served + active + aborted = API requests received.

    ``served``: ended by this server, whatever the status or fault. ``aborted``: the client left first.
    ``connections``: accepted since the start. ``open_connections``: accepted and not yet closed.
    """

    served: int = 0
    active: int = 0
    max_active: int = 0
    aborted: int = 0
    connections: int = 0
    open_connections: int = 0

    def open_connection(self) -> int:
        """Count a new connection and return its number, from 1."""
        self.connections += 1
        self.open_connections += 1
        return self.connections

    def close_connection(self) -> None:
        self.open_connections -= 1

    def begin(self) -> None:
        self.active += 1
        self.max_active = max(self.max_active, self.active)

    def end(self, *, is_aborted: bool) -> None:
        self.active -= 1
        if is_aborted:
            self.aborted += 1
        else:
            self.served += 1

    def to_dict(self) -> dict[str, int]:
        return asdict(self)
