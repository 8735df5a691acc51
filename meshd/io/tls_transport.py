"""Transports over TLS that tell the truth about what is unsent, and take large bodies piece by piece.

A TLS transport of the event loop counts only what TLS itself holds back. What it has handed to the TCP
transport below is not in that number, so 100 MB of an unsent request would count as none. Hence these wrap
both. The limits of write buffers are halved, one half for each, so that the sum is what a protocol asked for.

    write → TLS ciphers it at once, in memory of its own → TCP: what the kernel does not take waits
              └─ holds ciphertext back while TCP is over its limit; over its own limit: pause_writing

TLS ciphers whatever it is given in one go: half a gigabyte would stop the loop for half a second and fill as
much memory outside every budget. So `UpstreamTlsTransport.writelines` keeps the plain bytes, in the slot
where they are, and gives TLS a piece whenever it holds nothing back.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
from collections import deque
from collections.abc import Iterable
from typing import Any, Final

PIECE_BYTES: Final = 262144
TURN_BYTES: Final = 1 << 20  # ciphered in one turn of the loop, some 1 ms
# A peer that closes or answers our close_notify ends this sooner. It bounds the flush of a last answer too.
SHUTDOWN_SECS: Final = 30.0
_M_MMAP_THRESHOLD: Final = -3  # malloc.h of glibc
_MMAP_THRESHOLD_BYTES: Final = 131072  # what it is at start


def map_buffers_singly() -> None:
    """Have the memory of each closed TLS connection given back to the system.

    uvloop's TLS has a buffer of 256 KiB for each connection. After the first of them is freed, glibc would
    take the next ones from its heap, and there they stay: of 2,000 clients that had each sent 200 kB and
    left, 143 KiB each remained, with this 21 KiB. Another C library has no such habit, and no such call.
    """
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES)


class _Lost(asyncio.Transport):
    """Stands for both layers once the connection is lost."""

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...

    def get_write_buffer_size(self) -> int:
        return 0

    def write(self, data: bytes | bytearray | memoryview) -> None: ...

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview]) -> None: ...

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def is_closing(self) -> bool:
        return True

    def close(self) -> None: ...

    def abort(self) -> None: ...


_LOST: Final = _Lost()


class TlsTransport(asyncio.Transport):
    """``tls`` over ``tcp``; both are transports of the event loop.

    Its protocol calls `lost` when the connection is. The event loop's TLS keeps its protocol for ever, so the
    two would be a cycle, and the 256 KiB buffer of each closed connection would wait for a full collection.
    """

    def __init__(self, tls: asyncio.Transport, tcp: asyncio.Transport) -> None:
        super().__init__()
        self._tls: asyncio.Transport = tls
        self._tcp: asyncio.Transport = tcp

    def __repr__(self) -> str:
        return f"{type(self).__name__}(unsent={self.get_write_buffer_size()})"

    def lost(self) -> None:
        """Let go of both layers: from now on nothing is sent, and nothing is unsent."""
        self._tls = self._tcp = _LOST

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._tls.get_extra_info(name, default)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        halves = {"high": None if high is None else high // 2, "low": None if low is None else low // 2}
        if not self._tcp.is_closing():
            self._tcp.set_write_buffer_limits(**halves)
        self._tls.set_write_buffer_limits(**halves)

    def get_write_buffer_size(self) -> int:
        return self._tls.get_write_buffer_size() + self._tcp.get_write_buffer_size()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._tls.write(data)

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview]) -> None:
        self._tls.writelines(list_of_data)

    def can_write_eof(self) -> bool:
        return False  # TLS as the event loop has it knows no half-close

    def pause_reading(self) -> None:
        self._tls.pause_reading()

    def resume_reading(self) -> None:
        self._tls.resume_reading()

    def is_closing(self) -> bool:
        return self._tls.is_closing()

    def close(self) -> None:
        self._tls.close()

    def abort(self) -> None:
        self._tls.abort()


class UpstreamTlsTransport(TlsTransport):
    """Sends what `writelines` was given piece by piece; its protocol calls `hold` and `go_on`."""

    def __init__(
        self, tls: asyncio.Transport, tcp: asyncio.Transport, loop: asyncio.AbstractEventLoop
    ) -> None:
        super().__init__(tls, tcp)
        self._loop = loop
        self._rest: deque[memoryview] = deque()
        self._rest_bytes = 0
        self._is_full = False
        self._is_scheduled = False

    def get_write_buffer_size(self) -> int:
        return self._rest_bytes + super().get_write_buffer_size()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._rest:
            self.writelines((data,))
        else:
            self._tls.write(data)

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview]) -> None:
        """Send these after each other; they are read until `get_write_buffer_size` is 0."""
        for data in list_of_data:
            view = memoryview(data)
            if view.nbytes:
                self._rest.append(view)
                self._rest_bytes += view.nbytes
        self._feed()

    def hold(self) -> None:
        """TLS holds enough back: give it no more."""
        self._is_full = True

    def go_on(self) -> None:
        self._is_full = False
        self._feed()

    def abort(self) -> None:
        self._drop()
        super().abort()

    def lost(self) -> None:
        self._drop()
        super().lost()

    def _drop(self) -> None:
        """Forget what is unsent: its owner may use that memory for something else."""
        self._rest.clear()
        self._rest_bytes = 0

    def _feed(self) -> None:
        rest = self._rest
        budget = TURN_BYTES
        while rest and not self._is_full and budget > 0:
            piece = rest[0][:PIECE_BYTES]
            if len(piece) == len(rest[0]):
                rest.popleft()
            else:
                rest[0] = rest[0][PIECE_BYTES:]
            self._rest_bytes -= len(piece)
            budget -= len(piece)
            self._tls.write(piece)
        if rest and not self._is_full and not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._next_turn)

    def _next_turn(self) -> None:
        self._is_scheduled = False
        self._feed()
