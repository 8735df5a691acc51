"""What a client connection needs from outside: its process, and the exchange in progress on it."""

from __future__ import annotations

from mmap import mmap
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from meshd.errors import MeshError
    from meshd.io.downstream import DownstreamConnection
    from meshd.io.http1 import RequestHead


class ActiveExchange(Protocol):
    """What a connection needs to know of the exchange that is in progress on it."""

    def client_gone(self, cause: str) -> None: ...

    def client_paused(self) -> None: ...

    def client_resumed(self) -> None: ...


class ConnectionServer(Protocol):
    """What a connection needs of its process."""

    scratch_map: mmap  # a slice of it is a copy, by one step
    scratch: memoryview  # the same memory
    head_scratch: memoryview  # its beginning
    header_timeout_s: float
    body_timeout_s: float
    idle_timeout_s: float
    write_timeout_s: float
    max_head_bytes: int
    is_draining: bool

    def now(self) -> float: ...

    def opened(self, connection: DownstreamConnection) -> None: ...

    def closed(self, connection: DownstreamConnection) -> None: ...

    def parse_head(self, raw: bytes) -> RequestHead: ...

    def start_exchange(self, connection: DownstreamConnection, head: RequestHead) -> ActiveExchange: ...

    def refuse(self, connection: DownstreamConnection, error: MeshError, head: bytes) -> bytes: ...
