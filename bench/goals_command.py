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
from bench.backend import Backend
from bench.chosen import choose_tokenizer, keep, say
from bench.cpu_sets import Cpus, choose_cpus
from bench.environment import environment, limits_of_machine
from bench.front_ends import BASELINE, FRONT_ENDS, absent_programs, stale_builds
from bench.goal_rounds import Measured, run_session, seconds_of, sessions_of
from bench.goals import (
    CPU,
    IDLE,
    OWN,
    START,
    Goal,
    Verdict,
    choose_goals,
    judge_goal,
    read_goals,
    samples_of,
    table_of_goals,
)
from bench.grid import all_points
from bench.idle_clients import CLIENTS, FLAGS, measure_idle_clients, raise_descriptor_limit
from bench.launch import Running
from bench.machine import describe, require
from bench.peers import peer_versions
from bench.rounds import CROWDED_ABOVE, DIRECT
from bench.start_time import ENTRIES, time_start
from bench.summary import Row, summarise
from bench.table import Progress
from bench.text_table import text_table
from bench.vocabulary import entries_of, with_entries

OURS: Final = ("meshd", "meshd-compiled")
STARTS: Final = 5
IDLE_S: Final = 25.0  # about, of one front end
ONE_START_S: Final = 6.0
POLICY: Final = "round_robin"


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
    _announce(goals, ours, seconds_of(sessions, rounds, seconds), starts, absent, machine)
    found = Measured(reasons=dict(absent))
    turns = sum(rounds * len(block) for blocks in sessions for block in blocks)
    progress = Progress(turns, say)
    for blocks in sessions:
        run_session(blocks, cpus, tokenizer, rounds, found, say=say, step=progress.step)
    samples = samples_of(found.rounds)
    whys: dict[tuple[str, str], str] = {}
    with tempfile.TemporaryDirectory(prefix="meshd-goals-") as directory:
        _measure_nodes(goals, ours, cpus, tokenizer, Path(directory), starts, samples, whys)
    verdicts = [
        judge_goal(
            goal, name, samples, whys.get((goal.measure, name)) or why_absent(goal, name, found.reasons)
        )
        for goal in goals
        for name in ours
    ]
    text = markdown(verdicts, found, machine, rounds, seconds, digest(tokenizer), samples)
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


def markdown(
    verdicts: Sequence[Verdict],
    found: Measured,
    machine: Mapping[str, Any],
    rounds: int,
    seconds: float,
    tokenizer: str,
    samples: Mapping[tuple[str, str, str], Sequence[float | None]],
) -> str:
    """The whole report of the goals."""
    told = f"{rounds} of {seconds:g} s each, alternating, each front end warmed up; medians (range of rounds)"
    parts = [
        "# Goals",
        "Ratios are of CPU time of the whole process tree for one request or event, on one front-end core, "
        "16 clients unless said, in one run. Written by `python -m bench goals`; the goals are in "
        "`bench/goals.toml`.",
        table_of_goals(verdicts),
        "## Figures behind them",
        figures_of(found),
    ]
    starts = [
        [name, ", ".join(f"{value:.2f} s" for value in samples[START, "", name] if value is not None)]
        for figure, _, name in samples
        if figure == START
    ]
    if starts:
        parts.append(text_table(["front end", "single starts, to the last process"], starts))
    limits = "\n".join(f"- {text}" for text in (*crowded_of(found), *limits_of_machine(machine)))
    parts += ["## Limits", limits, *environment(machine, told, tokenizer)]
    return "\n\n".join(parts) + "\n"


def figures_of(found: Measured) -> str:
    """Medians by point and front end."""
    head = ["point", "front end", "rate", "CPU µs", "min–max", "p50 ms", "core used", "valid", "notes"]
    order = [point.name for point in all_points(1.0) if point.name in found.rounds]
    return text_table(
        head, [_line(name, row) for name in order for row in summarise(found.rounds[name], BASELINE)]
    )


