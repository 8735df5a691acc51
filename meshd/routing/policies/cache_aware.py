"""``cache_aware``: a prompt goes where its beginning already lies in the cache, unless that is overloaded.

The prefix index (prefix_index.py) tells who was lately sent the same beginning. While loads are balanced the
longest match wins if it covers enough of the text; when they are not, the least loaded upstream does, and the
match only decides between equals. Whoever is picked is entered as a holder, so a hot prefix spreads.
"""

from __future__ import annotations

from typing import Final

from meshd.api.view import NEEDS_TEXT, RoutingView
from meshd.routing.policies.rotation import Rotation
from meshd.routing.policy import Candidates, Loads, Pick, Recorder
from meshd.routing.prefix_index import PrefixIndex
from meshd.routing.upstream import Upstream


class CacheAware:
    """Pick by the prefix index and by load.

    ``threshold``: share of the text, 0–1, that a match must exceed. The loads are imbalanced when the
    largest is more than ``balance_abs`` above the smallest and more than ``balance_rel`` times as large.
    """

    name: Final = "cache_aware"
    needs: Final = NEEDS_TEXT
    uses_ring: Final = False
    has_branches: Final = True
    always_picks: Final = False

    def __init__(
        self, index: PrefixIndex, turn: int, threshold: float, balance_abs: int, balance_rel: float
    ) -> None:
        self.recorder: Recorder = self
        self._index = index
        self.rotation = Rotation(turn)
        self._threshold = threshold
        self._balance_abs = balance_abs
        self._balance_rel = balance_rel

    def pick(self, candidates: Candidates, view: RoutingView, loads: Loads) -> Pick:
        """Pick one and note nothing; ``record`` does."""
        if not candidates:
            return Pick(None, "policy:cache_aware")
        fallback = "" if view.text_bytes else "no_text"
        counts = loads.loads(candidates.numbers)
        least = most = counts[0]
        for count in counts:
            if count < least:
                least = count
            elif count > most:
                most = count
        is_imbalanced = most - least > self._balance_abs and most > least * self._balance_rel
        if is_imbalanced:
            reason = "imbalanced"
            tied = [index for index, count in enumerate(counts) if count == least]
            eligible = (
                frozenset(candidates.numbers[index] for index in tied) if len(tied) > 1 else frozenset()
            )
        else:
            reason = "cache_miss"
            tied = []
            eligible = candidates.number_set
        if eligible and view.text_bytes:
            match = self._index.match(view.block_keys, view.text_bytes, eligible)
            if match is not None and match.matched_bytes / view.text_bytes > self._threshold:
                upstream = candidates.upstreams[candidates.numbers.index(match.number)]
                return Pick(upstream, reason if is_imbalanced else "cache_hit", fallback)
        place = self.rotation.next_of(tied) if tied else self.rotation.least(counts)
        return Pick(candidates.upstreams[place], reason, fallback)

    def record(self, upstream: Upstream, view: RoutingView) -> None:
        """Enter the upstream as a holder of the text, before the request is sent."""
        self._index.insert(view.block_keys, upstream.number)

    def matched(self, upstream: Upstream, view: RoutingView) -> float:
        """Return the share of the text that one upstream holds, 0–1."""
        if not view.text_bytes:
            return 0.0
        return self._index.matched_bytes(view.block_keys, view.text_bytes, upstream.number) / view.text_bytes
