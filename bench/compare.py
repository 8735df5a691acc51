"""``requests`` and ``streams``: one workload, or one for each size; all front ends by turns; a table."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from dataclasses import asdict

from bench.alternate import measure
from bench.chosen import choose_front_ends, choose_tokenizer, keep, say
from bench.cpu_sets import choose_cpus
from bench.front_end import TOKEN_POLICIES
from bench.front_ends import BASELINE, stale_builds
from bench.goal_rounds import AROUND_ROUND_S, START_S
from bench.machine import describe, require
from bench.summary import Row, markdown, summarise
from bench.workload import Workload


def run_compare(args: argparse.Namespace) -> int:
    """Exit code 1 when a front end had no valid round, or meshd needs more CPU than ``--require`` allows."""
    require(["wrk", "cc", "taskset"] if args.command == "requests" else ["cc", "taskset"])
    front_ends = choose_front_ends(args.front_ends, [args.policy], say)
    for name in stale_builds(front_ends):
        say(f"{name} is older than the sources: make compiled")
    cpus = choose_cpus(args.cpus, args.front_cores)
    rounds, seconds = (2, 1.0) if args.quick else (args.rounds, args.seconds)
    workloads = _workloads(args, seconds)
    say(announcement(args.command, len(front_ends), len(workloads), rounds, seconds))
    measured = measure(
        front_ends,
        workloads,
        cpus=cpus,
        rounds=rounds,
        policy=args.policy,
        tokenizer=choose_tokenizer(args.tokenizer) if args.policy in TOKEN_POLICIES else None,
        meshd_args=tuple(shlex.split(args.meshd_args)),
        say=say,
    )
    rows = summarise(measured, BASELINE)
    report = {
        "command": args.command,
        "policy": args.policy,
        "meshd_args": args.meshd_args,
        "machine": describe(cpus),
        "rows": [asdict(row) for row in rows],
        "rounds": [asdict(found) for found in measured],
    }
    path = keep(args.command, report)
    unit = "request" if args.command == "requests" else "event"
    say(f"\n{markdown(rows, unit)}\n\npolicy {args.policy}; raw rounds: {path}")
    return _verdict(rows, args.require)


def announcement(command: str, front_ends: int, workloads: int, rounds: int, seconds: float) -> str:
    """What is going to happen and how long it takes, for whoever has just typed `make bench`."""
    total_s = front_ends * (START_S + workloads * (rounds + 1) * (seconds + AROUND_ROUND_S))
    return (
        f"{command}: {front_ends} front ends take turns on the same cores, {workloads} workloads, {rounds} "
        f"rounds of {seconds:g} s each; about {max(1, round(total_s / 60))} minutes. A table at the end, "
        "raw rounds in "
        "bench/out.\nOther questions have commands of their own (goals, table, guard, scaling, memory): "
        "python -m bench --help, docs/performance.md."
    )


def _workloads(args: argparse.Namespace, seconds: float) -> list[Workload]:
    if args.command == "streams":
        return [
            Workload(
                clients=args.streams,
                seconds=seconds,
                streams=args.streams,
                events_per_s=args.events_per_s,
                events_per_stream=args.events_per_stream,
            )
        ]
    return [Workload(args.clients, seconds, size, not args.same_prompt) for size in args.sizes]


def _verdict(rows: Sequence[Row], wanted: float | None) -> int:
    has_failed = any(row.invalid == row.rounds for row in rows)
    for row in rows:
        if row.front_end == "meshd" and row.ratio:
            say(f"{row.workload}: meshd takes 1/{row.ratio:.2f} of the CPU of {BASELINE}")
            has_failed = has_failed or (wanted is not None and row.ratio < wanted)
    return 1 if has_failed else 0
