from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_64_hexdigest

from meshd.api.view import NEEDS_TOKENS, RoutingView
from meshd.routing.policies.prefix_hash import PrefixHash
from meshd.routing.policy import Candidates
from meshd.routing.registry import Registry


def view_of(*ids: int) -> RoutingView:
    """A view with the key position worked out here, independently of the prepare job."""
    packed = struct.pack(f"<{len(ids)}I", *ids)
    key = xxh3_64_hexdigest(packed)
    position = int.from_bytes(blake3(key.encode()).digest(length=8), "little")
    return RoutingView("m1", token_ids=packed, prefix_key=int(key, 16), key_position=position)


OWNED_BY_THE_THIRD = (5, 17, 256, 70000)


def test_it_asks_the_prepare_job_for_tokens() -> None:
    assert PrefixHash(1.25).needs == NEEDS_TOKENS


@pytest.mark.parametrize(
    ("ids", "owner"), [((1, 2, 3, 4), 1), (OWNED_BY_THE_THIRD, 2), ((151644, 8948, 198, 2610), 1)]
)
def test_idle_upstreams_get_the_keys_they_own(
    ids: tuple[int, ...], owner: int, candidates: Callable[..., Candidates], fixed_loads: Any
) -> None:
    pick = PrefixHash(1.25).pick(candidates(3), view_of(*ids), fixed_loads([0, 0, 0]))
    assert pick.upstream is not None
    assert (pick.upstream.number, pick.reason, pick.fallback) == (owner, "ring_hit", "")


@pytest.mark.parametrize(
    ("counts", "number", "branch"),
    [
        ([0, 0, 0], 2, "ring_hit"),
        ([0, 0, 3], 0, "load_balance_walk"),
        ([1, 1, 1], 2, "ring_hit"),
        ([1, 0, 3], 1, "load_balance_walk"),
        ([1, 1, 3], 0, "load_balance_walk"),
    ],
)
def test_owner_above_its_share_gives_way_to_the_least_loaded(
    counts: list[int],
    number: int,
    branch: str,
    candidates: Callable[..., Candidates],
    fixed_loads: Any,
) -> None:
    pick = PrefixHash(1.25).pick(candidates(3), view_of(*OWNED_BY_THE_THIRD), fixed_loads(counts))
    assert pick.upstream is not None
    assert (pick.upstream.number, pick.reason) == (number, branch)


def test_owner_keeps_the_request_when_nobody_is_within_the_limit(
    candidates: Callable[..., Candidates], fixed_loads: Any
) -> None:
    # factor 0.5: limit (30 + 1) / 3 × 0.5 = 5.2, below every load
    pick = PrefixHash(0.5).pick(candidates(3), view_of(*OWNED_BY_THE_THIRD), fixed_loads([10, 10, 10]))
    assert pick.upstream is not None
    assert (pick.upstream.number, pick.reason) == (2, "load_balance_walk")


def test_loads_of_upstreams_that_are_no_candidates_do_not_count(
    candidates: Callable[..., Candidates], fixed_loads: Any
) -> None:
    two_of_three = candidates(2, fleet=3)
    pick = PrefixHash(1.25).pick(two_of_three, view_of(*OWNED_BY_THE_THIRD), fixed_loads([0, 0, 50]))
    assert pick.upstream is not None
    assert (pick.upstream.number, pick.reason) == (0, "ring_hit")


def test_without_tokens_nothing_is_picked_and_it_is_said(
    candidates: Callable[..., Candidates], fixed_loads: Any
) -> None:
    pick = PrefixHash(1.25).pick(candidates(3), RoutingView("m1"), fixed_loads([0, 0, 0]))
    assert (pick.upstream, pick.reason, pick.fallback) == (None, "no_tokens", "no_tokens")


def test_without_candidates_nothing_is_picked(
    candidates: Callable[..., Candidates], fixed_loads: Any
) -> None:
    pick = PrefixHash(1.25).pick(candidates(0), view_of(1), fixed_loads([]))
    assert (pick.upstream, pick.reason, pick.fallback) == (None, "no_healthy_workers", "")


def test_candidates_off_the_ring_are_picked_by_load_in_registration_order(
    candidates: Callable[..., Candidates], fixed_loads: Any
) -> None:
    strangers = Candidates(candidates(3).upstreams, Registry(2, ()))
    pick = PrefixHash(1.25).pick(strangers, view_of(1), fixed_loads([4, 2, 2]))
    assert (pick.upstream, pick.reason, pick.fallback) == (
        strangers.upstreams[1],
        "fallback_least_load",
        "no_owner",
    )


def test_decisions_equal_a_plain_reading_of_the_rules(
    candidates: Callable[..., Candidates], fixed_loads: Any
) -> None:
    four = candidates(4)

    @settings(max_examples=150, deadline=None)
    @given(
        counts=st.lists(st.integers(0, 12), min_size=4, max_size=4),
        ids=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=8),
        factor=st.sampled_from([0.5, 1.0, 1.25, 2.0]),
    )
    def check(counts: list[int], ids: list[int], factor: float) -> None:
        view = view_of(*ids)
        owner = four.index_of[four.ring.clockwise(view.key_position)[0]]
        within = [n for n in range(4) if sum(counts) == 0 or counts[n] <= (sum(counts) + 1) / 4 * factor]
        if owner in within:
            expected = (owner, "ring_hit")
        else:
            least = min(within, key=lambda n: (counts[n], n), default=owner)
            expected = (least, "load_balance_walk")
        pick = PrefixHash(factor).pick(four, view, fixed_loads(counts))
        assert pick.upstream is not None
        assert (pick.upstream.number, pick.reason) == expected

    check()
