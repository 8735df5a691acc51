"""The rings against a model: two deques and what may be seen of them."""

from __future__ import annotations

import struct
from collections import deque

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from meshd.prepare.layout import DEPTH, OUTCOME_DIED, OUTCOME_SKIPPED, OUTCOME_VIEW, create_rings, open_layout
from meshd.prepare.ring import FULL, IoEnd, WorkerEnd


def make_ends() -> tuple[IoEnd, WorkerEnd]:
    segment = create_rings(2, 2)
    pair = open_layout(segment, 2, 2).pair(1, 1)
    return IoEnd(segment, pair), WorkerEnd(segment, pair)


def push(io: IoEnd, sequence: int) -> int:
    return io.push(sequence, struct.pack("3Q", 1, 2, 3), 4, 5, 6, 7)


def pop(io: IoEnd) -> tuple[int, ...] | None:
    """The words of the next completion."""
    return (io.sequence, io.outcome, io.view_length, io.claimed_ns, io.finished_ns) if io.pop() else None


def test_a_descriptor_arrives_with_all_its_words_and_so_does_the_completion() -> None:
    io, worker = make_ends()
    words = tuple(2**63 - 1 - n for n in range(8))
    assert worker.take() is None and pop(io) is None
    assert io.push(words[0], struct.pack("3Q", *words[1:4]), *words[4:]) == 0
    assert worker.take() == words
    assert io.claimed == 1
    worker.complete(2**63 - 1, OUTCOME_DIED, 2**55 - 1, 22, 33)
    assert pop(io) == (2**63 - 1, OUTCOME_DIED, 2**55 - 1, 22, 33)
    assert worker.take() is None and pop(io) is None


def test_a_full_ring_says_full_until_a_completion_is_consumed() -> None:
    io, worker = make_ends()
    for sequence in range(DEPTH):
        assert push(io, sequence) == sequence
    assert push(io, 99) == FULL and not io.has_room
    worker.take()
    worker.complete(0, OUTCOME_VIEW, 0, 0, 0)
    assert push(io, 99) == FULL
    io.pop()
    assert push(io, 99) == DEPTH


def test_a_withdrawn_descriptor_is_void_and_a_later_one_in_its_place_is_not() -> None:
    io, worker = make_ends()
    index = push(io, 500)
    io.withdraw(index, 500)
    worker.take()
    assert worker.is_void() and worker.should_stop()
    for sequence in range(501, 501 + DEPTH):
        worker.complete(sequence - 1, OUTCOME_SKIPPED, 0, 0, 0)
        io.pop()
        push(io, sequence)
        worker.take()
        assert not worker.is_void() and not worker.should_stop()
    io.withdraw(DEPTH, 500 + DEPTH)
    assert worker.should_stop()


def test_a_successor_voids_what_its_predecessor_pushed_and_knows_what_is_still_out() -> None:
    segment = create_rings(1, 1)
    pair = open_layout(segment, 1, 1).pair(0, 0)
    io, worker = IoEnd(segment, pair), WorkerEnd(segment, pair)
    for sequence in (10, 11, 12):
        push(io, sequence)
    worker.take()
    worker.complete(10, OUTCOME_VIEW, 0, 0, 0)
    io.pop()
    worker.take()
    successor = IoEnd(segment, pair)
    assert [record[0] for record in successor.attach()] == [11, 12]
    worker.complete(11, OUTCOME_VIEW, 0, 0, 0)
    push(successor, 13)
    worker.take()
    assert worker.is_void()
    worker.complete(12, OUTCOME_SKIPPED, 0, 0, 0)
    record = worker.take()
    assert record is not None and record[0] == 13 and not worker.is_void()
    assert [pop(successor)[:2], pop(successor)[:2]] == [(11, OUTCOME_VIEW), (12, OUTCOME_SKIPPED)]  # type: ignore[index]


