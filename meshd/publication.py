"""A value that one process publishes to all others in shared memory, whole or not at all.

The writer fills the buffer that is *not* in force and then stores one word, so a reader sees the old value
or the new one, and a writer that dies half way leaves the old one in force. Within its part of a segment::

    +0     generation in force, 0: nothing published yet; its buffer is number ``generation & 1``
    +64    buffer 0: generation (0 while it is written) | bytes | xxh3_64 of them | … | at +64: payload
    …      buffer 1: the same

A reader takes the generation, copies that buffer, and believes the copy if the buffer still has that
generation afterwards. It can fail only if two publications overtake the copy, and then reads again.
On x86-64 stores stay in order and so do loads; the checksum covers the copy itself, which may use
weakly ordered string stores. The payload is JSON: a change is rare, and a person can read it.
"""

from __future__ import annotations

from typing import Any, Final

import orjson
from xxhash import xxh3_64_intdigest

from meshd.memory import HEADER_BYTES, Segment

LINE: Final = 64

_MAX_READS: Final = 1000


class DoesNotFit(ValueError):
    """The value is larger than its buffer; the old one is still in force."""


class Publication:
    """One published value: ``size`` bytes of ``segment`` from ``start`` on, a multiple of 64.

    By default all that follows the header. ``publish`` is for the one writer alone; its successor goes on
    with the generations of the one that died. ``words[generation_word]`` is the generation in force, for
    those who look at it for every request.
    """

    __slots__ = ("_bytes", "_payload_bytes", "_start", "_stride", "generation_word", "words")

    def __init__(self, segment: Segment, start: int = HEADER_BYTES, size: int | None = None) -> None:
        self.words = segment.words
        self._bytes = segment.bytes
        self.generation_word = start // 8
        self._start = start + LINE
        room = segment.size - start if size is None else size
        self._stride = (room - LINE) // 2 // LINE * LINE
        self._payload_bytes = self._stride - LINE

    def generation(self) -> int:
        """Return the number of the generation in force; one load."""
        return int(self.words[self.generation_word])

    def publish(self, value: Any) -> int:
        """Put ``value``, plain JSON, in force as the next generation and return its number.

        Raises ``DoesNotFit``; nothing has changed then.
        """
        payload = orjson.dumps(value)
        if len(payload) > self._payload_bytes:
            raise DoesNotFit(f"a value of {len(payload)} bytes does not fit into its shared memory")
        generation = self.generation() + 1
        head, start = self._buffer(generation)
        self.words[head] = 0
        self._bytes[start : start + len(payload)] = payload
        self.words[head + 1] = len(payload)
        self.words[head + 2] = xxh3_64_intdigest(payload)
        self.words[head] = generation
        self.words[self.generation_word] = generation
        return generation

    def read(self) -> tuple[int, Any]:
        """Return the generation in force and its value; ``(0, None)`` if nothing was published.

        Raises ``RuntimeError`` when the memory does not hold what its words say.
        """
        for _ in range(_MAX_READS):
            generation = self.generation()
            if generation == 0:
                return 0, None
            head, start = self._buffer(generation)
            if self.words[head] != generation:
                continue
            length, checksum = self.words[head + 1], self.words[head + 2]
            payload = bytes(self._bytes[start : start + min(length, self._payload_bytes)])
            if self.words[head] == generation and xxh3_64_intdigest(payload) == checksum:
                return generation, orjson.loads(payload)
        raise RuntimeError("a publication in shared memory is damaged")

    def _buffer(self, generation: int) -> tuple[int, int]:
        """Return the index of the buffer's first head word and the offset of its payload."""
        offset = self._start + (generation & 1) * self._stride
        return offset // 8, offset + LINE

    def __repr__(self) -> str:
        return f"Publication(generation={self.generation()}, {self._payload_bytes} bytes)"
