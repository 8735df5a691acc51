"""``random``: any candidate, each as likely as the other."""

from __future__ import annotations

from random import Random
from typing import Final

from meshd.api.view import RoutingView
from meshd.routing.policy import Candidates, Loads, Pick


class RandomChoice:
    """Pick uniformly."""

    name: Final = "random"
    needs: Final = 0
    uses_ring: Final = False
    has_branches: Final = False
    always_picks: Final = False
    recorder: Final = None
    rotation: Final = None

    def __init__(self, rng: Random) -> None:
        self._rng = rng

    def pick(self, candidates: Candidates, view: RoutingView, loads: Loads) -> Pick:
        """Pick one; the view and the loads do not matter."""
        if not candidates:
            return Pick(None, "policy:random")
        return Pick(candidates.upstreams[int(self._rng.random() * len(candidates))], "policy:random")
