from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from meshd.api.view import NO_ASSIGNMENT, RoutingView
from meshd.memory import Segment
from meshd.routing.policies.consistent_hash import owner_of
from meshd.routing.policies.dp_sticky import UNASSIGNED, DpSticky
from meshd.routing.policy import Candidates
from meshd.routing.registry import Registry
from meshd.routing.sessions import SEGMENT_KIND, SessionId, SessionLedger, SessionTable, segment_bytes
from meshd.routing.upstream import Upstream

KEY = b"s-42"


@pytest.fixture
def ledger() -> SessionLedger:
    return SessionLedger(Segment.create(SEGMENT_KIND, segment_bytes(64)), sessions=64)


@pytest.fixture
def policy(ledger: SessionLedger) -> DpSticky:
    return DpSticky(ledger, 0)


def _view(assigned: int = -1, key: bytes = KEY) -> RoutingView:
    return RoutingView("m1", session_key=key, assigned=assigned)


def test_a_known_session_stays(
    policy: DpSticky, ledger: SessionLedger, candidates: Callable[..., Candidates], fixed_loads: Any
) -> None:
    ledger.assign(SessionId.of(KEY), [2], lambda number: 0)
    pick = policy.pick(candidates(3), _view(), fixed_loads([0, 0, 90]))
    assert pick.upstream is not None
    assert (pick.upstream.number, pick.reason) == (2, "sticky")


def test_a_new_session_waits_for_its_assignment(
    policy: DpSticky, candidates: Callable[..., Candidates], fixed_loads: Any
) -> None:
    fleet, loads = candidates(3), fixed_loads([0, 0, 0])
    pick = policy.pick(fleet, _view(), loads)
    assert (pick.upstream, pick.reason) == (None, UNASSIGNED)
    assigned = policy.pick(fleet, _view(assigned=1), loads)
    assert assigned.upstream is fleet.upstreams[1]
    assert assigned.reason == "new_session"


def test_without_an_answer_consistent_hashing_decides(
    policy: DpSticky, candidates: Callable[..., Candidates], fixed_loads: Any
) -> None:
    fleet = candidates(3)
    pick = policy.pick(fleet, _view(NO_ASSIGNMENT), fixed_loads([0, 0, 0]))
    assert pick.upstream is owner_of(fleet, KEY)
    assert pick.reason == "policy:dp_sticky"


def test_a_session_whose_upstream_is_gone_is_assigned_again(
    policy: DpSticky, ledger: SessionLedger, candidates: Callable[..., Candidates], fixed_loads: Any
) -> None:
    ledger.assign(SessionId.of(KEY), [2], lambda number: 0)
    assert policy.pick(candidates(2, fleet=3), _view(), fixed_loads([0, 0, 0])).reason == UNASSIGNED


def test_a_session_whose_upstream_was_only_tried_keeps_it(
    policy: DpSticky, ledger: SessionLedger, make_upstream: Callable[..., Upstream], fixed_loads: Any
) -> None:
    ledger.assign(SessionId.of(KEY), [2], lambda number: 0)
    fleet = [make_upstream(number) for number in range(3)]
    left = Candidates(fleet[:2], Registry(1, fleet), tried={2})
    pick = policy.pick(left, _view(), fixed_loads([0, 0, 0]))
    assert pick.upstream in fleet[:2]
    assert pick.reason == "policy:dp_sticky"
    assert ledger.find(SessionId.of(KEY)) == 2


def test_without_a_key_the_least_loaded_is_picked_and_nothing_stored(
    policy: DpSticky, ledger: SessionLedger, candidates: Callable[..., Candidates], fixed_loads: Any
) -> None:
    pick = policy.pick(candidates(2), _view(key=b""), fixed_loads([1, 0]))
    assert pick.upstream is not None
    assert (pick.upstream.number, pick.fallback) == (1, "no_session_key")
    assert ledger.active == 0


def test_recording_refreshes_only_the_session_at_its_own_upstream(
    candidates: Callable[..., Candidates],
) -> None:
    now_ns = 5
    segment = Segment.create(SEGMENT_KIND, segment_bytes(64))
    ledger = SessionLedger(segment, lambda: now_ns, sessions=64)
    policy = DpSticky(SessionTable(segment, lambda: now_ns, sessions=64), 0)
    ledger.assign(SessionId.of(KEY), [1], lambda number: 0)
    used = [word for word in segment.words.tolist() if word == 5]
    assert used
    now_ns = 77
    policy.record(candidates(2).upstreams[0], _view())
    assert 77 not in segment.words.tolist()
    policy.record(candidates(2).upstreams[1], _view())
    assert 77 in segment.words.tolist()