def test_settling_answers_exactly_what_was_claimed_and_not_completed() -> None:
    segment = create_rings(1, 1)
    pair = open_layout(segment, 1, 1).pair(0, 0)
    io, worker = IoEnd(segment, pair), WorkerEnd(segment, pair)
    for sequence in (1, 2, 3):
        push(io, sequence)
    worker.take()
    worker.complete(1, OUTCOME_VIEW, 0, 0, 0)
    worker.take()
    assert WorkerEnd(segment, pair).settle(77) == 1
    assert WorkerEnd(segment, pair).settle(77) == 0
    replacement = WorkerEnd(segment, pair)
    record = replacement.take()
    assert record is not None and record[0] == 3
    assert pop(io) == (1, OUTCOME_VIEW, 0, 0, 0)
    assert pop(io) == (2, OUTCOME_DIED, 0, 77, 77)
    assert pop(io) is None


class Rings(RuleBasedStateMachine):
    """Any interleaving of both sides, their deaths included, is explained by four numbers and a set."""

    @initialize()
    def begin(self) -> None:
        self.segment = create_rings(1, 1)
        self.pair = open_layout(self.segment, 1, 1).pair(0, 0)
        self.io = IoEnd(self.segment, self.pair)
        self.worker = WorkerEnd(self.segment, self.pair)
        self.sequence = 1000
        self.unclaimed: deque[int] = deque()
        self.claimed: deque[int] = deque()
        self.answered: deque[tuple[int, int]] = deque()
        self.void: set[int] = set()
        self.place: dict[int, int] = {}

    def out(self) -> int:
        return len(self.unclaimed) + len(self.claimed) + len(self.answered)

    @rule()
    def push(self) -> None:
        self.sequence += 1
        index = push(self.io, self.sequence)
        if self.out() == DEPTH:
            assert index == FULL
        else:
            self.place[self.sequence] = index
            self.unclaimed.append(self.sequence)

    @rule()
    def take(self) -> None:
        record = self.worker.take()
        if not self.unclaimed:
            assert record is None
            return
        sequence = self.unclaimed.popleft()
        assert record == (sequence, 1, 2, 3, 4, 5, 6, 7)
        assert self.worker.is_void() == (sequence in self.void)
        self.claimed.append(sequence)

    @precondition(lambda self: self.claimed)
    @rule(outcome=st.integers(0, 3))
    def complete(self, outcome: int) -> None:
        sequence = self.claimed.popleft()
        self.worker.complete(sequence, outcome, 5, 6, 7)
        self.answered.append((sequence, outcome))

    @rule()
    def pop(self) -> None:
        record = pop(self.io)
        if not self.answered:
            assert record is None
        else:
            assert record is not None and record[:2] == self.answered.popleft()

    @precondition(lambda self: self.unclaimed or self.claimed)
    @rule(number=st.integers(0, DEPTH))
    def withdraw(self, number: int) -> None:
        out = [*self.claimed, *self.unclaimed]
        sequence = out[number % len(out)]
        self.io.withdraw(self.place[sequence], sequence)
        self.void.add(sequence)

    @rule()
    def the_io_process_is_replaced(self) -> None:
        self.io = IoEnd(self.segment, self.pair)
        out = [sequence for sequence, _ in self.answered] + [*self.claimed, *self.unclaimed]
        assert [record[0] for record in self.io.attach()] == out
        self.void.update(out)

    @rule()
    def the_worker_is_replaced(self) -> None:
        assert WorkerEnd(self.segment, self.pair).settle(9) == len(self.claimed)
        self.answered.extend((sequence, OUTCOME_DIED) for sequence in self.claimed)
        self.claimed.clear()
        self.worker = WorkerEnd(self.segment, self.pair)

    @invariant()
    def the_counters_agree(self) -> None:
        assert self.io.tail - self.io.taken == self.out()
        assert self.io.tail - self.io.claimed == len(self.unclaimed)
        assert self.worker.is_empty == (not self.unclaimed)
        assert self.io.has_room == (self.out() < DEPTH)


TestRings = Rings.TestCase
TestRings.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
