from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

from meshd.api.view import RoutingView
from meshd.routing.policies.random_choice import RandomChoice
from meshd.routing.policy import Candidates

VIEW = RoutingView("m1")


def test_every_candidate_is_as_likely_as_the_other(
    candidates: Callable[..., Candidates], fixed_loads: Any
) -> None:
    policy, three = RandomChoice(Random(1)), candidates(3)
    picks = Counter(policy.pick(three, VIEW, fixed_loads([9, 0, 0])).upstream for _ in range(3000))
    assert len(picks) == 3
    assert all(900 < count < 1100 for count in picks.values())


def test_same_seed_gives_the_same_picks(candidates: Callable[..., Candidates], fixed_loads: Any) -> None:
    five, loads = candidates(5), fixed_loads([0] * 5)
    runs = []
    for _ in range(2):
        policy = RandomChoice(Random(42))
        runs.append([policy.pick(five, VIEW, loads).upstream for _ in range(20)])
    assert runs[0] == runs[1]


def test_nothing_is_picked_from_no_candidates(
    candidates: Callable[..., Candidates], fixed_loads: Any
) -> None:
    assert RandomChoice(Random(1)).pick(candidates(0), VIEW, fixed_loads([])).upstream is None
