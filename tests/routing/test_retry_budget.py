from __future__ import annotations

import os
import random
from collections.abc import Callable

import pytest

from meshd.memory import Segment
from meshd.routing.retry_budget import RetryBudget, segment_bytes

ROWS = 3


def budgets(ratio: float = 0.2, least: int = 10) -> list[RetryBudget]:
    """The budget as each of three processes sees it."""
    segment = Segment.create("retries", segment_bytes(ROWS))
    return [RetryBudget(segment, row, ROWS, ratio, least) for row in range(ROWS)]


def firsts(node: list[RetryBudget], count: int, now_s: float) -> None:
    for turn in range(count):
        node[turn % ROWS].note_first(now_s)


def retries(node: list[RetryBudget], now_s: float, asked: int = 200) -> int:
    """Return how many of so many retries are allowed, over all processes."""
    return sum(node[turn % ROWS].try_retry(now_s) for turn in range(asked))


@pytest.mark.parametrize(("requests", "allowed"), [(0, 10), (20, 10), (50, 10), (60, 12), (200, 40)])
def test_retries_are_a_share_of_the_first_attempts_of_all_processes_or_the_least(
    requests: int, allowed: int
) -> None:
    node = budgets()
    firsts(node, requests, 1000.2)
    assert retries(node, 1003.7) == allowed


def test_first_attempts_spread_over_ten_seconds_count() -> None:
    node = budgets()
    for second in range(10):
        firsts(node, 20, 1000.0 + second)
    assert retries(node, 1009.9) == 40


def test_budget_comes_back_when_the_retries_are_ten_seconds_old() -> None:
    node = budgets()
    assert retries(node, 1000.5) == 10
    for second in range(1, 11):
        assert retries(node, 1000.5 + second) == 0
    assert retries(node, 1011.0) == 10
    assert retries(node, 1011.5) == 0


def test_bound_holds_in_every_window_of_ten_seconds() -> None:
    rng = random.Random(5)
    node = budgets(ratio=0.1, least=3)
    made: list[float] = []
    sent: list[float] = []
    now_s = 1000.0
    for _ in range(3000):
        now_s += rng.expovariate(40)
        row = rng.randrange(ROWS)
        if rng.random() < 0.6:
            node[row].note_first(now_s)
            sent.append(now_s)
        elif node[row].try_retry(now_s):
            made.append(now_s)
            window = sum(now_s - 10 < at <= now_s for at in made)
            assert window <= max(3, 0.1 * sum(now_s - 10 < at <= now_s for at in sent))
    assert len(made) > 50


def test_ratio_and_least_of_zero_allow_none() -> None:
    node = budgets(0, 0)
    firsts(node, 1000, 1000.0)
    assert retries(node, 1000.0) == 0


def test_slot_of_an_older_second_is_begun_anew_and_a_successor_goes_on_in_its_row() -> None:
    segment = Segment.create("retries", segment_bytes(1))
    old = RetryBudget(segment, 0, 1, 0.2, 10)
    for _ in range(100):
        old.note_first(1000.0)
    assert old.try_retry(1000.0)
    successor = RetryBudget(segment, 0, 1, 0.2, 10)
    successor.note_first(1000.5)
    assert repr(successor) == "RetryBudget(retries=1, first=101)"
    successor.note_first(1016.0)  # the same slot, sixteen seconds later
    assert repr(successor) == "RetryBudget(retries=0, first=1)"


def test_segment_that_is_too_small_is_refused() -> None:
    with pytest.raises(ValueError, match="too few"):
        RetryBudget(Segment.create("retries", 64), 0, 100, 0.2, 10)


def test_processes_that_race_never_exceed_the_budget(fork: Callable[[Callable[[], int]], int]) -> None:
    segment = Segment.create("retries", segment_bytes(2))

    def take(row: int) -> int:
        budget = RetryBudget(segment, row, 2, 0.0, 100)
        return sum(budget.try_retry(1000.0) for _ in range(5000))

    children = [fork(lambda row=row: take(row)) for row in range(2)]  # type: ignore[misc]
    taken = sum(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children)
    assert 0 < taken <= 100
