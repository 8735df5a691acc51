"""Decide the state of every breaker: the one writer of breaker states of this node.

Several times a second it takes the failures that I/O processes report, puts them in order, and asks the rules
(routing/breaker.py). A state is published in shared memory, where every placement sees it at once, with all
that a successor of this process needs to go on: a restart changes no breaker.

A trial is counted once: its state first, then the word that makes it count no longer (conditions.py).
"""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import Callable
from typing import Final

from meshd.control import ProcessBoard, Topology
from meshd.log import Log
from meshd.metrics.cells import MetricRow
from meshd.routing.breaker import Breaker, BreakerRules
from meshd.routing.condition_cells import (
    ENDS,
    FAILURES,
    IDENTITY,
    LAST_FAILURE,
    LINE_WORDS,
    OPENED,
    PHASE_MASK,
    STATE,
    SUCCESSES,
    ConditionCells,
    FailureRing,
)
from meshd.routing.conditions import RUNNING, STATES, SUCCEEDED, BreakerState, pid_of
from meshd.routing.registry import RegistryBoard
from meshd.routing.upstream import Upstream

LOOK_INTERVAL_S: Final = 0.025
"""So a change is known within 50 ms of its cause; a look at a calm node costs some 10 µs."""

OnTransition = Callable[[str, BreakerState, BreakerState], None]
"""Called with the url of the upstream, the state it leaves and the one it enters."""


class BreakerKeeper:
    """The breakers of all upstreams of ``registry``, draining ones included."""

    def __init__(
        self,
        cells: ConditionCells,
        registry: RegistryBoard,
        board: ProcessBoard,
        topology: Topology,
        rules: BreakerRules,
        on_transition: OnTransition,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cells = cells
        self._registry = registry
        self._board = board
        self._topology = topology
        self._rules = rules
        self._on_transition = on_transition
        self._clock = clock
        self._rings = [FailureRing(cells, row) for row in range(cells.rows)]
        self._generation = -1
        self._upstreams: dict[int, Upstream] = {}
        self._breakers: dict[int, Breaker] = {}

    async def run(self) -> None:
        """Look, again and again, until cancelled."""
        while True:
            self.look()
            await asyncio.sleep(LOOK_INTERVAL_S)

    def look(self) -> None:
        """Take in what has happened since the last look."""
        if self._registry.generation() != self._generation:
            self._adopt()
        now_s = self._clock()
        for ended_s, began_s, number in sorted(failure for ring in self._rings for failure in ring.take()):
            breaker = self._breakers.get(number)
            if breaker is not None:
                former = breaker.state
                breaker.fail(began_s, ended_s, self._last_success_s(number), now_s)
                self._publish(number, breaker, former)
        for number, breaker in self._breakers.items():
            if breaker.state != "closed":
                self._attend(number, breaker, now_s)
            elif breaker.failures:
                breaker.note_success(self._last_success_s(number))
                if not breaker.failures:
                    self._publish(number, breaker, "closed")

    def _attend(self, number: int, breaker: Breaker, now_s: float) -> None:
        """Let time pass for a breaker that is not closed, and count its trials."""
        former = breaker.state
        breaker.tick(now_s)
        self._publish(number, breaker, former)
        rows = self._cells.rows
        for row in range(rows):
            at = number * rows + row
            trial = self._cells.trial_words[at]
            phase = trial & PHASE_MASK
            if not trial or (trial ^ self._cells.settled_words[at]) <= PHASE_MASK:
                continue
            if phase == RUNNING:
                if self._is_running(row, pid_of(trial)):
                    continue
            else:
                former = breaker.state
                breaker.end_trial(phase == SUCCEEDED, now_s)
                self._publish(number, breaker, former)
            self._cells.settled_words[at] = trial

    def _is_running(self, row: int, pid: int) -> bool:
        """A successor is on the board before it can begin a trial, so any other pid is that of a dead one."""
        return self._board.row(self._topology.board_io(row)).pid == pid

    def _adopt(self) -> None:
        """Begin to keep new upstreams, go on with known ones, forget those that have left."""
        registry = self._registry.read()
        breakers: dict[int, Breaker] = {}
        for upstream in registry.upstreams:
            number = upstream.number
            former = self._upstreams.get(number)
            is_known = former is not None and former.id == upstream.id
            breakers[number] = self._breakers[number] if is_known else self._resumed(upstream)
        self._breakers = breakers
        self._upstreams = {upstream.number: upstream for upstream in registry.upstreams}
        self._generation = registry.generation

    def _resumed(self, upstream: Upstream) -> Breaker:
        """Return the breaker that a predecessor published, or a closed one if it was another upstream's."""
        cells, line = self._cells, upstream.number * LINE_WORDS
        words, times = cells.breaker_words, cells.breaker_times
        identity = zlib.crc32(upstream.id.encode()) + 1  # 0: nobody's yet
        if words[line + IDENTITY] == identity:
            return Breaker(
                self._rules,
                STATES[words[line + STATE]],
                words[line + FAILURES],
                words[line + SUCCESSES],
                times[line + LAST_FAILURE],
                times[line + OPENED],
            )
        breaker = Breaker(self._rules)
        self._store(upstream.number, breaker)
        words[line + IDENTITY] = identity
        first = upstream.number * cells.rows
        cells.settled_words[first : first + cells.rows] = cells.trial_words[first : first + cells.rows]
        return breaker

    def _publish(self, number: int, breaker: Breaker, former: BreakerState) -> None:
        self._store(number, breaker)
        if breaker.state != former:
            self._on_transition(self._upstreams[number].url, former, breaker.state)

    def _store(self, number: int, breaker: Breaker) -> None:
        """The state after what explains it, and the word that makes everybody look at the very end."""
        cells, line = self._cells, number * LINE_WORDS
        words, times = cells.breaker_words, cells.breaker_times
        words[line + FAILURES] = breaker.failures
        words[line + SUCCESSES] = breaker.successes
        times[line + LAST_FAILURE] = breaker.last_failure_s
        times[line + OPENED] = breaker.opened_s
        times[line + ENDS] = breaker.ends_s
        cells.node_times[0] = max(cells.node_times[0], breaker.opened_s)
        state = STATES.index(breaker.state)
        if words[line + STATE] != state:
            words[line + STATE] = state
            cells.watched[0] += 1

    def _last_success_s(self, number: int) -> float:
        rows = self._cells.rows
        return max(self._cells.success_times[number * rows : (number + 1) * rows])

    def __repr__(self) -> str:
        unrest = {n: b.state for n, b in self._breakers.items() if b.state != "closed" or b.failures}
        return f"BreakerKeeper({len(self._breakers)} breakers, {unrest})"


class TransitionTeller:
    """Counts and logs changes of breakers."""

    def __init__(self, row: MetricRow, log: Log) -> None:
        self._row = row
        self._log = log

    def __call__(self, url: str, former: BreakerState, state: BreakerState) -> None:
        labels = {"worker": url, "from": former, "to": state}
        self._row.counter("mesh_worker_cb_transitions_total", **labels).inc()
        level = self._log.warning if state == "open" else self._log.info
        level("breaker_changed", upstream=url, former=former, state=state)

    def __repr__(self) -> str:
        return f"TransitionTeller({self._row!r})"
