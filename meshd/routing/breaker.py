"""The breaker of one upstream, as a pure state machine.

::

    closed ──── a run of failures reaches the threshold ────> open
      ^  run: failures without a success, none later             │ its time has passed
      │  than the window after the one before                    v
      └──────── trials succeeded often enough ──────────── half open
                                                                 │ a trial failed
                                              open <─────────────┘

Times come from several processes. A success is known only by the end of the newest one, so a failure that
ended before it is taken as outlived: a run that was complete for less than one look of the controller, and
was then followed by a success, does not open. That errs on the side of serving.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshd.routing.conditions import BreakerState


@dataclass(frozen=True, slots=True)
class BreakerRules:
    """``open_s``: how long an open breaker admits nobody. ``is_disabled``: it counts and never opens."""

    failure_threshold: int = 10
    success_threshold: int = 3
    open_s: float = 60.0
    window_s: float = 120.0
    is_disabled: bool = False


@dataclass(slots=True)
class Breaker:
    """``failures``: the present run; ``successes``: of trials. The seconds are of one monotonic clock."""

    rules: BreakerRules
    state: BreakerState = "closed"
    failures: int = 0
    successes: int = 0
    last_failure_s: float = 0.0
    opened_s: float = 0.0

    @property
    def ends_s(self) -> float:
        """When an open breaker begins to admit trials."""
        return self.opened_s + self.rules.open_s

    def fail(self, began_s: float, ended_s: float, last_success_s: float, now_s: float) -> None:
        """Take a failed request that was no trial; ``last_success_s``: the end of the newest success."""
        if self.state != "closed" or began_s < self.opened_s:
            return
        self.note_success(last_success_s)
        if ended_s - self.last_failure_s > self.rules.window_s:
            self.failures = 0
        self.last_failure_s = max(ended_s, self.last_failure_s)
        if ended_s <= last_success_s:
            return
        self.failures += 1
        if self.failures >= self.rules.failure_threshold and not self.rules.is_disabled:
            self._open(now_s)

    def note_success(self, last_success_s: float) -> None:
        """End the run if a success has come after its last failure."""
        if self.state == "closed" and last_success_s > self.last_failure_s:
            self.failures = 0

    def end_trial(self, is_success: bool, now_s: float) -> None:
        """Take the outcome of a trial; outside half open it comes too late to matter."""
        if self.state != "half_open":
            return
        if not is_success:
            self._open(now_s)
            return
        self.successes += 1
        if self.successes >= self.rules.success_threshold:
            self.state, self.failures, self.successes = "closed", 0, 0

    def tick(self, now_s: float) -> None:
        """Let time pass."""
        if self.state == "open" and now_s >= self.ends_s:
            self.state, self.successes = "half_open", 0

    def _open(self, now_s: float) -> None:
        self.state, self.opened_s, self.successes = "open", now_s, 0
