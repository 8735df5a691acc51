"""The command ``table``: from flags to a plan, and the plan's state file."""

from __future__ import annotations

import argparse
import hashlib
import shlex
from pathlib import Path
from typing import Any, Final

from bench.chosen import choose_front_ends, choose_tokenizer, say
from bench.commands import STATE
from bench.cpu_sets import Cpus, choose_cpus, two_front_cores
from bench.front_ends import FRONT_ENDS, stale_builds
from bench.grid import GRIDS, SETUPS, all_points, choose
from bench.machine import describe, require
from bench.peers import peer_versions
from bench.state import State
from bench.table import Plan, run_table, todo

WARM_AND_AROUND_S: Final = 1.9  # of a front end at a point
AROUND_S: Final = 0.9  # of a round


def run_table_command(args: argparse.Namespace) -> int:
    """Exit code 0 once every round of the chosen points was tried."""
    name = "quick" if args.quick else args.grid
    grid = GRIDS[name]
    seconds = grid.seconds if args.seconds is None else args.seconds
    rounds = grid.rounds if args.rounds is None else args.rounds
    points = choose(all_points(seconds), args.points or grid.patterns)
    if args.list:
        for point in points:
            say(f"{point.name:18} {point.setup.what}; {point.workload.label}")
        return 0
    require(["wrk", "cc", "taskset"])
    cpus = choose_cpus(args.cpus, args.front_cores)
    plan = Plan(
        points=points,
        front_ends=choose_front_ends(args.front_ends, [setup.policy for setup in SETUPS], say),
        rounds=rounds,
        cpus=cpus,
        apart=two_front_cores(cpus),
        tokenizer=choose_tokenizer(args.tokenizer),
        meshd_args=tuple(shlex.split(args.meshd_args)),
    )
    path = args.state or (STATE if name == "full" else STATE.with_name(f"table-{name}.jsonl"))
    if args.restart:
        path.unlink(missing_ok=True)
    stale = stale_builds(plan.front_ends)
    for name in stale:
        say(f"{name} is older than the sources: run {FRONT_ENDS[name].made_by}")
    machine = {**describe(cpus), "stale": stale, "apart": apart_notes(plan.apart), "peers": peer_versions()}
    state = State(path, _conditions(plan, machine, seconds), machine)
    names = ", ".join(one.name for one in plan.front_ends)
    say(f"{len(points)} points, {names}: {estimate(plan, state)}; to {path}")
    run_table(plan, state, say)
    say(f"\nall rounds: {path}; next: python -m bench report --state {path}")
    return 0


def estimate(plan: Plan, state: State) -> str:
    """How long what is left will take, when no front end is slow to answer."""
    total_s = 0.0
    for point in plan.points:
        pairs = todo(plan, point, state)
        total_s += len({name for name, _ in pairs}) * WARM_AND_AROUND_S
        total_s += len(pairs) * (point.workload.seconds + AROUND_S)
    return f"about {max(1, round(total_s / 60))} minutes"


def apart_notes(cpus: Cpus) -> dict[str, Any]:
    """What the report must say of the setup with two cores."""
    return {"cpus_front_end": list(cpus.front), "is_front_alone": cpus.is_front_alone}


def _conditions(plan: Plan, machine: dict[str, Any], seconds: float) -> dict[str, Any]:
    """What must be the same when a run goes on; more rounds, points or front ends may be added."""
    same = (
        "cpu",
        "cpus_front_end",
        "cpus_backend",
        "cpus_load",
        "kernel",
        "python",
        "revision",
        "peers",
        "stale",
    )
    return {
        "seconds": seconds,
        "tokenizer": _digest(plan.tokenizer),
        "meshd_args": list(plan.meshd_args),
        "packages": machine["packages"],
        "programs": machine["programs"],
        **{name: machine[name] for name in same},
    }


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
