"""The health routes: what they mean and the bytes they answer; every process answers them alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal

import orjson

HealthRoute = Literal["liveness", "health", "readiness"]

HEALTH_ROUTES: Final[Mapping[str, HealthRoute]] = MappingProxyType(
    {
        "/liveness": "liveness",
        "/livez": "liveness",
        "/health/live": "liveness",
        "/health": "health",
        "/healthz": "health",
        "/readiness": "readiness",
        "/readyz": "readiness",
        "/health/ready": "readiness",
        "/health_generate": "readiness",
    }
)
"""The routes and their aliases by path; GET and HEAD."""


@dataclass(frozen=True, slots=True)
class HealthFacts:
    """What is known of the node at one moment.

    ``has_registry``: a set of upstreams, be it empty, has been published. ``pool_is_alive``: at least one
    prepare worker is live; ``pool_has_failed``: none was for 10 s. ``healthy_workers``: upstreams that a
    request may be sent to now; ``resting_workers``: after a cool-down that placement waits for.
    ``needs_tokens``: the policy cannot place without token ids.
    """

    is_draining: bool
    has_registry: bool
    pool_is_alive: bool
    pool_has_failed: bool
    healthy_workers: int
    total_workers: int
    resting_workers: int = 0
    needs_tokens: bool = False
    has_tokenizer: bool = False


def health_answer(route: HealthRoute, facts: HealthFacts) -> tuple[int, bytes]:
    """Return status and JSON body; the answer also carries ``cache-control: no-store``."""
    if route == "readiness":
        return _readiness(facts)
    is_sound = not facts.pool_has_failed and (route == "liveness" or facts.pool_is_alive)
    reason = None if is_sound else "prepare_pool_failed"
    return _status(reason), orjson.dumps({"status": "ok" if is_sound else "unhealthy", "reason": reason})


def unreadiness(facts: HealthFacts) -> str | None:
    """Return why an endpoint request sent now could not be served, the first reason that applies."""
    if facts.is_draining:
        return "draining"
    if not facts.has_registry:
        return "starting"
    if facts.pool_has_failed:
        return "prepare_pool_failed"
    if not (facts.healthy_workers or facts.resting_workers):
        return "no_available_workers"
    if facts.needs_tokens and not facts.has_tokenizer:
        return "tokenizer_unavailable"
    return None


def _readiness(facts: HealthFacts) -> tuple[int, bytes]:
    reason = unreadiness(facts)
    body = {
        "status": "ready" if reason is None else "not ready",
        "reason": reason,
        "healthy_workers": facts.healthy_workers,
        "total_workers": facts.total_workers,
    }
    return _status(reason), orjson.dumps(body)


def _status(reason: str | None) -> int:
    return 200 if reason is None else 503
