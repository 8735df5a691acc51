"""Facts of the health routes from a board and a registry."""

from __future__ import annotations

from dataclasses import replace

from meshd.api.health import HealthFacts
from meshd.control import ProcessBoard, Role, Topology
from meshd.control.board import State
from meshd.memory import Segment
from meshd.routing.conditions import HALF_OPEN, OPEN, Conditions, segment_bytes
from meshd.routing.readiness import node_facts
from meshd.routing.registry import Registry, Upstream

UPSTREAM = Upstream(0, "a", "http://a:1", is_healthy=True, state="active")


def calm() -> Conditions:
    return Conditions(Segment.create("conditions", segment_bytes(2)), 0, 2, owner=1, clock=lambda: 1000.0)


MAX_WAIT_S = 30.0


def make_board() -> tuple[ProcessBoard, Topology]:
    topology = Topology.of(1, 2)
    return ProcessBoard.create(topology.board_seats), topology


def test_new_node_has_neither_registry_nor_pool() -> None:
    facts = node_facts(*make_board(), Registry(0, ()), calm(), MAX_WAIT_S)
    assert facts == HealthFacts(
        is_draining=False,
        has_registry=False,
        pool_is_alive=False,
        pool_has_failed=False,
        healthy_workers=0,
        total_workers=0,
    )


def test_one_ready_prepare_worker_makes_the_pool_alive_and_its_death_ends_it() -> None:
    board, topology = make_board()
    row = board.row(topology.board_prepare(1))
    row.open(Role.PREPARE, 1, 4711, "0")
    assert not node_facts(board, topology, Registry(1, ()), calm(), MAX_WAIT_S).pool_is_alive
    row.state = State.READY
    assert node_facts(board, topology, Registry(1, ()), calm(), MAX_WAIT_S).pool_is_alive
    row.close()
    assert not node_facts(board, topology, Registry(1, ()), calm(), MAX_WAIT_S).pool_is_alive


def test_only_healthy_active_upstreams_count_as_healthy() -> None:
    board, topology = make_board()
    upstreams = [
        UPSTREAM,
        replace(UPSTREAM, number=1, base_url="http://b:1", is_healthy=False),
        replace(UPSTREAM, number=2, base_url="http://c:1", state="draining"),
        replace(UPSTREAM, number=3, base_url="http://d:1", state="starting"),
    ]
    facts = node_facts(board, topology, Registry(1, upstreams), calm(), MAX_WAIT_S)
    assert (facts.healthy_workers, facts.total_workers, facts.has_registry) == (1, 4, True)


def test_words_of_the_node_are_passed_on() -> None:
    board, topology = make_board()
    board.is_draining = 1
    board.prepare_failed = 1
    facts = node_facts(
        board, topology, Registry(1, ()), calm(), MAX_WAIT_S, needs_tokens=True, has_tokenizer=True
    )
    assert (facts.is_draining, facts.pool_has_failed, facts.needs_tokens, facts.has_tokenizer) == (True,) * 4


def test_upstream_in_a_short_cool_down_serves_later_and_one_in_a_long_one_does_not() -> None:
    conditions = calm()
    registry = Registry(1, [UPSTREAM])
    conditions.derank(0, 1001.0)
    facts = node_facts(*make_board(), registry, conditions, MAX_WAIT_S)
    assert (facts.healthy_workers, facts.resting_workers) == (1, 0)
    conditions.cool_down(0, 1030.0)
    facts = node_facts(*make_board(), registry, conditions, MAX_WAIT_S)
    assert (facts.healthy_workers, facts.resting_workers) == (0, 1)
    conditions.cool_down(0, 1030.5)
    facts = node_facts(*make_board(), registry, conditions, MAX_WAIT_S)
    assert (facts.healthy_workers, facts.resting_workers) == (0, 0)


def test_open_breaker_makes_unready_and_a_half_open_one_does_not() -> None:
    conditions = calm()
    conditions.cool_down(0, 1005.0)
    words = conditions.cells.breaker_words
    found = []
    for state in (OPEN, HALF_OPEN):
        words[0] = state
        facts = node_facts(*make_board(), Registry(1, [UPSTREAM]), conditions, MAX_WAIT_S)
        found.append((facts.healthy_workers, facts.resting_workers))
    assert found == [(0, 0), (0, 1)]
