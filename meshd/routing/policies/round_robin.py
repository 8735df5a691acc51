"""``round_robin``: each candidate in turn, exact within one process."""

from __future__ import annotations

from typing import Final

from meshd.api.view import RoutingView
from meshd.routing.policies.rotation import Rotation
from meshd.routing.policy import Candidates, Loads, Pick

_REASON: Final = "policy:round_robin"


class RoundRobin:
    """Pick in registration order; ``turn`` is where this process starts."""

    name: Final = "round_robin"
    needs: Final = 0
    uses_ring: Final = False
    has_branches: Final = False
    always_picks: Final = False
    recorder: Final = None

    def __init__(self, turn: int) -> None:
        self.rotation = Rotation(turn)

    def pick(self, candidates: Candidates, view: RoutingView, loads: Loads) -> Pick:
        """Pick the next one; the view and the loads do not matter."""
        picks = candidates.picks(_REASON)
        if not picks:
            return Pick(None, _REASON)
        rotation = self.rotation
        turn = rotation.turn
        rotation.turn = turn + 1
        return picks[turn % len(picks)]
