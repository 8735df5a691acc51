"""The rounds that goals are judged by: who must take turns with whom, and the measuring of it.

Front ends that are compared are up together and take turns, as in alternate.py. There are two sessions, so
that few processes share the core: one for comparisons with others, one for those of a front end with itself
at another point (tokenizing beside not). An invalid round is tried once more; if that fails too, it counts
for nothing.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from bench import BenchError
from bench.alternate import WARM_UP_S, line_of, turns
from bench.backend import Backend
from bench.cpu_sets import Cpus
from bench.front_ends import FRONT_ENDS
from bench.goals import Goal
from bench.grid import Point, all_points, choose
from bench.launch import Running
from bench.rounds import DIRECT, Round, run_round

AROUND_ROUND_S: Final = (
    0.9  # a front end that comes to rest, counters that must stand still, the load generator's start and end
)
START_S: Final = 5.0  # of one front end, with waiting until it idles
TRIES: Final = 2
FAILURES: Final = (BenchError, OSError, subprocess.SubprocessError)  # of one round; the others go on

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Turn:
    """A front end (or `DIRECT`) at a point."""

    point: Point
    front_end: str

    @property
    def process(self) -> tuple[str, str]:
        """Turns of one front end and setup use the same processes."""
        return self.front_end, self.point.setup.name


Block = list[Turn]
"""Turns that alternate: those under one workload."""


@dataclass(slots=True)
class Measured:
    """Rounds of one session by point, and why a front end has none. Sessions are not mixed: they lie minutes
    apart, and a ratio is of rounds that took turns."""

    rounds: dict[str, list[Round]] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)


def sessions_of(
    goals: Sequence[Goal], ours: Sequence[str], present: Sequence[str], seconds: float
) -> dict[bool, list[Block]]:
    """What must be measured: that for `Goal.is_own`, and the rest; a session without turns is left out.

    ``present``: the front ends that can run; the others get no turn.
    """
    known = all_points(seconds)
    found = {}
    for is_own in (False, True):
        pairs: dict[tuple[str, str], None] = {}
        for goal in goals:
            if goal.is_own == is_own:
                pairs.update(dict.fromkeys(pair for name in ours for pair in goal.needs(name)))
        blocks: dict[str, Block] = {}
        for name, front_end in sorted(pairs, key=lambda pair: _rank(pair[1])):
            if front_end == DIRECT or front_end in present:
                (point,) = choose(known, [name])
                blocks.setdefault(point.workload.label, []).append(Turn(point, front_end))
        found[is_own] = list(blocks.values())
    return {is_own: blocks for is_own, blocks in found.items() if blocks}


def seconds_of(sessions: Iterable[Sequence[Block]], rounds: int, seconds: float) -> float:
    """About how long it takes to measure the sessions, if no round must be tried again."""
    total = 0.0
    for blocks in sessions:
        every = [turn for block in blocks for turn in block]
        total += len({turn.process for turn in every}) * START_S
        total += len(every) * (WARM_UP_S + AROUND_ROUND_S + rounds * (seconds + AROUND_ROUND_S))
    return total


def run_session(
    blocks: Sequence[Block],
    cpus: Cpus,
    tokenizer: Path,
    rounds: int,
    found: Measured,
    *,
    say: Say,
    step: Say,
) -> None:
    """Measure one session into ``found``; ``step`` is told of each round that counts."""
    with ExitStack() as stack:
        events_per_s = blocks[0][0].point.workload.events_per_s
        backend = stack.enter_context(Backend(cpus.backend, events_per_s))
        running: dict[tuple[str, str], Running | None] = {}
        for turn in (turn for block in blocks for turn in block):
            if turn.front_end != DIRECT and turn.process not in running:
                running[turn.process] = _start(stack, turn, cpus, backend, tokenizer, found, say)
        for one in running.values():
            if one:
                one.settle()
        for block in blocks:
            live = [turn for turn in block if turn.front_end == DIRECT or running[turn.process]]
            for turn in live:
                short = replace(turn.point.workload, seconds=WARM_UP_S)
                _try_round(
                    replace(turn, point=replace(turn.point, workload=short)), running, backend, cpus, say
                )
            for turn in turns(live, rounds):
                done = _measure(turn, running, backend, cpus, say)
                if done:
                    found.rounds.setdefault(turn.point.name, []).append(done)
                step(
                    f"{turn.point.name:16} {line_of(done) if done else turn.front_end + ': nothing measured'}"
                )


def _start(
    stack: ExitStack, turn: Turn, cpus: Cpus, backend: Backend, tokenizer: Path, found: Measured, say: Say
) -> Running | None:
    front_end, setup = FRONT_ENDS[turn.front_end], turn.point.setup
    try:
        started = Running(front_end, cpus.front, backend.urls, setup.policy, tokenizer, setup.meshd_args)
    except BenchError as error:
        found.reasons[turn.front_end] = str(error).splitlines()[0]
        say(f"{turn.front_end} does not start: {error}")
        return None
    say(f"started {turn.front_end} for {setup.name}")
    return stack.enter_context(started)


def _measure(
    turn: Turn, running: dict[tuple[str, str], Running | None], backend: Backend, cpus: Cpus, say: Say
) -> Round | None:
    done = None
    for number in range(TRIES):
        done = _try_round(turn, running, backend, cpus, say) or done
        if done and done.is_valid:
            break
        if number + 1 < TRIES:
            why = "; ".join(done.faults) if done else "it failed"
            say(f"{turn.point.name} {turn.front_end} once more: {why}")
    return done


def _try_round(
    turn: Turn, running: dict[tuple[str, str], Running | None], backend: Backend, cpus: Cpus, say: Say
) -> Round | None:
    one = None if turn.front_end == DIRECT else running[turn.process]
    try:
        return run_round(one, backend, cpus, turn.point.workload)
    except FAILURES as error:
        say(f"{turn.point.name} {turn.front_end}: {error}")
        return None


def _rank(front_end: str) -> int:
    """Direct first, then in the order in which front ends are declared."""
    return [DIRECT, *FRONT_ENDS].index(front_end)
