"""Facts of the health routes from a board and a registry."""

from __future__ import annotations

from dataclasses import replace

from meshd.api.health import HealthFacts
from meshd.control import ProcessBoard, Role, Topology
from meshd.control.board import State
from meshd.routing.readiness import node_facts
from meshd.routing.registry import Registry, Upstream

UPSTREAM = Upstream(0, "a", "http://a:1", is_healthy=True, state="active")


def make_board() -> tuple[ProcessBoard, Topology]:
    topology = Topology.of(1, 2)
    return ProcessBoard.create(topology.board_seats), topology


def test_new_node_has_neither_registry_nor_pool() -> None:
    facts = node_facts(*make_board(), Registry(0, ()))
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
    assert not node_facts(board, topology, Registry(1, ())).pool_is_alive
    row.state = State.READY
    assert node_facts(board, topology, Registry(1, ())).pool_is_alive
    row.close()
    assert not node_facts(board, topology, Registry(1, ())).pool_is_alive


def test_only_healthy_active_upstreams_count_as_healthy() -> None:
    board, topology = make_board()
    upstreams = [
        UPSTREAM,
        replace(UPSTREAM, number=1, base_url="http://b:1", is_healthy=False),
        replace(UPSTREAM, number=2, base_url="http://c:1", state="draining"),
        replace(UPSTREAM, number=3, base_url="http://d:1", state="starting"),
    ]
    facts = node_facts(board, topology, Registry(1, upstreams))
    assert (facts.healthy_workers, facts.total_workers, facts.has_registry) == (1, 4, True)


def test_words_of_the_node_are_passed_on() -> None:
    board, topology = make_board()
    board.is_draining = 1
    board.prepare_failed = 1
    facts = node_facts(board, topology, Registry(1, ()), needs_tokens=True, has_tokenizer=True)
    assert (facts.is_draining, facts.pool_has_failed, facts.needs_tokens, facts.has_tokenizer) == (True,) * 4
