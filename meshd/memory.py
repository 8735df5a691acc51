"""Shared memory segments: a memfd mapped by every process that inherited its descriptor.

Nothing here has a name in a file system, so nothing can leak after a crash, be unlinked by a stranger,
or run into a container's 64 MB ``/dev/shm``. A segment is sparse: its size is address space, its cost is
the pages touched so far.

Every segment opens with one cache line that says what it is::

    word 0   magic     "MESHDSEG" as a little-endian integer
    word 1   kind      FNV-1a 64 of the segment's kind, e.g. "rings"
    word 2   version   layout version of that kind
    word 3   size      bytes of the whole segment
    word 4-7 zero

Why plain stores are enough. All sharing is by aligned 64-bit words with one writer each, written by item
stores of a ``memoryview.cast("Q")``. CPython compiles such a store to one 8-byte move, and x86-64 makes
aligned 8-byte moves atomic and keeps stores in program order (TSO): who sees a tail word sees the payload
stored before it. ``struct`` with a byte order mark and unaligned stores do tear; neither is used for a
shared word. On a CPU with weaker ordering none of this holds and Python has no fence to offer, so there
meshd refuses to start.
"""

from __future__ import annotations

import mmap
import os
import platform
import threading
from typing import Final

from meshd.errors import StartupError

HEADER_BYTES: Final = 64
PAGE: Final = 4096

_MAGIC: Final = int.from_bytes(b"MESHDSEG", "little")
_ORDERED_MACHINES: Final = ("x86_64", "AMD64")


class Segment:
    """One mapped memfd; ``bytes`` and ``words`` are views of the whole of it, header included.

    ``map`` is the mapping itself: a slice of it is a copy at once, with no view made in between.

    The views live as long as the mapping, which lives as long as anyone holds a view. ``fd`` stays open so
    that the segment can be handed to a child with ``pass_fds``; it is close-on-exec otherwise.
    """

    __slots__ = ("bytes", "fd", "map", "size", "words")

    def __init__(self, fd: int, size: int) -> None:
        self.fd = fd
        self.size = size
        self.map = mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        self.bytes = memoryview(self.map)
        self.words = self.bytes.cast("Q")

    @classmethod
    def create(cls, kind: str, size: int, version: int = 1) -> Segment:
        """Create a zeroed segment of at least ``size`` bytes (rounded up to a page)."""
        refuse_weak_ordering(platform.machine())
        size = round_up(max(size, HEADER_BYTES), PAGE)
        fd = os.memfd_create(f"meshd:{kind}")
        os.ftruncate(fd, size)
        segment = cls(fd, size)
        words = segment.words
        words[1] = _kind_hash(kind)
        words[2] = version
        words[3] = size
        words[0] = _MAGIC  # last: a segment without it is not one
        return segment

    @classmethod
    def attach(cls, fd: int, kind: str, version: int = 1) -> Segment:
        """Map a segment that another process made.

        Raises ``StartupError`` if the descriptor holds anything but this kind in this version: a process of
        another release, or a descriptor number mixed up, must never be let near the words.
        """
        refuse_weak_ordering(platform.machine())
        size = os.fstat(fd).st_size
        if size < HEADER_BYTES:
            raise StartupError(f"descriptor {fd} is no shared segment: {size} bytes")
        segment = cls(fd, size)
        expected = (_MAGIC, _kind_hash(kind), version, size)
        found = tuple(segment.words[:4])
        if found != expected:
            raise StartupError(
                f"descriptor {fd} does not hold the segment {kind!r} version {version}"
                f" (header {found}, expected {expected}); start every process from the same release"
            )
        return segment

    def discard(self, offset: int, length: int) -> None:
        """Give the pages of ``[offset, offset + length)`` back; they read as zeros afterwards.

        Both must be multiples of ``PAGE``. Costs one system call and a TLB flush, so it is for large
        extents and start-up, not for every request.
        """
        if length:
            self.map.madvise(mmap.MADV_REMOVE, offset, length)

    def close(self) -> None:
        """Close the descriptor. The mapping stays until the last view of it is gone."""
        os.close(self.fd)

    def __repr__(self) -> str:
        return f"Segment(fd={self.fd}, size={self.size})"


class Fence:
    """A full memory fence: a store made before it is seen by others before any later load is done.

    x86-64 keeps every order but this one, store then load. Taking a free lock is the locked
    compare-and-exchange of a POSIX semaphore, which drains the store buffer; it costs 0.06 µs. Nobody
    else knows this lock, so it is never contended.
    """

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def __call__(self) -> None:
        self._lock.acquire()
        self._lock.release()


def refuse_weak_ordering(machine: str) -> None:
    """Raise ``StartupError`` on a CPU whose stores another CPU may see out of order."""
    if machine not in _ORDERED_MACHINES:
        raise StartupError(
            f"meshd shares memory between processes without fences, which needs x86-64; this is {machine!r}"
        )


def round_up(value: int, unit: int) -> int:
    """Return the least multiple of ``unit`` that is not below ``value``."""
    return -(-value // unit) * unit


def _kind_hash(kind: str) -> int:
    """FNV-1a 64: short, stable between releases and Pythons, and no secret."""
    value = 0xCBF29CE484222325
    for byte in kind.encode():
        value = (value ^ byte) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    return value
