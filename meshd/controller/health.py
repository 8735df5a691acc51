"""Judge the health of one origin by its probes; pure, without a clock.

==============  =====================================================================
never answered  unhealthy; probed each second until the first success, which is enough
healthy         ``failure_threshold`` consecutive failures make it unhealthy
unhealthy       ``success_threshold`` consecutive successes make it healthy again
==============  =====================================================================

A probe that fails while real traffic succeeded since the one before counts as a success: a server too busy
to answer probes is not a dead one.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Final

FIRST_ANSWER_INTERVAL_S: Final = 1.0
JITTER: Final = 0.1


@dataclass(frozen=True, slots=True)
class ProbeRules:
    """``startup_limit_s``: without a success for so long, an origin is probed at the normal interval."""

    interval_s: float
    failure_threshold: int
    success_threshold: int
    startup_limit_s: float = 1800.0


class HealthJudge:
    """Health of one origin. ``has_answered``: some probe, maybe of a former controller, was a success."""

    __slots__ = ("_run", "has_answered", "is_healthy", "rules")

    def __init__(self, rules: ProbeRules, *, is_healthy: bool = False, has_answered: bool = False) -> None:
        self.rules = rules
        self.is_healthy = is_healthy
        self.has_answered = has_answered
        self._run = 0  # consecutive probes that speak against the present state

    def record(self, is_success: bool, has_traffic: bool = False) -> bool:
        """Take the result of a probe; return whether health changed.

        ``has_traffic``: a request of a client succeeded since the probe before.
        """
        if is_success and not self.has_answered:
            self.has_answered = True
            return self._turn(True)
        is_success = is_success or has_traffic
        if is_success == self.is_healthy or not self.has_answered:
            self._run = 0
            return False
        self._run += 1
        needed = self.rules.success_threshold if is_success else self.rules.failure_threshold
        return self._run >= needed and self._turn(is_success)

    def next_delay_s(self, waited_s: float, rng: random.Random) -> float:
        """Return the pause before the next probe; ``waited_s``: time since registration."""
        if not self.has_answered and waited_s < self.rules.startup_limit_s:
            return FIRST_ANSWER_INTERVAL_S
        return self.rules.interval_s * rng.uniform(1 - JITTER, 1 + JITTER)

    def _turn(self, is_healthy: bool) -> bool:
        is_change = self.is_healthy != is_healthy
        self.is_healthy = is_healthy
        self._run = 0
        return is_change

    def __repr__(self) -> str:
        state = "healthy" if self.is_healthy else "unhealthy" if self.has_answered else "never answered"
        return f"HealthJudge({state}, {self._run} against)"
