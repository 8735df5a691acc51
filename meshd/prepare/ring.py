"""The two ends of a pair of rings: submissions towards a prepare worker, completions back.

Each ring is single-producer single-consumer and both live on the same counters (layout.py), so that
completion ``n`` answers descriptor ``n``::

    taken ≤ done ≤ head ≤ tail ≤ taken + 16
      │      │      │      └ I/O process: next free descriptor
      │      │      └ prepare worker: claimed below here
      │      └ prepare worker: answered below here
      └ I/O process: answers consumed below here

Every end keeps its own counters in ordinary attributes and only publishes them; it reads shared memory for
the other's. Payload is stored before the counter that makes it visible, which x86-64 preserves.

A claim is one store of ``head``, and only after it the worker looks whether the descriptor is void. That
order matters. A withdrawal stores the ``withdrawn`` word and then reads ``head``. Neither side can fence,
so both may miss the other, but only while a store sits in a store buffer: nanoseconds. Looking first and
claiming afterwards would open the same window for as long as the worker may be descheduled in between.
What the client does about the nanoseconds is told in client.py.

Any process may be killed between any two stores. Submissions above ``tail`` and completions above ``done``
do not exist; a descriptor in ``[done, head)`` is one whose worker died with it, and ``settle`` answers it.
"""

from __future__ import annotations

import struct
from typing import Final

from meshd.memory import Segment
from meshd.prepare.layout import (
    DEPTH,
    OUTCOME_DIED,
    OUTCOME_SKIPPED,
    RECORD_BYTES,
    PairLayout,
    outcome_of,
    result_word,
    view_length_of,
)

FULL: Final = -1
_MASK: Final = DEPTH - 1
# Payload only; shared counters are item stores of the word view. Written as "n", which costs half of "Q" for
# what has more than 30 bits, and read as "Q", since who reads must not find a negative length.
_DESCRIPTOR_OUT: Final = struct.Struct("@n24s4n")
_DESCRIPTOR: Final = struct.Struct("@8Q")
_COMPLETION_OUT: Final = struct.Struct("@4n")
_COMPLETION: Final = struct.Struct("@4Q")

Record = tuple[int, ...]
"""The words of a descriptor. Of no fixed length for mypyc, which would take each word out and put it back."""


class IoEnd:
    """The I/O process's end of one pair.

    ``tail``: descriptors pushed. ``taken``: completions popped. A successor of a dead I/O process goes on
    where the shared words are. ``sequence`` and what follows are the completion that was popped last.
    """

    __slots__ = (
        "_bytes",
        "_completions",
        "_descriptors",
        "_done",
        "_done_word",
        "_head_word",
        "_layout",
        "_tail_word",
        "_taken_word",
        "_words",
        "claimed_ns",
        "finished_ns",
        "outcome",
        "sequence",
        "tail",
        "taken",
        "view_length",
    )

    def __init__(self, segment: Segment, layout: PairLayout) -> None:
        self.sequence = self.outcome = self.view_length = self.claimed_ns = self.finished_ns = 0
        self._bytes = segment.bytes
        self._words = segment.words
        self._layout = layout
        self._tail_word = layout.tail_word  # one attribute less for each access: 20 ns each
        self._taken_word = layout.taken_word
        self._head_word = layout.head_word
        self._done_word = layout.done_word
        self._descriptors = layout.descriptors_at
        self._completions = layout.completions_at
        self.tail = self._words[layout.tail_word]
        self.taken = self._words[layout.taken_word]
        self._done = self.taken  # below here completions are known to be there

    def attach(self) -> list[Record]:
        """Take over from a predecessor: void its descriptors, and return those that are still out.

        They are the descriptors ``taken … tail - 1`` in order; each will still yield its completion.
        """
        self._words[self._layout.valid_from_word] = self.tail
        return [self._descriptor(index) for index in range(self.taken, self.tail)]

    @property
    def has_room(self) -> bool:
        return self.tail - self.taken < DEPTH

    @property
    def claimed(self) -> int:
        """Descriptors below this index are claimed; one that is not may be claimed at any moment."""
        return self._words[self._head_word]

    def push(
        self,
        sequence: int,
        place: bytes,
        body_length: int,
        start_by_ns: int,
        job_word: int,
        finish_by_ns: int,
    ) -> int:
        """Submit one descriptor and return its index, or ``FULL``. ``place``: of the slot (slab.py)."""
        index = self.tail
        if index - self.taken >= DEPTH:
            return FULL
        _DESCRIPTOR_OUT.pack_into(
            self._bytes,
            self._descriptors + (index & _MASK) * RECORD_BYTES,
            sequence,
            place,
            body_length,
            start_by_ns,
            job_word,
            finish_by_ns,
        )
        self._words[self._tail_word] = self.tail = index + 1
        return index

    def withdraw(self, index: int, sequence: int) -> None:
        """Say that a descriptor shall not run, or that its running job shall stop between stages."""
        self._words[self._layout.withdrawn_word + (index & _MASK)] = sequence

    def pop(self) -> bool:
        """Consume the next completion into the attributes of this object; False if there is none."""
        index = self.taken
        if index == self.tail:
            return False
        if index == self._done:
            self._done = self._words[self._done_word]
            if index == self._done:
                return False
        words: tuple[int, int, int, int] = _COMPLETION.unpack_from(
            self._bytes, self._completions + (index & _MASK) * RECORD_BYTES
        )
        self.sequence, result, self.claimed_ns, self.finished_ns = words
        self.outcome = outcome_of(result)
        self.view_length = view_length_of(result)
        self._words[self._taken_word] = self.taken = index + 1
        return True

    def _descriptor(self, index: int) -> Record:
        return _DESCRIPTOR.unpack_from(self._bytes, self._descriptors + (index & _MASK) * RECORD_BYTES)

    def __repr__(self) -> str:
        words, layout = self._words, self._layout
        return (
            f"IoEnd(tail={self.tail}, head={words[layout.head_word]},"
            f" done={words[layout.done_word]}, taken={self.taken})"
        )


