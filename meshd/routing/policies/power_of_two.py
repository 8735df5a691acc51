"""``power_of_two``: the less loaded of two random candidates.

It avoids the worst without the herd of least loaded, where every process runs to the same upstream.
Load is the shared count of placements, never a number polled from the upstream.
"""

from __future__ import annotations

from random import Random
from typing import Final

from meshd.api.view import RoutingView
from meshd.routing.policy import Candidates, Loads, Pick


class PowerOfTwo:
    """Pick by two distinct uniform draws; of equal loads the first draw wins."""

    name: Final = "power_of_two"
    needs: Final = 0
    uses_ring: Final = False
    has_branches: Final = False
    always_picks: Final = False
    recorder: Final = None
    rotation: Final = None

    def __init__(self, rng: Random) -> None:
        self._rng = rng

    def pick(self, candidates: Candidates, view: RoutingView, loads: Loads) -> Pick:
        """Pick one; a single candidate is its own second draw."""
        upstreams = candidates.upstreams
        if len(upstreams) < 2:
            return Pick(upstreams[0] if upstreams else None, "policy:power_of_two")
        first = int(self._rng.random() * len(upstreams))
        second = int(self._rng.random() * (len(upstreams) - 1))
        if second >= first:
            second += 1
        one, other = upstreams[first], upstreams[second]
        is_first_lighter = loads.load(one.number) <= loads.load(other.number)
        return Pick(one if is_first_lighter else other, "policy:power_of_two")
