"""``least_load``: the least loaded candidate; of equally loaded ones each in turn."""

from __future__ import annotations

from typing import Final

from meshd.api.view import RoutingView
from meshd.routing.policies.rotation import Rotation
from meshd.routing.policy import Candidates, Loads, Pick


class LeastLoad:
    """Pick by load; ``turn`` is where this process starts among equals."""

    name: Final = "least_load"
    needs: Final = 0
    uses_ring: Final = False
    has_branches: Final = False
    always_picks: Final = False
    recorder: Final = None

    def __init__(self, turn: int) -> None:
        self.rotation = Rotation(turn)

    def pick(self, candidates: Candidates, view: RoutingView, loads: Loads) -> Pick:
        """Pick one; the view does not matter."""
        if not candidates:
            return Pick(None, "policy:least_load")
        place = self.rotation.least(loads.loads(candidates.numbers))
        return Pick(candidates.upstreams[place], "policy:least_load")
