"""``consistent_hash``: a session key always goes to the same upstream, and nothing is stored.

The key's owner on the hash ring is the same on every node that knows the same upstreams; one upstream more or
less moves only the keys that it takes over or leaves.
"""

from __future__ import annotations

from typing import Final

from blake3 import blake3

from meshd.api.view import NEEDS_SESSION, RoutingView
from meshd.routing.policies.rotation import Rotation
from meshd.routing.policy import Candidates, Loads, Pick
from meshd.routing.upstream import Upstream


def session_position(key: bytes) -> int:
    """Return where a session key lies on the hash ring."""
    return int.from_bytes(blake3(key).digest(length=8), "little")


def owner_of(candidates: Candidates, key: bytes) -> Upstream | None:
    """Return the candidate that owns a session key; ``None`` if none of them is on the ring."""
    url = candidates.ring.owner(session_position(key), candidates.index_of)
    return None if url is None else candidates.upstreams[candidates.index_of[url]]


class ConsistentHash:
    """Pick by the session key; without one by load. ``turn`` is where this process starts among equals."""

    name: Final = "consistent_hash"
    needs: Final = NEEDS_SESSION
    uses_ring: Final = True
    has_branches: Final = False
    always_picks: Final = False
    recorder: Final = None

    def __init__(self, turn: int) -> None:
        self.rotation = Rotation(turn)

    def pick(self, candidates: Candidates, view: RoutingView, loads: Loads) -> Pick:
        """Pick one; the loads matter only without a key."""
        if not candidates:
            return Pick(None, "policy:consistent_hash")
        fallback = "no_session_key"
        if view.session_key:
            owner = owner_of(candidates, view.session_key)
            if owner is not None:
                return Pick(owner, "policy:consistent_hash")
            fallback = "no_owner"
        place = self.rotation.least(loads.loads(candidates.numbers))
        return Pick(candidates.upstreams[place], "policy:consistent_hash", fallback)
