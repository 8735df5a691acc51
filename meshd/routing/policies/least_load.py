"""``least_load``: the least loaded candidate; of equally loaded ones each in turn.

Turns keep an idle fleet from sending everything to its first upstream.
"""

from __future__ import annotations

from typing import Final

from meshd.api.view import RoutingView
from meshd.routing.policy import Candidates, Loads, Pick


class LeastLoad:
    """Pick by load; ``turn`` is where this process starts among equals."""

    name: Final = "least_load"
    needs: Final = 0
    uses_ring: Final = False
    has_branches: Final = False

    def __init__(self, turn: int) -> None:
        self._turn = turn

    def pick(self, candidates: Candidates, view: RoutingView, loads: Loads) -> Pick:
        """Pick one; the view does not matter."""
        if not candidates:
            return Pick(None, "policy:least_load")
        counts = loads.loads(candidates.numbers)
        least = min(counts)
        tied = [index for index, count in enumerate(counts) if count == least]
        upstream = candidates.upstreams[tied[self._turn % len(tied)]]
        self._turn += 1
        return Pick(upstream, "policy:least_load")
