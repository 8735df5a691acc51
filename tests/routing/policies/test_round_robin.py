from __future__ import annotations

from collections.abc import Callable
from typing import Any

from meshd.api.view import RoutingView
from meshd.routing.policies.round_robin import RoundRobin
from meshd.routing.policy import Candidates

VIEW = RoutingView("m1")


def _numbers(policy: RoundRobin, candidates: Candidates, loads: Any, count: int) -> list[int]:
    picks = [policy.pick(candidates, VIEW, loads).upstream for _ in range(count)]
    return [pick.number for pick in picks if pick]


def test_candidates_take_turns_whatever_their_load(
    candidates: Callable[..., Candidates], fixed_loads: Any
) -> None:
    assert _numbers(RoundRobin(0), candidates(3), fixed_loads([9, 0, 0]), 7) == [0, 1, 2, 0, 1, 2, 0]


def test_processes_start_at_their_own_number(candidates: Callable[..., Candidates], fixed_loads: Any) -> None:
    assert _numbers(RoundRobin(5), candidates(3), fixed_loads([0] * 3), 3) == [2, 0, 1]


def test_nothing_is_picked_from_no_candidates(
    candidates: Callable[..., Candidates], fixed_loads: Any
) -> None:
    assert RoundRobin(0).pick(candidates(0), VIEW, fixed_loads([])).upstream is None
