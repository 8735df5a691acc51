"""Alternating rounds: every front end is up the whole time, and takes its turn under each workload.

What drifts on a machine (clock, caches, neighbours) then hits all alike, instead of the one that happened
to run last. Within a pass the order is turned round each time (A B C, C B A, …), so that nobody always
follows the same predecessor. Idle front ends stay on the core and cost it well below one percent;
`Round.strangers` shows what they take.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Final, TypeVar

from bench.backend import Backend
from bench.cpu_sets import Cpus
from bench.front_end import FrontEnd
from bench.launch import Running
from bench.rounds import Round, run_round
from bench.workload import Workload

Say = Callable[[str], None]


Item = TypeVar("Item")
WARM_UP_S: Final = 1.0
WORTH_SHOWING_US: Final = 0.1


def turns(items: Sequence[Item], rounds: int) -> Iterator[Item]:
    """Each item once a round, forwards and backwards by turns."""
    for number in range(rounds):
        yield from reversed(items) if number % 2 else items


def measure(
    front_ends: Sequence[FrontEnd],
    workloads: Sequence[Workload],
    *,
    cpus: Cpus,
    rounds: int,
    policy: str,
    tokenizer: Path | None,
    meshd_args: tuple[str, ...],
    say: Say,
) -> list[Round]:
    """All rounds of all workloads; each workload also once directly, which shows the load's own limit."""
    found: list[Round] = []
    with ExitStack() as stack:
        backend = stack.enter_context(Backend(cpus.backend, workloads[0].events_per_s))
        running = start_all(
            stack,
            front_ends,
            cpus,
            backend,
            policy=policy,
            tokenizer=tokenizer,
            meshd_args=meshd_args,
            say=say,
        )
        for workload in workloads:
            found.append(run_round(None, backend, cpus, workload))
            say(line_of(found[-1]))
            for one in running:
                run_round(one, backend, cpus, replace(workload, seconds=WARM_UP_S))
            for one in turns(running, rounds):
                found.append(run_round(one, backend, cpus, workload))
                say(line_of(found[-1]))
    return found


def start_all(
    stack: ExitStack,
    front_ends: Sequence[FrontEnd],
    cpus: Cpus,
    backend: Backend,
    *,
    policy: str,
    tokenizer: Path | None,
    meshd_args: tuple[str, ...],
    say: Say,
) -> list[Running]:
    """Start each front end on the same CPUs; the stack ends them."""
    running = []
    for front_end in front_ends:
        extra = meshd_args if front_end.name.startswith("meshd") else ()
        started = Running(front_end, cpus.front, backend.urls, policy, tokenizer, extra)
        running.append(stack.enter_context(started))
        say(f"started {front_end.name}: {front_end.what}")
    for one in running:
        one.settle()
    return running


def line_of(done: Round) -> str:
    """One round on one line, for whoever watches."""
    remarks = "; ".join((*(f"INVALID: {fault}" for fault in done.faults), *done.notes))
    cpu = f"{done.cpu_us:8.1f} µs CPU" if done.cpu_us else " " * 15
    parts = {name: used for name, used in done.cpu_us_by_process.items() if used >= WORTH_SHOWING_US}
    if len(parts) > 1:
        cpu += " (" + ", ".join(f"{name} {used:.1f}" for name, used in parts.items()) + ")"
    return f"{done.workload:26} {done.front_end:14} {done.per_s:10,.0f}/s {cpu}  {remarks}"
