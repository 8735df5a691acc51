from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from meshd.api.view import RoutingView
from meshd.routing.policies.power_of_two import PowerOfTwo
from meshd.routing.policy import Candidates

VIEW = RoutingView("m1")


class _Recording:
    """Loads that remember which upstreams were compared."""

    def __init__(self, loads: Any) -> None:
        self._loads = loads
        self.asked: list[int] = []

    def load(self, number: int) -> int:
        self.asked.append(number)
        return int(self._loads.load(number))

    def loads(self, numbers: Any) -> list[int]:
        raise AssertionError("power_of_two looks at two upstreams only")


def test_never_the_more_loaded_of_two_distinct_draws(
    candidates: Callable[..., Candidates], fixed_loads: Any
) -> None:
    four = candidates(4)

    @settings(max_examples=200, deadline=None)
    @given(counts=st.lists(st.integers(0, 5), min_size=4, max_size=4), seed=st.integers(0, 999))
    def check(counts: list[int], seed: int) -> None:
        loads = _Recording(fixed_loads(counts))
        upstream = PowerOfTwo(Random(seed)).pick(four, VIEW, loads).upstream
        first, second = loads.asked
        assert first != second
        assert upstream is not None
        assert upstream.number == (first if counts[first] <= counts[second] else second)

    check()


def test_of_equally_loaded_upstreams_each_is_as_likely(
    candidates: Callable[..., Candidates], fixed_loads: Any
) -> None:
    policy, three, loads = PowerOfTwo(Random(2)), candidates(3), fixed_loads([4, 4, 4])
    picks = Counter(policy.pick(three, VIEW, loads).upstream for _ in range(3000))
    assert all(900 < picks[upstream] < 1100 for upstream in three)


def test_one_candidate_is_enough_and_none_is_none(
    candidates: Callable[..., Candidates], fixed_loads: Any
) -> None:
    policy = PowerOfTwo(Random(1))
    one = candidates(1)
    assert policy.pick(one, VIEW, fixed_loads([7])).upstream is one.upstreams[0]
    assert policy.pick(candidates(0), VIEW, fixed_loads([])).upstream is None
