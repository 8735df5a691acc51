"""``python -m bench table``: the whole grid, resumable, its progress shown.

All front ends of one setup are up while its points are measured, and take turns as in alternate.py. A front
end that does not start, or that breaks at a point, is noted there with the reason; the others go on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from bench import BenchError
from bench.alternate import WARM_UP_S, Say, line_of, turns
from bench.backend import Backend
from bench.cpu_sets import Cpus
from bench.front_end import FrontEnd
from bench.grid import Point, Setup
from bench.launch import Running
from bench.rounds import DIRECT, Round, run_round
from bench.state import Entry, State

APART_WORKERS: Final = 2  # on one core: a short prompt then need not wait until a long one is through


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be measured, and on what. ``apart``: the CPUs for setups with two cores for a front end."""

    points: Sequence[Point]
    front_ends: Sequence[FrontEnd]
    rounds: int
    cpus: Cpus
    apart: Cpus
    tokenizer: Path
    meshd_args: tuple[str, ...] = ()


def takes_part(front_end: FrontEnd, setup: Setup) -> bool:
    """Whether the setup asks for something that the front end does, or for a floor."""
    if not front_end.policies:
        return setup.has_floors
    return front_end.can_apply(setup.policy) and (front_end.tokenizes or not setup.wants_tokenizing)


def todo(plan: Plan, point: Point, state: State) -> list[tuple[str, int]]:
    """(front end, round) pairs that the state lacks at a point, in the order of the turns; direct first."""
    names = [one.name for one in plan.front_ends if takes_part(one, point.setup)]
    counts = {DIRECT: -1, **dict.fromkeys(names, -1)}
    pairs = []
    for name in (DIRECT, *turns(names, plan.rounds)):
        counts[name] += 1
        if not state.has(point.name, name, counts[name]):
            pairs.append((name, counts[name]))
    return pairs


def run_table(plan: Plan, state: State, say: Say) -> None:
    """Measure what the state lacks, and keep each round in it at once."""
    progress = Progress(sum(len(todo(plan, point, state)) for point in plan.points), say)
    for setup in dict.fromkeys(point.setup for point in plan.points):
        points = [point for point in plan.points if point.setup == setup and todo(plan, point, state)]
        if points:
            say(f"\n{setup.name}: {setup.what}")
            _run_setup(plan, setup, points, state, progress)


class Progress:
    """Counts rounds, and guesses from their mean how long the rest takes."""

    def __init__(self, total: int, say: Say, clock: Callable[[], float] = time.monotonic) -> None:
        self._total, self._done, self._say, self._clock = total, 0, say, clock
        self._began_s = clock()

    def step(self, text: str) -> None:
        """One more is done."""
        self._done += 1
        left_s = (self._clock() - self._began_s) / self._done * (self._total - self._done)
        self._say(f"[{self._done}/{self._total}, {left_s / 60:.0f} min left] {text}")


def _run_setup(plan: Plan, setup: Setup, points: list[Point], state: State, progress: Progress) -> None:
    cpus = plan.apart if setup.is_apart else plan.cpus
    with ExitStack() as stack:
        backend = stack.enter_context(Backend(cpus.backend, points[0].workload.events_per_s))
        running: dict[str, Running | None] = {DIRECT: None}
        reasons: dict[str, str] = {}
        for front_end in plan.front_ends:
            if not takes_part(front_end, setup):
                continue
            try:
                started = _start(plan, setup, cpus, front_end, backend)
                running[front_end.name] = stack.enter_context(started)
            except BenchError as error:
                reasons[front_end.name] = str(error)
        for one in running.values():
            if one:
                one.settle()
        for point in points:
            for entry in _run_point(plan, cpus, point, backend, running, reasons, state):
                state.add(entry)
                told = line_of(entry.round) if entry.round else f"absent: {entry.why_absent.splitlines()[0]}"
                progress.step(f"{point.name:16} {told}")


def _run_point(
    plan: Plan,
    cpus: Cpus,
    point: Point,
    backend: Backend,
    running: dict[str, Running | None],
    reasons: dict[str, str],
    state: State,
) -> Iterator[Entry]:
    warm: set[str] = {DIRECT}
    for name, number in todo(plan, point, state):
        if name in reasons:
            yield Entry(point.name, name, number, None, reasons[name])
            continue
        one = running[name]
        try:
            if name not in warm:
                run_round(one, backend, cpus, replace(point.workload, seconds=WARM_UP_S))
                warm.add(name)
            yield Entry(point.name, name, number, run_round(one, backend, cpus, point.workload))
        except BenchError as error:
            yield Entry(point.name, name, number, None, str(error))


def _start(plan: Plan, setup: Setup, cpus: Cpus, front_end: FrontEnd, backend: Backend) -> Running:
    extra: tuple[str, ...] = ()
    if front_end.name.startswith("meshd"):
        extra = (
            *setup.meshd_args,
            *(apart_args(cpus, APART_WORKERS) if setup.is_apart else ()),
            *plan.meshd_args,
        )
    return Running(front_end, cpus.front, backend.urls, setup.policy, plan.tokenizer, extra)


def apart_args(cpus: Cpus, prepare_workers: int) -> tuple[str, ...]:
    """One I/O process on the first core, and ``prepare_workers`` on the second."""
    first, second = cpus.front[:2]
    counts = ("--io-processes", "1", "--prepare-workers", str(prepare_workers))
    return ("--io-cpus", str(first), "--prepare-cpus", str(second), *counts)


def rounds_by_point(entries: Sequence[Entry]) -> dict[str, list[Round]]:
    """The rounds that were measured at each point, in the order in which they were."""
    found: dict[str, list[Round]] = {}
    for entry in entries:
        if entry.round is not None:
            found.setdefault(entry.point, []).append(entry.round)
    return found
