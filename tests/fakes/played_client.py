"""A client connection as it is, on a transport that the test plays."""

from __future__ import annotations

import socket
from mmap import mmap
from typing import Any

from meshd.io.downstream import DownstreamConnection
from tests.fakes.transport import FakeClock, FakeTransport


class _Process:
    """What a connection needs of its process, of which a response needs next to nothing."""

    header_timeout_s = body_timeout_s = idle_timeout_s = write_timeout_s = 60.0
    max_head_bytes = 65536
    is_draining = False

    def __init__(self) -> None:
        self.scratch_map = mmap(-1, 4096)
        self.scratch = self.head_scratch = memoryview(self.scratch_map)
        self.now = FakeClock()

    def opened(self, connection: DownstreamConnection) -> None: ...

    def closed(self, connection: DownstreamConnection) -> None: ...


class PlayedClient:
    """What it was sent, and how it was cut: ``abort`` or ``reset``, empty if it was not."""

    def __init__(self) -> None:
        process: Any = _Process()
        self.connection = DownstreamConnection(process)
        self.transport = FakeTransport(self.connection)

    @property
    def sent(self) -> bytes:
        return bytes(self.transport.sent)

    @property
    def cut(self) -> str:
        if not self.transport.is_aborted:
            return ""
        return "reset" if (socket.SOL_SOCKET, socket.SO_LINGER) in self.transport.socket.options else "abort"
