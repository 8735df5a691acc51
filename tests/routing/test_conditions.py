from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from typing import Any

import pytest

from meshd.memory import Segment
from meshd.routing.condition_cells import (
    ENDS,
    LINE_WORDS,
    OPENED,
    RING_ENTRIES,
    STATE,
    ConditionCells,
    FailureRing,
    segment_bytes,
)
from meshd.routing.conditions import CLOSED, HALF_OPEN, OPEN, SEGMENT_KIND, Conditions, pid_of

ROWS = 3
COLUMNS = 16


class Node:
    """Three I/O processes, a reader, and this test as the controller."""

    def __init__(self) -> None:
        self.segment = Segment.create(SEGMENT_KIND, segment_bytes(ROWS, COLUMNS))
        self.now_s = 1000.0
        self.io = [self.process(row) for row in range(ROWS)]
        self.reader = self.process(None)
        self.cells = ConditionCells(self.segment, ROWS, COLUMNS)

    def process(self, row: int | None) -> Conditions:
        owner = 0 if row is None else 100 + row
        conditions = Conditions(self.segment, row, ROWS, COLUMNS, owner, clock=lambda: self.now_s)
        conditions.watch(range(COLUMNS))
        return conditions

    def set_state(self, number: int, state: int, opened_s: float = 0.0, ends_s: float = 0.0) -> None:
        self.cells.breaker_times[number * LINE_WORDS + OPENED] = opened_s
        self.cells.breaker_times[number * LINE_WORDS + ENDS] = ends_s
        self.cells.node_times[0] = max(self.cells.node_times[0], opened_s)
        self.cells.breaker_words[number * LINE_WORDS + STATE] = state
        self.cells.watched[0] += 1

    def settle(self, number: int, row: int) -> None:
        at = number * ROWS + row
        self.cells.settled_words[at] = self.cells.trial_words[at]


@pytest.fixture
def node() -> Node:
    return Node()


def test_nothing_is_wrong_at_first(node: Node, make_upstream: Callable[..., Any]) -> None:
    conditions = node.io[0]
    assert conditions.trouble() is None
    assert (conditions.breaker_of(5), conditions.cooldown_s(5), conditions.successes(5)) == ("closed", 0, 0)
    assert conditions.is_available(make_upstream(5))
    assert not conditions.is_available(make_upstream(5, is_healthy=False))
    assert not conditions.is_available(make_upstream(5, state="draining"))


def test_cool_down_holds_in_every_process_until_its_end_and_the_latest_end_counts(
    node: Node, make_upstream: Callable[..., Any]
) -> None:
    node.io[0].cool_down(5, 1007)
    node.io[2].cool_down(5, 1003)
    node.io[0].cool_down(5, 1001)  # only time ends it
    for conditions in (*node.io, node.reader):
        trouble = conditions.trouble()
        assert trouble is not None and trouble.excluded == {5} and not trouble.deranked
        assert conditions.cooldown_s(5) == 7
        assert not conditions.is_available(make_upstream(5))
    node.now_s = 1006.9
    assert node.io[1].trouble() is not None
    node.now_s = 1007.0
    for conditions in (*node.io, node.reader):
        assert conditions.trouble() is None
        assert conditions.is_available(make_upstream(5))


def test_shorter_cool_down_of_another_upstream_is_seen_though_a_longer_one_was_announced(node: Node) -> None:
    node.io[0].cool_down(5, 1300)
    assert node.io[1].trouble() is not None
    node.io[0].cool_down(6, 1001)
    trouble = node.io[1].trouble()
    assert trouble is not None and trouble.excluded == {5, 6}
    node.now_s = 1001
    trouble = node.io[1].trouble()
    assert trouble is not None and trouble.excluded == {5}


def test_deranked_upstream_stays_available(node: Node, make_upstream: Callable[..., Any]) -> None:
    node.io[0].derank(3, 1001)
    trouble = node.io[1].trouble()
    assert trouble is not None and trouble.deranked == {3} and not trouble.excluded
    assert node.io[1].is_available(make_upstream(3)) and node.io[1].is_deranked(3)
    node.now_s = 1001
    assert node.io[1].trouble() is None and not node.io[1].is_deranked(3)


def test_storm_of_429_does_not_have_everybody_look_at_each(node: Node) -> None:
    node.io[0].derank(3, 1001)
    first = node.io[1].trouble()
    node.io[0].derank(3, 1001.04)
    assert node.io[1].trouble() is first
    node.io[0].derank(3, 1001.06)
    assert node.io[1].trouble() is not first


def test_state_of_a_breaker_is_seen_at_once(node: Node, make_upstream: Callable[..., Any]) -> None:
    assert node.io[1].trouble() is None
    node.set_state(4, OPEN, 1000, 1060)
    trouble = node.io[1].trouble()
    assert trouble is not None and trouble.excluded == {4}
    assert (node.io[1].breaker_of(4), node.io[1].opens_in_s(4)) == ("open", 60)
    assert not node.io[1].is_available(make_upstream(4))
    node.set_state(4, HALF_OPEN)
    trouble = node.io[1].trouble()
    assert trouble is not None and trouble.trying == {4} and not trouble.excluded
    assert node.io[1].breaker_of(4) == "half_open" and node.io[1].opens_in_s(4) == 0
    assert node.io[1].is_available(make_upstream(4))
    node.set_state(4, CLOSED)
    assert node.io[1].trouble() is None