def has_job(segment: Segment, layout: PairLayout) -> bool:
    """Say whether a job of this pair runs or may still run; for onlookers, who see a moment ago."""
    words = segment.words
    head = words[layout.head_word]
    if words[layout.done_word] < head:
        return True
    first = max(head, words[layout.valid_from_word])
    for index in range(first, min(words[layout.tail_word], first + DEPTH)):
        sequence = words[layout.descriptors_at // 8 + (index & _MASK) * (RECORD_BYTES // 8)]
        if words[layout.withdrawn_word + (index & _MASK)] != sequence:
            return True
    return False


class WorkerEnd:
    """The prepare worker's end of one pair; also its leader's, once the worker is dead and reaped."""

    __slots__ = (
        "_bytes",
        "_completions",
        "_descriptors",
        "_layout",
        "_mark",
        "_sequence",
        "_words",
        "done",
        "head",
    )

    def __init__(self, segment: Segment, layout: PairLayout) -> None:
        self._bytes = segment.bytes
        self._words = segment.words
        self._layout = layout
        self._descriptors = layout.descriptors_at
        self._completions = layout.completions_at
        self.head = self._words[layout.head_word]
        self.done = self._words[layout.done_word]
        self._mark = layout.withdrawn_word
        self._sequence = 0

    @property
    def is_empty(self) -> bool:
        return self._words[self._layout.tail_word] == self.head

    def take(self) -> Record | None:
        """Claim the next descriptor, which must then be answered by ``complete``; None if there is none."""
        head = self.head
        words = self._words
        layout = self._layout
        if words[layout.tail_word] == head:
            return None
        place = head & _MASK
        record: Record = _DESCRIPTOR.unpack_from(self._bytes, self._descriptors + place * RECORD_BYTES)
        words[layout.head_word] = self.head = head + 1
        self._mark = layout.withdrawn_word + place
        self._sequence = record[0]
        return record

    def is_void(self) -> bool:
        """Whether the descriptor taken last was withdrawn or left behind by a dead I/O process."""
        words = self._words
        return words[self._mark] == self._sequence or self.head <= words[self._layout.valid_from_word]

    def should_stop(self) -> bool:
        """Whether no one wants the result of the running job any more; cheap, for use between stages."""
        return self._words[self._mark] == self._sequence

    def complete(
        self, sequence: int, outcome: int, view_length: int, claimed_ns: int, finished_ns: int
    ) -> None:
        """Answer the oldest claimed descriptor."""
        done = self.done
        _COMPLETION_OUT.pack_into(
            self._bytes,
            self._completions + (done & _MASK) * RECORD_BYTES,
            sequence,
            result_word(outcome, view_length),
            claimed_ns,
            finished_ns,
        )
        self._words[self._layout.done_word] = self.done = done + 1

    def skip_all(self, now_ns: int) -> None:
        """Answer what lies on the ring of a seat without a worker: SKIPPED, it never ran."""
        while (record := self.take()) is not None:
            self.complete(record[0], OUTCOME_SKIPPED, 0, now_ns, now_ns)

    def settle(self, now_ns: int) -> int:
        """Answer what a dead worker claimed and did not complete; returns how many, at most one a worker.

        May be repeated after a crash of its own: it goes on at the shared ``done`` word.
        """
        count = self.head - self.done
        for index in range(self.done, self.head):
            record = _DESCRIPTOR.unpack_from(self._bytes, self._descriptors + (index & _MASK) * RECORD_BYTES)
            self.complete(record[0], OUTCOME_DIED, 0, now_ns, now_ns)
        return count

    def __repr__(self) -> str:
        return f"WorkerEnd(tail={self._words[self._layout.tail_word]}, head={self.head}, done={self.done})"
