"""``python -m bench goals``: measure every goal of bench/goals.toml, and say which are reached."""

from __future__ import annotations

import argparse
import hashlib
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from bench import BenchError
from bench.chosen import choose_tokenizer, keep, say
from bench.cpu_sets import choose_cpus
from bench.environment import environment
from bench.front_ends import FRONT_ENDS, absent_programs, stale_builds
from bench.goal_nodes import IDLE_S, ONE_START_S, measure_nodes
from bench.goal_rounds import Measured, run_session, seconds_of, sessions_of
from bench.goals import IDLE, OWN, START, Goal, Verdict, choose_goals, judge_goal, read_goals, samples_of
from bench.goals_text import markdown
from bench.machine import describe, require
from bench.peers import peer_versions
from bench.table import Progress

OURS: Final = ("meshd", "meshd-compiled")
STARTS: Final = 5


def run_goals(args: argparse.Namespace) -> int:
    """Exit code 1 when a goal is missed or could not be measured, for meshd as users have it best."""
    require(["wrk", "cc", "taskset"])
    cpus = choose_cpus(args.cpus)
    goals = choose_goals(read_goals(), args.only)
    seconds, rounds = (1.0, 1) if args.quick else (args.seconds, args.rounds)
    absent = absent_of(goals)
    ours = [name for name in args.front_ends if name not in absent]
    if not ours:
        raise BenchError(f"none of {', '.join(args.front_ends)} is there")
    present = [name for name in FRONT_ENDS if name not in absent]
    tokenizer = choose_tokenizer(args.tokenizer)
    machine = {**describe(cpus), "stale": stale_builds([FRONT_ENDS[name] for name in ours])}
    machine["peers"] = peer_versions()
    sessions = sessions_of(goals, ours, present, seconds)
    starts = 1 if args.quick else STARTS
    _announce(goals, ours, seconds_of(sessions.values(), rounds, seconds), starts, absent, machine)
    progress = Progress(sum(rounds * len(block) for blocks in sessions.values() for block in blocks), say)
    found = {is_own: Measured(reasons=dict(absent)) for is_own in (False, True)}
    for is_own, blocks in sessions.items():
        run_session(blocks, cpus, tokenizer, rounds, found[is_own], say=say, step=progress.step)
    samples: dict[tuple[str, str, str], list[float | None]] = {}
    whys: dict[tuple[str, str], str] = {}
    with tempfile.TemporaryDirectory(prefix="meshd-goals-") as directory:
        measure_nodes(goals, ours, cpus, tokenizer, Path(directory), starts, samples, whys)
    by_session = {is_own: {**samples_of(one.rounds), **samples} for is_own, one in found.items()}
    verdicts = [
        judge_goal(
            goal,
            name,
            by_session[goal.is_own],
            whys.get((goal.measure, name)) or why_absent(goal, name, found[goal.is_own].reasons),
        )
        for goal in goals
        for name in ours
    ]
    told = f"{rounds} of {seconds:g} s each, alternating, each front end warmed up; medians (range of rounds)"
    about = environment(machine, told, digest(tokenizer))
    text = markdown(verdicts, found, machine, samples, about)
    path = keep("goals", _raw(verdicts, found, machine, samples))
    path.with_suffix(".md").write_text(text)
    say(f"\n{text}\n{path.with_suffix('.md')}; raw rounds: {path}")
    if args.to:
        args.to.parent.mkdir(parents=True, exist_ok=True)
        args.to.write_text(text)
        say(f"also in {args.to}")
    best = [verdict for verdict in verdicts if verdict.of == ours[-1]]
    return 0 if all(verdict.is_reached for verdict in best) else 1


def absent_of(goals: Sequence[Goal]) -> dict[str, str]:
    """The front ends that cannot run here, of those that the goals name and ours: name → how to get it."""
    names = {*OURS, *(name for goal in goals for name in goal.over if name != OWN)}
    found = {}
    for name in FRONT_ENDS:
        if name in names and (programs := absent_programs(FRONT_ENDS[name])):
            how = FRONT_ENDS[name].made_by or "apt-get install " + " ".join(programs)
            found[name] = f"{name} is not there: {how}"
    return found


def why_absent(goal: Goal, ours: str, reasons: Mapping[str, str]) -> str:
    """Why a goal has no figure, as far as a front end that did not run is the reason."""
    if ours in reasons:
        return reasons[ours]
    if goal.over and all(name in reasons for name in goal.over):
        return "; ".join(reasons[name] for name in goal.over)
    return ""


def digest(path: Path) -> str:
    """Enough of a file's SHA-256 to tell it from others."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def _announce(
    goals: Sequence[Goal],
    ours: Sequence[str],
    rounds_s: float,
    starts: int,
    absent: Mapping[str, str],
    machine: Mapping[str, Any],
) -> None:
    measures = {goal.measure for goal in goals}
    total_s = rounds_s + len(ours) * (
        IDLE_S * (IDLE in measures) + (starts + 1) * ONE_START_S * (START in measures)
    )
    say(f"{len(goals)} goals for {' and '.join(ours)}: about {max(1, round(total_s / 60))} minutes")
    for text in absent.values():
        say(f"without it: {text}")
    for name in machine["stale"]:
        say(f"{name} is older than the sources: make compiled")


def _raw(
    verdicts: Sequence[Verdict],
    found: Mapping[bool, Measured],
    machine: Mapping[str, Any],
    samples: Mapping[tuple[str, str, str], Sequence[float | None]],
) -> dict[str, Any]:
    return {
        "machine": dict(machine),
        "goals": [
            {**asdict(verdict), "asked": verdict.goal.asked, "verdict": verdict.word} for verdict in verdicts
        ],
        "samples": [
            {"figure": figure, "front_end": name, "values": list(values)}
            for (figure, _, name), values in samples.items()
        ],
        "rounds": [
            {"point": point, "is_own": is_own, **asdict(one)}
            for is_own, session in found.items()
            for point, here in session.rounds.items()
            for one in here
        ],
    }