def test_only_watched_upstreams_make_trouble(node: Node) -> None:
    node.io[0].watch([1])
    node.io[1].cool_down(2, 1010)
    assert node.io[0].trouble() is None
    node.io[0].watch([1, 2])
    assert node.io[0].trouble() is not None


def test_forgotten_upstream_leaves_nothing_to_the_next_one_with_its_number(node: Node) -> None:
    node.io[0].cool_down(2, 1010)
    node.io[0].derank(2, 1010)
    node.io[0].forget(2)
    node.reader.forget(2)  # who only reads has nothing to forget
    assert node.io[0].trouble() is None and node.io[0].cooldown_s(2) == 0


def test_successes_are_summed_over_processes(node: Node) -> None:
    for conditions in node.io:
        conditions.succeeded(7, 999, 1000)
    node.io[0].succeeded(7, 999, 1000)
    assert node.reader.successes(7) == 4
    assert node.reader.successes(6) == 0


def test_success_of_a_request_from_before_the_opening_ends_no_run(node: Node) -> None:
    node.set_state(7, OPEN, opened_s=1000)
    node.io[0].succeeded(7, began_s=999, ended_s=1001)
    node.io[0].succeeded(8, began_s=999, ended_s=1001)  # another upstream opened nothing
    assert node.cells.success_times[7 * ROWS] == 0
    assert node.cells.success_times[8 * ROWS] == 1001
    node.io[0].succeeded(7, began_s=1002, ended_s=1003)
    assert node.cells.success_times[7 * ROWS] == 1003


def test_failures_reach_the_controller_in_order_and_a_full_ring_is_told(node: Node) -> None:
    ring = FailureRing(node.cells, 1)
    for turn in range(3):  # around the end of the ring
        for place in range(RING_ENTRIES):
            assert node.io[1].failed(place % COLUMNS, turn, place)
        assert not node.io[1].failed(0, 0, 0)
        assert ring.take() == [(place, turn, place % COLUMNS) for place in range(RING_ENTRIES)]
        assert ring.take() == []


def test_one_trial_at_a_time_and_the_next_may_try_after_a_neutral_end(node: Node) -> None:
    node.set_state(5, HALF_OPEN)
    assert node.io[0].try_trial(5)
    assert node.io[1].is_tried(5)
    assert not node.io[0].try_trial(5) and not node.io[1].try_trial(5)
    assert not node.reader.try_trial(5)
    node.io[0].end_trial(5, "neutral")
    assert not node.io[1].is_tried(5)
    assert node.io[1].try_trial(5)


@pytest.mark.parametrize("outcome", ["success", "failure"])
def test_ended_trial_counts_until_the_controller_has_drawn_its_conclusion(node: Node, outcome: Any) -> None:
    node.set_state(5, HALF_OPEN)
    assert node.io[0].try_trial(5)
    node.io[0].end_trial(5, outcome)
    assert not node.io[0].try_trial(5) and not node.io[2].try_trial(5)
    node.settle(5, 0)
    assert node.io[2].try_trial(5)
    assert not node.io[0].try_trial(5)


def test_no_trial_while_closed_or_open_though_nobody_tries(node: Node) -> None:
    assert not node.io[0].try_trial(5)
    node.set_state(5, OPEN)
    assert not node.io[0].try_trial(5)
    assert not node.io[0].is_tried(5)


def test_settled_trial_of_a_dead_process_stops_counting_and_names_its_process(node: Node) -> None:
    node.set_state(5, HALF_OPEN)
    assert node.io[0].try_trial(5)
    assert pid_of(node.cells.trial_words[5 * ROWS]) == 100
    successor = Conditions(node.segment, 0, ROWS, COLUMNS, owner=200, clock=lambda: node.now_s)
    assert not successor.try_trial(5)
    node.settle(5, 0)
    assert successor.try_trial(5)
    assert pid_of(node.cells.trial_words[5 * ROWS]) == 200


def test_segment_that_is_too_small_and_rows_that_do_not_exist_are_refused(node: Node) -> None:
    with pytest.raises(ValueError, match="too few"):
        ConditionCells(Segment.create(SEGMENT_KIND, 64), ROWS, COLUMNS)
    with pytest.raises(ValueError, match="no conditions row"):
        Conditions(node.segment, ROWS, ROWS, COLUMNS, owner=1)
    with pytest.raises(ValueError, match="no owner"):
        Conditions(node.segment, 0, ROWS, COLUMNS)


def test_two_processes_never_try_at_once(fork: Callable[[Callable[[], int]], int]) -> None:
    """Each keeps a count of its own of the trials running; both counts are never 1 at one moment."""
    segment = Segment.create(SEGMENT_KIND, segment_bytes(2, 1))
    running = Segment.create("running", 4096)
    cells = ConditionCells(segment, 2, 1)
    cells.breaker_words[STATE] = HALF_OPEN

    def run(row: int) -> int:
        rng = random.Random(row)
        conditions = Conditions(segment, row, 2, 1, owner=os.getpid())
        mine, other = 64 + row * 8, 64 + (1 - row) * 8
        end_s, won = time.monotonic() + 30, 0
        while won < 3000 and time.monotonic() < end_s:
            if not conditions.try_trial(0):
                continue
            running.words[mine] = 1
            for _ in range(rng.randrange(8)):
                if running.words[other]:
                    return 2
            running.words[mine] = 0
            conditions.end_trial(0, "neutral")
            won += 1
        return 0 if won else 3

    children = [fork(lambda row=row: run(row)) for row in range(2)]
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0, 0]
