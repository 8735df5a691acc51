"""``prefix_hash``: prompts that begin alike go to the same upstream, unless it is overloaded.

The key of the first token ids has an owner on the hash ring (consistent hashing with bounded loads). An
owner above its share of all loads, ``(total + 1) / n × load factor``, passes the request to the least
loaded candidate. Decisions equal those of the reference router, whose branch names are kept.
"""

from __future__ import annotations

from typing import Final

from meshd.api.view import NEEDS_TOKENS, RoutingView
from meshd.routing.policy import Candidates, Loads, Pick


class PrefixHash:
    """Pick by the first token ids; deterministic, the same in every process."""

    name: Final = "prefix_hash"
    needs: Final = NEEDS_TOKENS
    uses_ring: Final = True
    has_branches: Final = True
    always_picks: Final = False
    recorder: Final = None
    rotation: Final = None

    def __init__(self, load_factor: float) -> None:
        self._load_factor = load_factor

    def pick(self, candidates: Candidates, view: RoutingView, loads: Loads) -> Pick:
        """Pick one; none for a view without token ids."""
        if not view.key_position:
            return Pick(None, "no_tokens", fallback="no_tokens")
        if not candidates:
            return Pick(None, "no_healthy_workers")
        index_of, numbers = candidates.index_of, candidates.numbers
        owner_url = candidates.ring.owner(view.key_position, index_of)
        if owner_url is None:
            counts = loads.loads(numbers)
            least = candidates.upstreams[counts.index(min(counts))]
            return Pick(least, "fallback_least_load", fallback="no_owner")
        owner = index_of[owner_url]
        own = loads.load(numbers[owner])
        # The loads of the others can only raise the limit: where its own is within that, they are not read.
        if own == 0 or own <= (own + 1) / len(numbers) * self._load_factor:
            return Pick(candidates.upstreams[owner], "ring_hit")
        return self._balanced(owner, candidates, loads.loads(numbers))

    def _balanced(self, owner: int, candidates: Candidates, counts: list[int]) -> Pick:
        limit = (sum(counts) + 1) / len(counts) * self._load_factor
        if counts[owner] <= limit:
            return Pick(candidates.upstreams[owner], "ring_hit")
        least = min(counts)
        if least <= limit:
            owner = counts.index(least)
        return Pick(candidates.upstreams[owner], "load_balance_walk")
