"""The session table of ``dp_sticky``: which upstream each live session belongs to, for the whole node.

Shared memory; the controller alone adds and removes, I/O processes look up and refresh::

    64-byte segment header
    buckets   16 entries each; a session may lie in either of two buckets, chosen by its two hashes
    entry     4 words: hash 0 (0: free) | hash 1 | upstream number | last use, monotonic ns

A session is known by two 64-bit hashes of its key, so no key is stored. Two choices of bucket let the table
fill to nearly all of its entries before one bucket is full; then the session there that was used longest ago
goes. The controller fills an entry before it stores hash 0 and clears hash 0 first, and a reader looks at
hash 0 again after it has read the rest, so it never takes the number of another session. Last use is one word
with several writers, any of which is recent.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import Final, NamedTuple

from xxhash import xxh3_64_intdigest

from meshd.memory import HEADER_BYTES, Segment

SEGMENT_KIND: Final = "sessions"
MAX_SESSIONS: Final = 65536
IDLE_NS: Final = 120 * 60 * 1_000_000_000
ASSIGNMENT_PATH: Final = "/sessions/assignment"
ASSIGNED_HEADER: Final = b"x-mesh-assigned"
"""How an I/O process asks the controller, and where the answer, an upstream's number, stands."""

_BUCKET_ENTRIES: Final = 16
_ENTRY_WORDS: Final = 4
_BUCKET_WORDS: Final = _BUCKET_ENTRIES * _ENTRY_WORDS
_FIRST: Final = HEADER_BYTES // 8
_FREE: Final = -1


def segment_bytes(sessions: int = MAX_SESSIONS) -> int:
    """Return the size of a segment for ``sessions``, a multiple of 16."""
    return HEADER_BYTES + sessions * _ENTRY_WORDS * 8


class SessionId(NamedTuple):
    """Two independent hashes of a session key; together as good as the key."""

    first: int
    second: int

    @classmethod
    def of(cls, key: bytes) -> SessionId:
        return cls(xxh3_64_intdigest(key, 0) or 1, xxh3_64_intdigest(key, 1))  # 0 marks a free entry


class SessionTable:
    """The table as an I/O process uses it. ``clock``: CLOCK_MONOTONIC, nanoseconds."""

    def __init__(
        self, segment: Segment, clock: Callable[[], int] = time.monotonic_ns, sessions: int = MAX_SESSIONS
    ) -> None:
        if segment.size < segment_bytes(sessions) or sessions % _BUCKET_ENTRIES:
            raise ValueError(f"a segment of {segment.size} bytes does not hold {sessions} sessions")
        self._words = segment.words
        self._buckets = sessions // _BUCKET_ENTRIES
        self._clock = clock

    def find(self, session: SessionId) -> int | None:
        """Return the number of the session's upstream; ``None`` if it has none or was idle for too long."""
        at = self._place_of(session)
        if at < 0:
            return None
        words = self._words
        number, used_ns = words[at + 2], words[at + 3]
        is_same = words[at] == session.first and words[at + 1] == session.second
        return number if is_same and self._clock() - used_ns < IDLE_NS else None

    def refresh(self, session: SessionId) -> None:
        """Note that the session was used now."""
        at = self._place_of(session)
        if at >= 0:
            self._words[at + 3] = self._clock()

    def _place_of(self, session: SessionId) -> int:
        words = self._words
        for start in self._starts(session):
            for at in range(start, start + _BUCKET_WORDS, _ENTRY_WORDS):
                if words[at] == session.first and words[at + 1] == session.second:
                    return at
        return _FREE

    def _starts(self, session: SessionId) -> tuple[int, int]:
        buckets = self._buckets
        return (
            _FIRST + session.first % buckets * _BUCKET_WORDS,
            _FIRST + session.second % buckets * _BUCKET_WORDS,
        )


class SessionLedger(SessionTable):
    """The table as its one writer, the controller, uses it; counts go on from what a predecessor left."""

    def __init__(
        self, segment: Segment, clock: Callable[[], int] = time.monotonic_ns, sessions: int = MAX_SESSIONS
    ) -> None:
        super().__init__(segment, clock, sessions)
        self._counts: dict[int, int] = {}
        self._sessions = sessions
        for at in self._entries():
            self._count(self._words[at + 2], 1)

    @property
    def active(self) -> int:
        """Sessions in the table, those that have expired since the last ``sweep`` included."""
        return sum(self._counts.values())

    def assign(
        self, session: SessionId, candidates: Collection[int], load_of: Callable[[int], int]
    ) -> int | None:
        """Return the session's upstream among ``candidates``, given in registration order, from now on."""
        number = self.choose(session, candidates, load_of)
        if number is None:
            return None
        if self.find(session) == number:
            self.refresh(session)
        else:
            self._store(session, number)
        return number

    def choose(
        self, session: SessionId, candidates: Collection[int], load_of: Callable[[int], int]
    ) -> int | None:
        """Return what ``assign`` would, and store nothing.

        One that it has already, since another process may have asked first; otherwise the one with the
        fewest live sessions, then the lower load, then the earlier. ``None`` without candidates.
        """
        known = self.find(session)
        if known is not None and known in candidates:
            return known
        if not candidates:
            return None
        return min(candidates, key=lambda each: (self._counts.get(each, 0), load_of(each)))

    def sweep(self) -> int:
        """Remove sessions that were idle for too long; return how many."""
        now_ns = self._clock()
        return self._remove(lambda at: now_ns - self._words[at + 3] >= IDLE_NS)

    def forget(self, numbers: Collection[int]) -> int:
        """Remove the sessions of upstreams that have left; return how many."""
        return self._remove(lambda at: self._words[at + 2] in numbers)

    def _store(self, session: SessionId, number: int) -> None:
        at = self._place_of(session)
        if at < 0:
            at = self._room_for(session)
        words = self._words
        if words[at]:
            self._clear(at)
        words[at + 1] = session.second
        words[at + 2] = number
        words[at + 3] = self._clock()
        words[at] = session.first
        self._count(number, 1)

    def _room_for(self, session: SessionId) -> int:
        """Return a free entry in the emptier bucket, else the one used longest ago."""
        words = self._words
        free: list[list[int]] = []
        held: list[int] = []
        for start in self._starts(session):
            places = range(start, start + _BUCKET_WORDS, _ENTRY_WORDS)
            free.append([at for at in places if not words[at]])
            held += [at for at in places if words[at]]
        roomier = max(free, key=len)
        return roomier[0] if roomier else min(held, key=lambda at: words[at + 3])

    def _remove(self, is_over: Callable[[int], bool]) -> int:
        over = [at for at in self._entries() if is_over(at)]
        for at in over:
            self._clear(at)
        return len(over)

    def _clear(self, at: int) -> None:
        self._count(self._words[at + 2], -1)
        self._words[at] = 0

    def _entries(self) -> list[int]:
        end = _FIRST + self._sessions * _ENTRY_WORDS
        firsts = self._words[_FIRST:end].tolist()[::_ENTRY_WORDS]
        return [_FIRST + index * _ENTRY_WORDS for index, first in enumerate(firsts) if first]

    def _count(self, number: int, change: int) -> None:
        count = self._counts.get(number, 0) + change
        if count:
            self._counts[number] = count
        else:
            self._counts.pop(number, None)

    def __repr__(self) -> str:
        return f"SessionLedger({self.active} sessions of {len(self._counts)} upstreams)"
