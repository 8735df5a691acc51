from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from meshd.api.block_keys import block_keys
from meshd.api.view import RoutingView
from meshd.memory import Segment
from meshd.routing.policies.cache_aware import CacheAware
from meshd.routing.policy import Candidates
from meshd.routing.prefix_index import MIN_BYTES, SEGMENT_KIND, PrefixIndex, segment_bytes

MakeCandidates = Callable[..., Candidates]


@pytest.fixture
def index() -> PrefixIndex:
    return PrefixIndex(Segment.create(SEGMENT_KIND, segment_bytes(MIN_BYTES, 1)), 0, 1, MIN_BYTES)


@pytest.fixture
def policy(index: PrefixIndex) -> CacheAware:
    return CacheAware(index, 0, threshold=0.3, balance_abs=64, balance_rel=1.5)


def _view(text: str) -> RoutingView:
    data = text.encode()
    return RoutingView("m", text_bytes=len(data), block_keys=block_keys("m", data))


def _hold(index: PrefixIndex, number: int, text: str) -> None:
    index.insert(_view(text).block_keys, number)


@pytest.mark.parametrize(
    ("loads", "held", "length", "picked", "reason"),
    [
        ([70, 4, 9], {0: 512}, 512, 1, "imbalanced"),
        ([10, 4, 9], {0: 256}, 400, 0, "cache_hit"),
        ([10, 4, 9], {0: 128}, 512, 1, "cache_miss"),
        ([100, 20, 20], {2: 896}, 1000, 2, "imbalanced"),
        ([130, 90, 95], {0: 384}, 1280, 1, "cache_miss"),
    ],
)
def test_the_rows_of_the_specification(
    policy: CacheAware,
    index: PrefixIndex,
    candidates: MakeCandidates,
    fixed_loads: Any,
    loads: list[int],
    held: dict[int, int],
    length: int,
    picked: int,
    reason: str,
) -> None:
    text = "".join(f"{word:08d}" for word in range(1000))
    for number, covered in held.items():
        _hold(index, number, text[:covered])
    pick = policy.pick(candidates(3), _view(text[:length]), fixed_loads(loads))
    assert pick.upstream is not None
    assert (pick.upstream.number, pick.reason, pick.fallback) == (picked, reason, "")


def test_misses_go_to_the_least_loaded_and_ties_rotate(
    policy: CacheAware, candidates: MakeCandidates, fixed_loads: Any
) -> None:
    picks = [policy.pick(candidates(4), _view(f"{n} new"), fixed_loads([3, 1, 2, 1])) for n in range(4)]
    assert [pick.upstream.number for pick in picks if pick.upstream] == [1, 3, 1, 3]
    assert {pick.reason for pick in picks} == {"cache_miss"}


def test_imbalance_without_a_holder_rotates_among_the_least_loaded(
    policy: CacheAware, candidates: MakeCandidates, fixed_loads: Any
) -> None:
    picks = [policy.pick(candidates(3), _view("x" * 300), fixed_loads([100, 2, 2])) for _ in range(2)]
    assert [pick.upstream.number for pick in picks if pick.upstream] == [1, 2]


def test_a_match_that_is_no_candidate_counts_for_nothing(
    policy: CacheAware, index: PrefixIndex, candidates: MakeCandidates, fixed_loads: Any
) -> None:
    _hold(index, 3, "x" * 300)
    pick = policy.pick(candidates(2, fleet=4), _view("x" * 300), fixed_loads([0, 0, 0, 0]))
    assert pick.reason == "cache_miss"


def test_what_was_recorded_is_hit_next_time(
    policy: CacheAware, candidates: MakeCandidates, fixed_loads: Any
) -> None:
    fleet = candidates(3)
    policy.record(fleet.upstreams[2], _view("x" * 300))
    pick = policy.pick(fleet, _view("x" * 300 + "y" * 100), fixed_loads([0, 0, 0]))
    assert pick.upstream is fleet.upstreams[2]
    assert pick.reason == "cache_hit"
    assert policy.matched(fleet.upstreams[2], _view("x" * 300 + "y" * 100)) == 0.64
    assert policy.matched(fleet.upstreams[1], _view("x" * 300)) == 0


def test_picking_alone_records_nothing(
    policy: CacheAware, index: PrefixIndex, candidates: MakeCandidates, fixed_loads: Any
) -> None:
    policy.pick(candidates(2), _view("x" * 300), fixed_loads([0, 0]))
    assert index.entries == 0


def test_a_request_without_text_goes_by_load_and_says_so(
    policy: CacheAware, candidates: MakeCandidates, fixed_loads: Any
) -> None:
    pick = policy.pick(candidates(2), _view(""), fixed_loads([1, 0]))
    assert pick.upstream is not None
    assert (pick.upstream.number, pick.reason, pick.fallback) == (1, "cache_miss", "no_text")


def test_nothing_is_picked_from_no_candidates(
    policy: CacheAware, candidates: MakeCandidates, fixed_loads: Any
) -> None:
    assert policy.pick(candidates(0), _view("x"), fixed_loads([])).upstream is None
