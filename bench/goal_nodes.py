"""The goals that are measured of a node on its own: what idle clients cost, and how long a start takes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from bench.backend import Backend
from bench.chosen import say
from bench.cpu_sets import Cpus
from bench.front_ends import FRONT_ENDS
from bench.goal_rounds import FAILURES
from bench.goals import IDLE, START, Goal
from bench.idle_clients import CLIENTS, flags_for, measure_idle_clients, raise_descriptor_limit
from bench.launch import Running
from bench.start_time import ENTRIES, time_start
from bench.vocabulary import entries_of, with_entries

IDLE_S: Final = 25.0  # about, of one front end
ONE_START_S: Final = 6.0
POLICY: Final = "round_robin"


def measure_nodes(
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
            except FAILURES as error:
                whys[IDLE, name] = (str(error) or type(error).__name__).splitlines()[0]
                say(f"idle clients of {name}: {error}")
        if START in measures:
            try:
                samples[START, "", name] = list(_starts(name, cpus, tokenizer, directory, starts))
            except FAILURES as error:
                whys[START, name] = (str(error) or type(error).__name__).splitlines()[0]
                say(f"start of {name}: {error}")


def idle_kib(name: str, cpus: Cpus) -> float:
    """Start one front end, and see what idle clients cost it."""
    flags = flags_for(raise_descriptor_limit())
    with (
        Backend(cpus.backend) as backend,
        Running(FRONT_ENDS[name], cpus.front, backend.urls, POLICY, None, flags) as running,
    ):
        running.settle()
        found = measure_idle_clients(running)
    say(f"{CLIENTS:,} idle clients of {name} ({' '.join(flags)}): {found:.2f} KiB each")
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
            except FAILURES as error:
                say(f"{error}\nonce more")
                found.append(time_start(FRONT_ENDS[name], wide, backend))
            say(f"start of {name} with {entries:,} entries: {found[-1]:.2f} s")
    return found
