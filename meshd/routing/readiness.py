"""The facts that the health routes answer from, read from shared memory; the same for every process."""

from __future__ import annotations

from meshd.api.health import HealthFacts
from meshd.control import ProcessBoard, State, Topology
from meshd.routing.registry import Registry
from meshd.routing.upstream import is_available


def node_facts(
    board: ProcessBoard,
    topology: Topology,
    registry: Registry,
    *,
    needs_tokens: bool = False,
    has_tokenizer: bool = False,
) -> HealthFacts:
    """Read the board and a registry; O(prepare seats + upstreams), without a system call."""
    seats = (board.row(topology.board_prepare(number)) for number in range(topology.prepare_seats))
    return HealthFacts(
        is_draining=bool(board.is_draining),
        has_registry=registry.generation > 0,
        pool_is_alive=any(row.state is State.READY for row in seats),
        pool_has_failed=bool(board.prepare_failed),
        healthy_workers=sum(is_available(upstream) for upstream in registry.upstreams),
        total_workers=len(registry.upstreams),
        needs_tokens=needs_tokens,
        has_tokenizer=has_tokenizer,
    )
