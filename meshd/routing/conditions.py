"""What this node has learnt of its upstreams from traffic: breakers, cool-downs, de-ranking, successes.

I/O processes report what they meet, each in its own words; the controller alone decides the state of a
breaker (controller/breakers.py, by the rules of breaker.py); every process reads everything. No call waits.

**Failures and successes.** A failure goes through a ring to the controller with its times, so failures of
several processes are put in order. Of successes only the count and the end of the newest are kept: a run of
failures begins after the last success, whoever saw it. An outcome of a request that began before its
upstream's breaker opened is marked by its times and changes nothing.

**Trials.** While a breaker is half open, one request at a time on the node may try the upstream. Who wants
to announces its trial in its own word, passes a fence, and then looks: if any other trial counts, it
withdraws. Never two: of two trials that ran at one moment take the one announced last; when it looked, the
other had been announced and had not ended, so it withdrew. Two that collide may both withdraw, and the next
request tries.

A trial's phases, in the word of its process::

    0 ── announced ──> RUNNING ── neutral ──────────────────────────> 0       the next may try at once
                          ├────── SUCCEEDED ──┐
                          └────── FAILED ─────┴─ the controller counts it, then stores it in `settled`

An ended trial goes on counting until the controller has drawn its conclusion: else a request could slip in
between a failure and the opening that follows from it. The controller stores the new state before `settled`,
and a trial looks at the state last, so whoever finds the place free also sees the breaker open. The trial of
a dead process is settled as neutral (controller/breakers.py). So half open never gets stuck: each trial ends
by the timers of its request, or with its process.

Dropped: tickets handed out by the controller. A process without a request for that upstream would sit on
one, and taking it back races with its use.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, Literal

from meshd.memory import Fence, Segment
from meshd.routing.condition_cells import (
    ENDS,
    FAILURES,
    LINE_WORDS,
    OPENED,
    PHASE_MASK,
    SEGMENT_KIND,
    SUCCESSES,
    ConditionCells,
    FailureRing,
    segment_bytes,
)
from meshd.routing.load import MAX_UPSTREAMS
from meshd.routing.upstream import Upstream

__all__ = ["SEGMENT_KIND", "BreakerState", "Conditions", "Outcome", "Trouble", "segment_bytes"]

BreakerState = Literal["closed", "open", "half_open"]
Outcome = Literal["success", "failure", "neutral"]

STATES: Final[tuple[BreakerState, ...]] = ("closed", "open", "half_open")
CLOSED: Final = 0
OPEN: Final = 1
HALF_OPEN: Final = 2
"""A state word is the place in ``STATES``, and the value of `mesh_worker_cb_state`."""

RUNNING: Final = 1
SUCCEEDED: Final = 2
FAILED: Final = 3
_PID_SHIFT: Final = 34
_SERIALS: Final = 0xFFFFFFFF

_DERANK_STEP_S: Final = 0.05
"""A de-ranking is made longer by no less: a storm of 429 would have each process look at every one."""


@dataclass(frozen=True, slots=True)
class Trouble:
    """Which upstreams, by number, are not plain candidates. Good until ``until_s`` or any change.

    ``excluded``: open or cooling down; ``trying``: half open; ``deranked``: for when no other is left.
    """

    excluded: frozenset[int]
    trying: frozenset[int]
    deranked: frozenset[int]
    until_s: float


class Conditions:
    """The conditions as one process sees them.

    ``row``: its seat, and ``owner`` its process id; ``None`` for a process that only reads. ``clock``:
    seconds of CLOCK_MONOTONIC, the same in every process.
    """

    def __init__(
        self,
        segment: Segment,
        row: int | None,
        rows: int,
        columns: int = MAX_UPSTREAMS,
        owner: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if row is not None and not (0 <= row < rows and owner > 0):
            raise ValueError(f"there is no conditions row {row} among {rows}, or it has no owner")
        self.cells = ConditionCells(segment, rows, columns)
        self._rows = rows
        self._row = 0 if row is None else row
        self._is_reader = row is None
        self._owner = owner
        self._clock = clock
        self._fence = Fence()
        self._serial = 0
        self._numbers: tuple[int, ...] = ()
        self._trouble: Trouble | None = None
        self._watched = self.cells.watched
        self._seen = self._watched[:0]
        self._success_words = self.cells.success_words
        self._success_times = self.cells.success_times
        self._node_times = self.cells.node_times
        # What this row has counted, as the words have it: a seat's next owner goes on from there.
        self._successes = [] if row is None else list(self._success_words[row::rows])
        self._failures = FailureRing(self.cells, self._row)

    # --------------------------------------------------------------------------------------- reading

    def breaker_of(self, number: int) -> BreakerState:
        return STATES[self.cells.breaker_words[number * LINE_WORDS]]

    def runs_of(self, number: int) -> tuple[int, int]:
        """Return the failures in a row, and the successful trials of a half-open breaker."""
        words, line = self.cells.breaker_words, number * LINE_WORDS
        return words[line + FAILURES], words[line + SUCCESSES]

    def cooldown_s(self, number: int) -> float:
        """Return for how many seconds no process uses the upstream because it asked for that; else 0."""
        return max(0.0, self._end(self.cells.cooldown_times, number) - self._clock())

    def is_deranked(self, number: int) -> bool:
        return self._end(self.cells.derank_times, number) > self._clock()

    def opens_in_s(self, number: int) -> float:
        """Return the seconds until an open breaker admits a trial; 0 for one that is not open."""
        if self.cells.breaker_words[number * LINE_WORDS] != OPEN:
            return 0.0
        return max(0.0, self.cells.breaker_times[number * LINE_WORDS + ENDS] - self._clock())

    def successes(self, number: int) -> int:
        """Return the 2xx answers of traffic that ended well since start, over all I/O processes."""
        return sum(self._success_words[number * self._rows : (number + 1) * self._rows])

    def is_available(self, upstream: Upstream) -> bool:
        """Say whether a request may be sent to ``upstream`` now; half open counts as yes."""
        number = upstream.number
        return (
            upstream.is_healthy
            and upstream.state == "active"
            and self.cells.breaker_words[number * LINE_WORDS] != OPEN
            and self._end(self.cells.cooldown_times, number) <= self._clock()
        )

    def watch(self, numbers: Iterable[int]) -> None:
        """Say which upstreams ``trouble`` looks at."""
        self._numbers = tuple(numbers)
        self._seen = self._watched[:0]

    def trouble(self) -> Trouble | None:
        """Return what keeps upstreams from being plain candidates, ``None`` while there is nothing.

        One comparison while nothing has changed; O(upstreams) after a change or the end of something.
        The same object stands for the same trouble.
        """
        if self._watched != self._seen or (
            self._trouble is not None and self._clock() >= self._trouble.until_s
        ):
            self._trouble = self._look()
        return self._trouble

    def _look(self) -> Trouble | None:
        cells = self.cells
        self._seen = memoryview(self._watched.tobytes()).cast("Q")  # first: a later change is seen next time
        now_s = self._clock()
        excluded: set[int] = set()
        trying: set[int] = set()
        deranked: set[int] = set()
        until_s = math.inf
        has_ends = max(cells.trouble_times) > now_s
        for number in self._numbers:
            state = cells.breaker_words[number * LINE_WORDS]
            if state == OPEN:
                excluded.add(number)
            elif state == HALF_OPEN:
                trying.add(number)
            if not has_ends:
                continue
            for times, found in ((cells.cooldown_times, excluded), (cells.derank_times, deranked)):
                end_s = self._end(times, number)
                if end_s > now_s:
                    found.add(number)
                    until_s = min(until_s, end_s)
        if not (excluded or trying or deranked):
            return None
        return Trouble(frozenset(excluded), frozenset(trying), frozenset(deranked), until_s)

    def _end(self, times: memoryview[float], number: int) -> float:
        return max(times[number * self._rows : (number + 1) * self._rows])

    # ------------------------------------------------------------------------------------- reporting

    def succeeded(self, number: int, began_s: float, ended_s: float) -> None:
        """Report a 2xx that ended well. ``began_s``: when its attempt was placed."""
        at = number * self._rows + self._row
        count = self._successes[number] + 1
        self._successes[number] = count
        self._success_words[at] = count
        if began_s >= self._node_times[0] or began_s >= self._opened_s(number):
            self._success_times[at] = ended_s

    def failed(self, number: int, began_s: float, ended_s: float) -> bool:
        """Report a failed attempt; False if it is lost, for the controller has not looked for long."""
        return self._failures.put(number, began_s, ended_s)

    def cool_down(self, number: int, until_s: float) -> None:
        """Let no process use the upstream until then."""
        at = number * self._rows + self._row
        if until_s > self.cells.cooldown_times[at]:
            self.cells.cooldown_times[at] = until_s
            self._announce(until_s)

    def derank(self, number: int, until_s: float) -> None:
        """Let the upstream be used only if no other is left, until then."""
        at = number * self._rows + self._row
        if until_s > self.cells.derank_times[at] + _DERANK_STEP_S:
            self.cells.derank_times[at] = until_s
            self._announce(until_s)

    def forget(self, number: int) -> None:
        """Drop what this process said of an upstream whose number belongs to another one now."""
        at = number * self._rows + self._row
        if not self._is_reader:
            self.cells.cooldown_times[at] = 0.0
            self.cells.derank_times[at] = 0.0
            self._seen = self._watched[:0]

    def _announce(self, until_s: float) -> None:
        """Make every process look again; a word has to change for that, so it moves by a little at least."""
        latest_s = self.cells.trouble_times[self._row]
        self.cells.trouble_times[self._row] = (
            until_s if until_s > latest_s else math.nextafter(latest_s, math.inf)
        )

    def _opened_s(self, number: int) -> float:
        return self.cells.breaker_times[number * LINE_WORDS + OPENED]

    # ---------------------------------------------------------------------------------------- trials

    def is_tried(self, number: int) -> bool:
        """Say whether a trial of the upstream counts at this moment."""
        return self._trials(number) > 0

    def try_trial(self, number: int) -> bool:
        """Begin the one trial of a half-open upstream; if True the caller owes one ``end_trial``."""
        if self._is_reader or self._trials(number):
            return False
        at = number * self._rows + self._row
        self._serial = (self._serial + 1) & _SERIALS
        self.cells.trial_words[at] = self._owner << _PID_SHIFT | self._serial << 2 | RUNNING
        self._fence()
        # The state last: the controller stores it before it settles a trial.
        if self._trials(number) == 1 and self.cells.breaker_words[number * LINE_WORDS] == HALF_OPEN:
            return True
        self.cells.trial_words[at] = 0
        return False

    def end_trial(self, number: int, outcome: Outcome) -> None:
        """End the trial that this process began."""
        at = number * self._rows + self._row
        if outcome == "neutral":
            self.cells.trial_words[at] = 0
            return
        phase = SUCCEEDED if outcome == "success" else FAILED
        self.cells.trial_words[at] = self.cells.trial_words[at] & ~PHASE_MASK | phase

    def _trials(self, number: int) -> int:
        start, end = number * self._rows, (number + 1) * self._rows
        pairs = zip(self.cells.trial_words[start:end], self.cells.settled_words[start:end], strict=True)
        return sum(1 for trial, settled in pairs if trial and (trial ^ settled) > PHASE_MASK)

    def __repr__(self) -> str:
        return f"Conditions(row={None if self._is_reader else self._row}, trouble={self._trouble})"


def pid_of(trial: int) -> int:
    """Return the process that announced a trial."""
    return trial >> _PID_SHIFT
