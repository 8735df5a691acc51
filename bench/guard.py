"""``python -m bench guard``: measure what the budget names, in under two minutes; fail if it is broken."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Final

from bench import BenchError
from bench.alternate import Say, turns
from bench.backend import Backend
from bench.budget import Limit, in_force, judge, read_budget
from bench.chosen import choose_front_ends, say
from bench.cpu_sets import Cpus, choose_cpus
from bench.front_end import FrontEnd
from bench.front_ends import FRONT_ENDS, absent_programs, stale_builds
from bench.grid import Point, all_points, choose
from bench.instructions import choose_counter, count_by_callgrind, count_by_perf, under_callgrind
from bench.launch import Running
from bench.load import Sending
from bench.machine import require
from bench.rounds import run_round

SECONDS: Final = 1.0
ROUNDS: Final = 3
BUILT: Final = ("meshd-compiled",)
POLICY: Final = "round_robin"  # of every point that a budget may name


def run_guard(args: argparse.Namespace) -> int:
    """Exit code 1 when a limit is broken, or could not be measured."""
    require(["wrk", "cc", "taskset"])
    counter = "" if args.no_instructions else choose_counter()
    limits = in_force(read_budget(args.budget), counter)
    cpus = choose_cpus(args.cpus)
    say(f"instructions are counted by {counter or 'nobody: neither perf nor callgrind can'}")
    limits, skipped = there(limits)
    for limit in skipped:
        say(f"skipped {limit.name}: {limit.of} is not there ({FRONT_ENDS[limit.of].made_by})")
    for name in stale_builds([FRONT_ENDS[name] for name in dict.fromkeys(limit.of for limit in limits)]):
        say(f"{name} is older than the sources: {FRONT_ENDS[name].made_by}")
    figures = {**_instructions(limits, counter, cpus), **_cpu(limits, cpus)}
    verdicts = judge(limits, figures)
    for verdict in verdicts:
        say(f"{verdict}; suggested: {verdict.suggested}" if args.print else str(verdict))
    return 1 if any(verdict.is_broken for verdict in verdicts) else 0


def there(limits: Sequence[Limit]) -> tuple[list[Limit], list[Limit]]:
    """Limits that can be measured, and those of a front end that has to be built first and was not."""
    missing = {limit.of for limit in limits if limit.of in BUILT and absent_programs(FRONT_ENDS[limit.of])}
    return [one for one in limits if one.of not in missing], [one for one in limits if one.of in missing]


def _front_ends(limits: Sequence[Limit]) -> list[FrontEnd]:
    names = list(dict.fromkeys(name for limit in limits for name in (limit.of, limit.over)))
    if unknown := [name for name in names if name not in FRONT_ENDS]:
        raise BenchError(f"the budget names {', '.join(unknown)}, which is no front end")
    return choose_front_ends(names, [POLICY], say) if names else []


def _points(limits: Sequence[Limit]) -> list[Point]:
    found = choose(all_points(SECONDS), [limit.point for limit in limits])
    if wrong := [point.name for point in found if point.setup.policy != POLICY]:
        raise BenchError(f"the budget may name points of policy {POLICY} alone, not {', '.join(wrong)}")
    return found


def _cpu(limits: Sequence[Limit], cpus: Cpus) -> dict[tuple[str, str, str], float]:
    """Medians of CPU microseconds over short alternating rounds; an invalid round counts for nothing."""
    wanted = [limit for limit in limits if limit.figure == "cpu"]
    if not wanted:
        return {}
    found: dict[tuple[str, str, str], list[float]] = {}
    with ExitStack() as stack:
        backend = stack.enter_context(Backend(cpus.backend))
        running = [
            stack.enter_context(Running(one, cpus.front, backend.urls, POLICY)) for one in _front_ends(wanted)
        ]
        for point in _points(wanted):
            here = [limit for limit in wanted if limit.point == point.name]
            names = {name for limit in here for name in (limit.of, limit.over)}
            for one in turns([one for one in running if one.name in names], ROUNDS):
                done = run_round(one, backend, cpus, point.workload)
                say(f"{point.name} {one.name}: {done.cpu_us:.1f} µs {'; '.join(done.faults)}")
                if done.is_valid:
                    found.setdefault(("cpu", point.name, one.name), []).append(done.cpu_us)
    return {key: median(values) for key, values in found.items()}


def _instructions(limits: Sequence[Limit], counter: str, cpus: Cpus) -> dict[tuple[str, str, str], float]:
    wanted = [limit for limit in limits if limit.figure == "instructions"]
    found = {}
    for point in _points(wanted) if wanted else []:
        for front_end in _front_ends([limit for limit in wanted if limit.point == point.name]):
            try:
                counted = _count(front_end, counter, cpus, point, say)
            except BenchError as error:
                say(f"{point.name} {front_end.name}: {error}")
                continue
            found["instructions", point.name, front_end.name] = counted
    return found


def _count(front_end: FrontEnd, counter: str, cpus: Cpus, point: Point, tell: Say) -> float:
    with tempfile.TemporaryDirectory(prefix="meshd-guard-") as name, Backend(cpus.backend) as backend:
        one = under_callgrind(front_end, Path(name)) if counter == "callgrind" else front_end
        with Running(one, cpus.front, backend.urls, POLICY) as running:
            if counter == "callgrind":
                counted = count_by_callgrind(running, cpus, Path(name))
            else:
                sending: Sending = point.workload.sendings[0]
                counted = count_by_perf(running, cpus, sending, SECONDS)
    tell(f"{point.name} {front_end.name}: {counted / 1000:,.0f} thousand instructions a request")
    return counted
