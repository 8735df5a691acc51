"""Why a request would go where it would go: what ``POST /route/explain`` answers.

Made from a rehearsal of its placement and from what is shared at that moment: each upstream that is no
candidate is told with the first reason that applies to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshd.api.endpoints import Endpoint
from meshd.api.view import RoutingView
from meshd.routing.conditions import Conditions
from meshd.routing.placement import Rehearsal
from meshd.routing.policies.cache_aware import CacheAware
from meshd.routing.upstream import Upstream


def explanation(
    rehearsal: Rehearsal, endpoint: Endpoint, view: RoutingView, conditions: Conditions
) -> Mapping[str, Any]:
    """Return the answer as plain JSON. O(upstreams); of ``cache_aware`` one look-up for each candidate."""
    policy, pick = rehearsal.policy, rehearsal.pick
    return {
        "policy": policy.name,
        "chosen": None if pick.upstream is None else pick.upstream.url,
        "reason": pick.reason,
        "candidates": [
            {
                "worker": upstream.url,
                "load": load,
                "matched": round(policy.matched(upstream, view), 6)
                if isinstance(policy, CacheAware)
                else None,
                "score": None,
            }
            for upstream, load in zip(rehearsal.candidates, rehearsal.loads, strict=True)
        ],
        "excluded": _excluded(rehearsal, endpoint, view.model, conditions),
    }


def _excluded(
    rehearsal: Rehearsal, endpoint: Endpoint, model: str, conditions: Conditions
) -> list[dict[str, str]]:
    registry, candidates = rehearsal.registry, rehearsal.candidates.number_set
    serving = {upstream.number for upstream in registry.serving(model)}
    excluded = []
    for upstream in registry.upstreams:
        if upstream.number not in candidates:
            is_serving = upstream.number in serving
            reason = _reason(upstream, endpoint, conditions) if is_serving else "wrong_model"
            excluded.append({"worker": upstream.url, "reason": reason})
    return excluded


def _reason(upstream: Upstream, endpoint: Endpoint, conditions: Conditions) -> str:
    """Return the first code that applies to one that serves the model."""
    number = upstream.number
    breaker = conditions.breaker_of(number)
    if not upstream.is_able(endpoint.capability):
        return "api_unsupported"
    if not upstream.is_healthy or upstream.state == "starting":
        return "unhealthy"
    if breaker == "open" or (breaker == "half_open" and conditions.is_tried(number)):
        return "circuit_open"
    if upstream.state == "draining":
        return "draining"
    return "cooling_down" if conditions.cooldown_s(number) else "de_ranked"
