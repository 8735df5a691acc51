"""The bytes of the segment "conditions": what the processes of a node tell each other about its upstreams.

Every word is aligned and has one writer. ``rows`` are I/O seats, ``columns`` upstream numbers::

    64-byte segment header
    watched    changes | trouble of row 0, of row 1, …          changes: the controller; trouble: its row
    node       last opened                                      the controller; 64 bytes
    breakers   column 0: state | identity | failures | successes | last failure | opened | ends | –
               column 1: …                                      the controller; 64 bytes a column
    then one table after the other, each columns x rows words, the rows of a column side by side:
    successes     u64   ended 2xx answers, only grows            its row
    succeeded     f64   when the newest of them ended            its row
    cooldowns     f64   end of the cool-down this row knows of   its row
    deranks       f64   end of the de-ranking                    its row
    trials        u64   see below                                its row
    settled       u64   the trial that counts no longer          the controller
    failures   a ring of each row: tail (64 bytes) | head (64 bytes) | 1024 entries of 32 bytes:
               number | began | ended | –                        tail, entries: its row; head: the controller

Times are seconds of CLOCK_MONOTONIC, one clock for all processes of a node.

``changes`` moves with each change of a breaker, ``trouble`` with each later end of a cool-down or a
de-ranking: while these words stand still, so does all that placement has read. They lie side by side so that
looking at all of them is one comparison of memory.

A trial word is ``pid << 34 | serial << 2 | phase``, 0 for none. It counts until its ``settled`` word holds
the same trial, whatever the phase; phases are told in conditions.py.
"""

from __future__ import annotations

from typing import Final

from meshd.memory import HEADER_BYTES, Segment, round_up
from meshd.routing.load import MAX_UPSTREAMS

SEGMENT_KIND: Final = "conditions"

RING_ENTRIES: Final = 1024
"""Failures that a row may report between two looks of the controller, some 25 ms apart."""

STATE: Final = 0
IDENTITY: Final = 1
FAILURES: Final = 2
SUCCESSES: Final = 3
LAST_FAILURE: Final = 4
OPENED: Final = 5
ENDS: Final = 6
"""Words of a breaker; ``ENDS``: when an open one begins to admit trials."""

LINE_WORDS: Final = 8
ENTRY_WORDS: Final = 4
PHASE_MASK: Final = 3
_WORD: Final = 8
_TABLES: Final = 6
_RING_WORDS: Final = 2 * LINE_WORDS + RING_ENTRIES * ENTRY_WORDS


def _watched_words(rows: int) -> int:
    return round_up(1 + rows, LINE_WORDS)


def segment_bytes(rows: int, columns: int = MAX_UPSTREAMS) -> int:
    """Return the size of a segment for ``rows`` I/O seats."""
    words = (
        _watched_words(rows)
        + LINE_WORDS
        + columns * LINE_WORDS
        + _TABLES * columns * rows
        + rows * _RING_WORDS
        + LINE_WORDS
    )
    return HEADER_BYTES + words * _WORD


class ConditionCells:
    """The words as views: ``…_words`` hold integers, ``…_times`` seconds. Nothing is decided here."""

    def __init__(self, segment: Segment, rows: int, columns: int = MAX_UPSTREAMS) -> None:
        if segment.size < segment_bytes(rows, columns):
            raise ValueError(f"the conditions segment has {segment.size} bytes, too few for {rows} rows")
        self.rows = rows
        self.columns = columns
        words, times = segment.words, segment.bytes.cast("d")
        at = HEADER_BYTES // _WORD
        end = at + 1 + rows
        self.watched = words[at:end]
        self.trouble_times = times[at + 1 : end]
        at += _watched_words(rows)
        self.node_times = times[at : at + 1]
        at += LINE_WORDS
        end = at + columns * LINE_WORDS
        self.breaker_words, self.breaker_times = words[at:end], times[at:end]
        at, size = end, columns * rows
        self.success_words = words[at : at + size]
        self.success_times = times[at + size : at + 2 * size]
        self.cooldown_times = times[at + 2 * size : at + 3 * size]
        self.derank_times = times[at + 3 * size : at + 4 * size]
        self.trial_words = words[at + 4 * size : at + 5 * size]
        self.settled_words = words[at + 5 * size : at + 6 * size]
        at = round_up(at + 6 * size, LINE_WORDS)
        starts = range(at, at + rows * _RING_WORDS, _RING_WORDS)
        self.ring_words = [words[start : start + _RING_WORDS] for start in starts]
        self.ring_times = [times[start : start + _RING_WORDS] for start in starts]

    def __repr__(self) -> str:
        return f"ConditionCells(rows={self.rows}, columns={self.columns})"


class FailureRing:
    """The failures of one row: its I/O process puts them in, the controller takes them out."""

    __slots__ = ("_times", "_words")

    def __init__(self, cells: ConditionCells, row: int) -> None:
        self._words = cells.ring_words[row]
        self._times = cells.ring_times[row]

    def put(self, number: int, began_s: float, ended_s: float) -> bool:
        """Report a failed attempt at upstream ``number``; False if the ring is full."""
        words = self._words
        tail = words[0]
        if tail - words[LINE_WORDS] >= RING_ENTRIES:
            return False
        at = 2 * LINE_WORDS + tail % RING_ENTRIES * ENTRY_WORDS
        words[at] = number
        self._times[at + 1] = began_s
        self._times[at + 2] = ended_s
        words[0] = tail + 1  # last: who sees the tail sees the entry
        return True

    def take(self) -> list[tuple[float, float, int]]:
        """Return (ended, began, number) of each failure reported since the last call."""
        words, times = self._words, self._times
        tail, head = words[0], words[LINE_WORDS]
        if tail == head:
            return []
        taken = []
        for place in range(head, tail):
            at = 2 * LINE_WORDS + place % RING_ENTRIES * ENTRY_WORDS
            taken.append((times[at + 2], times[at + 1], words[at]))
        words[LINE_WORDS] = tail
        return taken

    def __repr__(self) -> str:
        return f"FailureRing({self._words[0] - self._words[LINE_WORDS]} waiting)"
