"""The facts that the health routes answer from, read from shared memory; the same for every process."""

from __future__ import annotations

from meshd.api.health import HealthFacts
from meshd.control import ProcessBoard, State, Topology
from meshd.routing.conditions import Conditions
from meshd.routing.registry import Registry
from meshd.routing.upstream import Upstream, is_available


def node_facts(
    board: ProcessBoard,
    topology: Topology,
    registry: Registry,
    conditions: Conditions,
    max_wait_s: float,
    *,
    needs_tokens: bool = False,
    has_tokenizer: bool = False,
) -> HealthFacts:
    """Read the board, a registry and the conditions; O(prepare seats + upstreams), without a system call.

    ``max_wait_s``: how long placement waits for the end of a cool-down.
    """
    seats = (board.row(topology.board_prepare(number)) for number in range(topology.prepare_seats))
    return HealthFacts(
        is_draining=bool(board.is_draining),
        has_registry=registry.generation > 0,
        pool_is_alive=any(row.state is State.READY for row in seats),
        pool_has_failed=bool(board.prepare_failed),
        healthy_workers=sum(conditions.is_available(upstream) for upstream in registry.upstreams),
        resting_workers=sum(_is_resting(upstream, conditions, max_wait_s) for upstream in registry.upstreams),
        total_workers=len(registry.upstreams),
        needs_tokens=needs_tokens,
        has_tokenizer=has_tokenizer,
    )


def _is_resting(upstream: Upstream, conditions: Conditions, max_wait_s: float) -> bool:
    """Say whether nothing but a short cool-down keeps requests from ``upstream``."""
    is_admitted = is_available(upstream) and conditions.breaker_of(upstream.number) != "open"
    return is_admitted and 0 < conditions.cooldown_s(upstream.number) <= max_wait_s