def crowded_of(found: Measured) -> list[str]:
    """That others were busy on the front end's core, if they were."""
    every = [one.strangers for here in found.rounds.values() for one in here if one.front_end != DIRECT]
    crowded = [share for share in every if share > CROWDED_ABOVE]
    if not crowded:
        return []
    return [
        f"In {len(crowded)} of {len(every)} rounds others took more than {CROWDED_ABOVE:.0%} of the front "
        "end's "
        f"core, up to {max(crowded):.0%}: figures of a busy machine, not for publishing."
    ]


def digest(path: Path) -> str:
    """Enough of a file's SHA-256 to tell it from others."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def _line(point: str, row: Row) -> list[str]:
    is_direct, good = row.front_end == DIRECT, row.rounds - row.invalid
    return [
        point,
        row.front_end,
        f"{row.per_s:,.0f}/s" if good else "–",
        "–" if is_direct or not good else f"{row.cpu_us:.1f}",
        "–" if is_direct or not good else f"{row.cpu_us_low:.1f}–{row.cpu_us_high:.1f}",
        f"{row.p50_us / 1000:.3f}" if good else "–",
        "–" if is_direct or not good else f"{row.core:.0%}",
        f"{good} of {row.rounds}",
        "; ".join(row.notes),
    ]


def _measure_nodes(
    goals: Sequence[Goal],
    ours: Sequence[str],
    cpus: Cpus,
    tokenizer: Path,
    directory: Path,
    starts: int,
    samples: dict[tuple[str, str, str], list[float | None]],
    whys: dict[tuple[str, str], str],
) -> None:
    """What is measured of a node on its own: idle clients, and the time to start."""
    measures = {goal.measure for goal in goals}
    for name in ours:
        if IDLE in measures:
            try:
                samples[IDLE, "", name] = [idle_kib(name, cpus)]
            except BenchError as error:
                whys[IDLE, name] = str(error).splitlines()[0]
                say(f"idle clients of {name}: {error}")
        if START in measures:
            try:
                samples[START, "", name] = list(_starts(name, cpus, tokenizer, directory, starts))
            except BenchError as error:
                whys[START, name] = str(error).splitlines()[0]
                say(f"start of {name}: {error}")


def idle_kib(name: str, cpus: Cpus) -> float:
    """Start one front end, and see what idle clients cost it."""
    raise_descriptor_limit()
    with (
        Backend(cpus.backend) as backend,
        Running(FRONT_ENDS[name], cpus.front, backend.urls, POLICY, None, FLAGS) as running,
    ):
        running.settle()
        found = measure_idle_clients(running)
    say(f"{CLIENTS:,} idle clients of {name}: {found:.2f} KiB each")
    return found


def _starts(name: str, cpus: Cpus, tokenizer: Path, directory: Path, starts: int) -> list[float]:
    wide = with_entries(tokenizer, ENTRIES, directory)
    entries = entries_of(wide)
    found = []
    with Backend(cpus.backend) as backend:
        time_start(FRONT_ENDS[name], wide, backend)  # files come from the disk here
        for _ in range(starts):
            try:
                found.append(time_start(FRONT_ENDS[name], wide, backend))
            except BenchError as error:
                say(f"{error}\nonce more")
                found.append(time_start(FRONT_ENDS[name], wide, backend))
            say(f"start of {name} with {entries:,} entries: {found[-1]:.2f} s")
    return found


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
    found: Measured,
    machine: Mapping[str, Any],
    samples: Mapping[tuple[str, str, str], Sequence[float | None]],
) -> dict[str, Any]:
    return {
        "machine": dict(machine),
        "goals": [
            {**asdict(verdict), "asked": verdict.goal.asked, "verdict": verdict.word} for verdict in verdicts
        ],
        "samples": [
            {"figure": figure, "point": point, "front_end": name, "values": list(values)}
            for (figure, point, name), values in samples.items()
            if figure not in (CPU, "p50")
        ],
        "rounds": [{"point": point, **asdict(one)} for point, here in found.rounds.items() for one in here],
    }
