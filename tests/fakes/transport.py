"""Stand-ins for what the event loop gives a protocol: a transport, its socket, and a clock."""

from __future__ import annotations

import asyncio
from typing import Any


class FakeClock:
    """A clock that moves only when told to."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> float:
        self.now += seconds
        return self.now


class FakeSocket:
    """Remembers the options set on it."""

    family = 0  # of no real address family, so that nothing is tuned

    def __init__(self) -> None:
        self.options: dict[tuple[int, int], Any] = {}

    def setsockopt(self, level: int, name: int, value: Any) -> None:
        self.options[(level, name)] = value


class FakeTransport(asyncio.Transport):
    """Records what a protocol does; the test plays the peer.

    Like a real one it delivers ``connection_lost`` only later, when ``settle`` is called, and refuses
    writes after ``write_eof``. While ``is_stuck`` the peer takes nothing: writes pile up in the buffer.
    """

    def __init__(self, protocol: asyncio.BaseProtocol, is_stuck: bool = False) -> None:
        super().__init__()
        self.protocol: Any = protocol
        self.is_stuck = is_stuck
        self.sent = bytearray()
        self.unsent = 0
        self.delivered = 0  # bytes that the protocol has read
        self.high, self.low = 65536, 16384
        self.is_reading_paused = False
        self.has_written_eof = False
        self.is_closed = False  # close() was called
        self.is_aborted = False
        self.is_lost = False
        self.socket = FakeSocket()
        self._is_protocol_paused = False
        protocol.connection_made(self)

    # ------------------------------------------------------------------------ what the protocol calls

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return {"peername": ("192.0.2.1", 40000), "socket": self.socket}.get(name, default)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self.high = 65536 if high is None else high
        self.low = self.high // 4 if low is None else low

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self.has_written_eof:
            raise RuntimeError("write after write_eof")
        if self.is_lost:
            raise RuntimeError("the handle is closed")
        if self.is_aborted:
            return
        self.sent += data
        if self.is_stuck:
            self.unsent += len(data)
            self._tell_pressure()

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.has_written_eof = True

    def pause_reading(self) -> None:
        assert not self.is_reading_paused
        self.is_reading_paused = True

    def resume_reading(self) -> None:
        assert self.is_reading_paused
        self.is_reading_paused = False

    def is_closing(self) -> bool:
        return self.is_closed or self.is_aborted

    def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None:
        self.is_aborted = True

    # ------------------------------------------------------------------------- what the test plays

    def take(self, count: int) -> None:
        """The peer takes ``count`` bytes of what is unsent."""
        self.unsent -= min(count, self.unsent)
        self._tell_pressure()

    def receive(self, data: bytes) -> None:
        """Deliver bytes as the loop would: not while paused, not after a close."""
        assert not self.is_closing(), "bytes were delivered to a closed connection"
        if isinstance(self.protocol, asyncio.BufferedProtocol):
            while data and not self.is_reading_paused and not self.is_closing():
                buffer = self.protocol.get_buffer(-1)
                count = min(len(buffer), len(data))
                buffer[:count] = data[:count]
                data = data[count:]
                self.delivered += count
                self.protocol.buffer_updated(count)
        else:
            self.delivered += len(data)
            self.protocol.data_received(data)

    def end(self) -> None:
        """The peer closes in good order."""
        if not self.protocol.eof_received() and not self.is_closing():
            self.close()
        self.settle()

    def reset(self) -> None:
        """The peer resets: what was unsent is gone, and nobody can tell how much it was."""
        self.unsent = 0
        self.is_aborted = True
        self.settle(ConnectionResetError(104, "Connection reset by peer"))

    def settle(self, cause: Exception | None = None) -> None:
        """Let the loop deliver the end of a connection that is closing."""
        if self.is_closing() and not self.is_lost and (self.is_aborted or not self.unsent):
            self.protocol.connection_lost(cause)
            self.is_lost = True

    def _tell_pressure(self) -> None:
        if not self._is_protocol_paused and self.unsent > self.high:
            self._is_protocol_paused = True
            self.protocol.pause_writing()
        elif self._is_protocol_paused and self.unsent <= self.low:
            self._is_protocol_paused = False
            self.protocol.resume_writing()
