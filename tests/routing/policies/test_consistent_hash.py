from __future__ import annotations

from collections.abc import Callable
from typing import Any

from meshd.api.view import RoutingView
from meshd.routing.policies.consistent_hash import ConsistentHash, session_position
from meshd.routing.policy import Candidates


def _view(key: str) -> RoutingView:
    return RoutingView("m1", session_key=key.encode())


def test_the_examples_of_the_specification(candidates: Callable[..., Candidates], fixed_loads: Any) -> None:
    assert session_position(b"s-42") == 0xE5368FE8218D4361
    assert session_position(b"user-7") == 0x48E18065D83C8584
    policy, fleet, loads = ConsistentHash(0), candidates(3), fixed_loads([9, 9, 9])
    urls = [policy.pick(fleet, _view(key), loads).upstream for key in ("s-42", "user-7")]
    assert [upstream.url for upstream in urls if upstream] == ["http://10.0.0.2:8000", "http://10.0.0.1:8000"]


def test_load_does_not_move_a_session(candidates: Callable[..., Candidates], fixed_loads: Any) -> None:
    policy, fleet = ConsistentHash(0), candidates(5)
    idle = [policy.pick(fleet, _view(f"s{n}"), fixed_loads([0] * 5)).upstream for n in range(50)]
    busy = [policy.pick(fleet, _view(f"s{n}"), fixed_loads([90, 0, 5, 1, 7])).upstream for n in range(50)]
    assert idle == busy
    assert len({upstream.number for upstream in idle if upstream}) == 5


def test_without_its_owner_a_session_has_another_and_the_others_stay(
    candidates: Callable[..., Candidates], fixed_loads: Any
) -> None:
    policy, loads = ConsistentHash(0), fixed_loads([0] * 5)
    for number in range(60):
        before = policy.pick(candidates(5), _view(f"s{number}"), loads).upstream
        after = policy.pick(candidates(4, fleet=5), _view(f"s{number}"), loads).upstream
        assert before and after
        assert after.number == before.number if before.number < 4 else after.number < 4


def test_without_a_key_the_least_loaded_take_turns_and_it_is_told(
    candidates: Callable[..., Candidates], fixed_loads: Any
) -> None:
    policy = ConsistentHash(0)
    picks = [policy.pick(candidates(3), _view(""), fixed_loads([0, 4, 0])) for _ in range(3)]
    assert [pick.upstream.number for pick in picks if pick.upstream] == [0, 2, 0]
    assert {pick.fallback for pick in picks} == {"no_session_key"}


def test_nothing_is_picked_from_no_candidates(
    candidates: Callable[..., Candidates], fixed_loads: Any
) -> None:
    assert ConsistentHash(0).pick(candidates(0), _view("s"), fixed_loads([])).upstream is None
