"""Which candidates may be sent a request now, and when it will be better if none may.

In trouble (conditions.py) the candidates that are left are kept for as long as it stays the same, so that a
fleet with one bad upstream places as fast as a sound one.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Final

from meshd.errors import MeshError
from meshd.routing.conditions import Conditions, Trouble
from meshd.routing.policy import Candidates
from meshd.routing.registry import Registry

CALM: Final = Trouble(frozenset(), frozenset(), frozenset(), math.inf)

_MAX_KEPT: Final = 4096
_MAX_ADVICE_S: Final = 60

RouteKey = tuple[int, str]
"""Endpoint number and model: what the candidates of a generation depend on."""


class NoneAvailable(MeshError):
    """Nobody can be sent the request now.

    ``wait_s``: after how long a cool-down, which alone is to blame, will have ended; infinite if there is
    no such. The advice to the client also knows when an open breaker will admit a trial.
    """

    __slots__ = ("wait_s",)

    def __init__(self, wait_s: float, opens_in_s: float) -> None:
        first_s = min(wait_s, opens_in_s)
        super().__init__(
            "no_available_workers",
            "No server is available for this request at the moment.",
            retry_after_s=None if first_s == math.inf else min(max(math.ceil(first_s), 1), _MAX_ADVICE_S),
        )
        self.wait_s = wait_s


class Availability:
    """Narrows the candidates of one process; ``renew`` with each generation."""

    def __init__(self, conditions: Conditions) -> None:
        self._conditions = conditions
        self._registry = Registry(0, ())
        self._trouble = CALM
        self._kept: dict[tuple[int, str, frozenset[int]], Candidates] = {}

    def renew(self, registry: Registry) -> None:
        self._registry = registry
        self._kept.clear()

    def narrow(
        self,
        key: RouteKey,
        candidates: Candidates,
        trouble: Trouble,
        tried: Collection[int],
        lost: Collection[int],
    ) -> Candidates:
        """Leave out the unavailable; then the ``tried`` and the de-ranked, each unless none would remain.

        ``lost``: half-open ones that another process tries.
        """
        tested = frozenset(n for n in trouble.trying if n in lost or self._conditions.is_tried(n))
        if tried:
            available = self._available(candidates, trouble, tested)
            return self._ranked(self.untried(available, tried), trouble)
        if trouble is not self._trouble or len(self._kept) >= _MAX_KEPT:
            self._trouble = trouble
            self._kept.clear()
        found = self._kept.get((*key, tested))
        if found is None:
            available = self._available(candidates, trouble, tested)
            found = self._kept[(*key, tested)] = self._ranked(available, trouble)
        return found

    def untried(self, candidates: Candidates, tried: Collection[int]) -> Candidates:
        """Leave out those already tried for this request, unless none would remain."""
        left = [upstream for upstream in candidates if upstream.number not in tried]
        if not left or len(left) == len(candidates):
            return candidates
        return Candidates(left, self._registry, tried)

    def wait_s(self, candidates: Candidates, trouble: Trouble) -> float:
        """Return 0 if one of them may be sent a request now, else ``NoneAvailable.wait_s``."""
        for number in candidates.numbers:
            is_tested = number in trouble.trying and self._conditions.is_tried(number)
            if number not in trouble.excluded and not is_tested:
                return 0.0
        return self.none_of(candidates).wait_s

    def none_of(self, candidates: Candidates) -> NoneAvailable:
        """Tell when it will be better, from what stands in the way of each."""
        wait_s = opens_in_s = math.inf
        for number in candidates.numbers:
            cooldown_s = self._conditions.cooldown_s(number)
            if self._conditions.breaker_of(number) == "open":
                opens_in_s = min(opens_in_s, max(self._conditions.opens_in_s(number), cooldown_s))
            elif cooldown_s:
                wait_s = min(wait_s, cooldown_s)
        return NoneAvailable(wait_s, opens_in_s)

    def _available(self, candidates: Candidates, trouble: Trouble, tested: frozenset[int]) -> Candidates:
        out = trouble.excluded | tested
        return Candidates((u for u in candidates if u.number not in out), self._registry)

    def _ranked(self, candidates: Candidates, trouble: Trouble) -> Candidates:
        left = [upstream for upstream in candidates if upstream.number not in trouble.deranked]
        if not left or len(left) == len(candidates):
            return candidates
        return Candidates(left, self._registry, candidates.tried)

    def __repr__(self) -> str:
        return f"Availability({self._trouble}, kept={len(self._kept)})"
