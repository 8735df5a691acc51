"""The prefix index: which upstreams have lately been sent a prompt that begins like this one.

One index for the node, in shared memory, read and written by every I/O process without a lock::

    64-byte segment header
    cells     64 bytes for each I/O seat: entries added; one more, the controller's: entries swept
    buckets   64 bytes each: eight entries

    entry     fingerprint (32) | last use (22) | upstream number (10)      0: free

A key's bucket is ``key % buckets``; its fingerprint is its upper half. An entry says that the upstream holds
the prefix that the key names (api/block_keys.py). A key has at most four, all in its one bucket; a fifth
holder replaces the one used longest ago, and a full bucket drops its entry used longest ago.

Each entry is one aligned 64-bit word, so a reader sees the old or the new one. Two processes that write one
slot at once lose one of two entries, which is a miss later and nothing worse; so is a false bucket-mate with
the same 32-bit fingerprint (one in 500 million). What an entry says is never trusted further than a hint: a
holder counts only if it is a candidate.

Last use counts units of 0.134 s and wraps after 6.5 days; a sleeping entry then looks young again, which
costs a bucket one worse choice.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Collection, Container, Iterator
from typing import Final

from meshd.api.block_keys import bytes_covered
from meshd.memory import HEADER_BYTES, Segment

SEGMENT_KIND: Final = "prefix_index"
BUCKET_ENTRIES: Final = 8
MAX_HOLDERS: Final = 4
MIN_BYTES: Final = 65536

_BUCKET_BYTES: Final = 8 * BUCKET_ENTRIES
_CELL_BYTES: Final = 64
_NUMBER_BITS: Final = 10
_NUMBER_MASK: Final = (1 << _NUMBER_BITS) - 1
_USE_BITS: Final = 22
_USE_MASK: Final = (1 << _USE_BITS) - 1
_FINGERPRINT_SHIFT: Final = 32
_TICK_SHIFT: Final = 27  # nanoseconds >> 27: units of 0.134 s
_SWEEP_ENTRIES: Final = 65536
_FEW_KEYS: Final = 4  # beyond so many keys an insert looks first for what it may leave alone
_LONG_KEYS: Final = 64
_FRESH_USE: Final = 64  # a last use of 8.6 s ago is as good as now


def segment_bytes(index_bytes: int, io_seats: int) -> int:
    """Return the size of a segment whose buckets take ``index_bytes``, at most."""
    return _buckets_at(io_seats) + index_bytes // _BUCKET_BYTES * _BUCKET_BYTES


def _buckets_at(io_seats: int) -> int:
    return HEADER_BYTES + (io_seats + 1) * _CELL_BYTES


class Match:
    """The deepest prefix found: ``number`` holds ``matched_bytes`` of the text."""

    __slots__ = ("matched_bytes", "number")

    def __init__(self, number: int, matched_bytes: int) -> None:
        self.number = number
        self.matched_bytes = matched_bytes

    def __repr__(self) -> str:
        return f"Match(upstream {self.number}, {self.matched_bytes} bytes)"


class PrefixIndex:
    """The index as one process sees it.

    ``seat``: the I/O seat whose cell this process counts in; the controller passes ``io_seats``.
    ``index_bytes``: of the buckets, as in ``segment_bytes``. ``clock``: monotonic nanoseconds.
    """

    def __init__(
        self,
        segment: Segment,
        seat: int,
        io_seats: int,
        index_bytes: int,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        if index_bytes < MIN_BYTES or segment.size < segment_bytes(index_bytes, io_seats):
            raise ValueError(f"a segment of {segment.size} bytes holds no index of {index_bytes}")
        self._fd = segment.fd
        self._words = segment.words
        self._first = _buckets_at(io_seats) // 8
        self._buckets = index_bytes // _BUCKET_BYTES
        self._cells = [(HEADER_BYTES + cell * _CELL_BYTES) // 8 for cell in range(io_seats + 1)]
        self._cell = self._cells[seat]
        self._clock = clock
        self.evictions = 0  # entries this process has dropped for room

    @property
    def limit_bytes(self) -> int:
        return self._buckets * _BUCKET_BYTES

    @property
    def entries(self) -> int:
        """Entries in use, about: processes that met in a bucket may have counted one twice."""
        *added, swept = (self._words[cell] for cell in self._cells)
        return max(0, sum(added) - swept)

    def match(self, keys: bytes, text_bytes: int, numbers: Container[int]) -> Match | None:
        """Return the longest match among upstream ``numbers``; the latest user wins ties.

        O(log keys): the deepest key that any of them holds is found by bisection, since who holds a prefix
        holds all shorter ones. A hole left by an eviction may shorten the match.
        """
        if not keys:
            return None
        packed = memoryview(keys).cast("Q")
        best = -1
        low = 0
        high = len(packed)
        while low < high:  # keys below low are held, those from high on are not
            middle = (low + high) >> 1
            holder = self._holder(packed[middle], numbers)
            if holder >= 0:
                best = holder
                low = middle + 1
            else:
                high = middle
        return Match(best, bytes_covered(low, text_bytes)) if best >= 0 else None

    def matched_bytes(self, keys: bytes, text_bytes: int, number: int) -> int:
        """Return how many bytes of the text one upstream holds."""
        found = self.match(keys, text_bytes, (number,))
        return 0 if found is None else found.matched_bytes

    def insert(self, keys: bytes, number: int) -> None:
        """Note that upstream ``number`` now holds the text of ``keys``: 1 µs for each key that is news.

        Keys that it was noted to hold some seconds ago are left as they are: half of a short text, and of a
        long one all that it holds.
        """
        if not keys:
            return
        words, first, buckets = self._words, self._first, self._buckets
        now = self._clock() >> _TICK_SHIFT & _USE_MASK
        packed = memoryview(keys).cast("Q")
        if len(packed) > _FEW_KEYS:
            packed = packed[self._first_stale(packed, number, now) :]
        holder = now << _NUMBER_BITS | number
        added = 0
        for key in packed:
            start = first + key % buckets * BUCKET_ENTRIES
            fingerprint = key >> _FINGERPRINT_SHIFT
            place = -1
            free = -1
            mates = 0  # other holders of this key
            oldest = oldest_mate = -1
            age = mate_age = -1
            at = start
            for entry in words[start : start + BUCKET_ENTRIES]:
                if not entry:
                    if free < 0:
                        free = at
                else:
                    idle = (now - (entry >> _NUMBER_BITS)) & _USE_MASK
                    if idle > age:
                        age, oldest = idle, at
                    if entry >> _FINGERPRINT_SHIFT == fingerprint:
                        if entry & _NUMBER_MASK == number:
                            place = at
                            break
                        mates += 1
                        if idle > mate_age:
                            mate_age, oldest_mate = idle, at
                at += 1
            if place < 0:
                if mates >= MAX_HOLDERS:
                    place = oldest_mate
                elif free >= 0:
                    place = free
                    added += 1
                else:
                    place = oldest
                    self.evictions += 1
            words[place] = fingerprint << _FINGERPRINT_SHIFT | holder
        if added:
            words[self._cell] += added

    def sweep(self, is_gone: Callable[[int], bool]) -> Iterator[int]:
        """Free the entries of upstreams that ``is_gone``, a part of the index at each step.

        For the controller, which lets others run between steps of some milliseconds. Yields the entries
        freed by each. Memory that was never touched is not touched now.
        """
        words = self._words
        gone = [is_gone(number) for number in range(_NUMBER_MASK + 1)]
        for start, stop in self._extents():
            part = words[start:stop]
            stale = [at for at, entry in enumerate(part) if entry and gone[entry & _NUMBER_MASK]]
            freed = 0
            for at in stale:
                entry = words[start + at]  # it may have been replaced meanwhile
                if entry and gone[entry & _NUMBER_MASK]:
                    words[start + at] = 0
                    freed += 1
            words[self._cell] += freed
            yield freed

    def _extents(self) -> Iterator[tuple[int, int]]:
        """Yield runs of words that may hold entries: those whose pages exist. A read makes a page."""
        end = (self._first + self._buckets * BUCKET_ENTRIES) * 8
        at = self._first * 8
        while at < end:
            try:
                at = max(at, os.lseek(self._fd, at, os.SEEK_DATA))
            except OSError as error:
                if error.errno == errno.ENXIO:  # nothing from there on
                    return
                raise
            stop = min(end, os.lseek(self._fd, at, os.SEEK_HOLE), at + 8 * _SWEEP_ENTRIES)
            if at < end:
                yield at // 8, stop // 8
            at = stop

    def forget(self, numbers: Collection[int]) -> Iterator[int]:
        """Free the entries of upstreams ``numbers``, as ``sweep`` does."""
        return self.sweep(numbers.__contains__)

    def _first_stale(self, packed: memoryview[int], number: int, now: int) -> int:
        """Return where an insert has to begin: at 0 unless the middle key is fresh.

        A conversation's last insert wrote the keys of its last turn. If the middle of what it has now was
        written some seconds ago, so was all before it, up to the time in which it doubled; and as it is not
        written now, the whole is again before long. A long text goes on at the deepest key held. A short one
        goes on behind the middle: its beginning may be that of many, and fresh by the others' use.
        """
        low = len(packed) >> 1
        if not 0 <= self._idle(packed[low], number, now) <= _FRESH_USE:
            return 0
        if len(packed) <= _LONG_KEYS:
            return low + 1
        high = len(packed)
        while high - low > 1:  # key low is held, key high is not
            middle = (low + high) >> 1
            if self._idle(packed[middle], number, now) >= 0:
                low = middle
            else:
                high = middle
        return low

    def _idle(self, key: int, number: int, now: int) -> int:
        """Return for how many units ``number`` has not used this key, −1 if it does not hold it."""
        start = self._first + key % self._buckets * BUCKET_ENTRIES
        fingerprint = key >> _FINGERPRINT_SHIFT
        for entry in self._words[start : start + BUCKET_ENTRIES]:
            if entry and entry >> _FINGERPRINT_SHIFT == fingerprint and entry & _NUMBER_MASK == number:
                return (now - (entry >> _NUMBER_BITS)) & _USE_MASK
        return -1

    def _holder(self, key: int, numbers: Container[int]) -> int:
        """Return the upstream of ``numbers`` that has used this key last, −1 if none holds it."""
        start = self._first + key % self._buckets * BUCKET_ENTRIES
        fingerprint = key >> _FINGERPRINT_SHIFT
        found = -1
        least = _USE_MASK + 1
        now = -1
        for entry in self._words[start : start + BUCKET_ENTRIES]:
            if entry >> _FINGERPRINT_SHIFT == fingerprint and entry and entry & _NUMBER_MASK in numbers:
                if found < 0:
                    found = entry & _NUMBER_MASK
                    first_use = entry >> _NUMBER_BITS & _USE_MASK
                    continue
                if now < 0:
                    now = self._clock() >> _TICK_SHIFT & _USE_MASK
                    least = (now - first_use) & _USE_MASK
                idle = (now - (entry >> _NUMBER_BITS)) & _USE_MASK
                if idle < least:
                    least, found = idle, entry & _NUMBER_MASK
        return found

    def __repr__(self) -> str:
        return f"PrefixIndex({self.entries} entries, {self.limit_bytes} bytes)"
