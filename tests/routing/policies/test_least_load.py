from __future__ import annotations

from collections.abc import Callable
from typing import Any

from meshd.api.view import RoutingView
from meshd.routing.policies.least_load import LeastLoad
from meshd.routing.policy import Candidates

VIEW = RoutingView("m1")


def _numbers(policy: LeastLoad, candidates: Candidates, loads: Any, count: int) -> list[int]:
    picks = [policy.pick(candidates, VIEW, loads).upstream for _ in range(count)]
    return [pick.number for pick in picks if pick]


def test_idle_upstreams_take_turns(candidates: Callable[..., Candidates], fixed_loads: Any) -> None:
    assert _numbers(LeastLoad(0), candidates(3), fixed_loads([0, 0, 0]), 5) == [0, 1, 2, 0, 1]
    assert _numbers(LeastLoad(4), candidates(3), fixed_loads([0, 0, 0]), 3) == [1, 2, 0]


def test_only_the_least_loaded_take_turns(candidates: Callable[..., Candidates], fixed_loads: Any) -> None:
    assert _numbers(LeastLoad(0), candidates(4), fixed_loads([3, 1, 2, 1]), 4) == [1, 3, 1, 3]


def test_least_loaded_wins_wherever_it_stands(
    candidates: Callable[..., Candidates], fixed_loads: Any
) -> None:
    assert _numbers(LeastLoad(1), candidates(3), fixed_loads([5, 4, 3]), 3) == [2, 2, 2]


def test_nothing_is_picked_from_no_candidates(
    candidates: Callable[..., Candidates], fixed_loads: Any
) -> None:
    assert LeastLoad(0).pick(candidates(0), VIEW, fixed_loads([])).upstream is None
