"""``python -m bench scaling``: measure what each stage costs, fit the model, check it, and advise.

All counts of processes are up together and take turns under each size (alternate.py), each with sixteen
clients for every I/O process, since that is what an I/O process of a large node has too. Two stages with a
core each get more, or neither would ever be full: one waits while the other has the requests.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from typing import Final

from bench.alternate import WARM_UP_S, turns
from bench.backend import Backend
from bench.chosen import choose_front_ends, choose_tokenizer, keep, say
from bench.cpu_sets import Cpus, choose_cpus, two_front_cores
from bench.front_end import TOKEN_POLICIES, FrontEnd
from bench.goal_rounds import AROUND_ROUND_S, START_S
from bench.launch import Running
from bench.machine import describe, require
from bench.rounds import CROWDED_ABOVE, Round, run_round
from bench.scaling_model import Sample, fit
from bench.scaling_text import advice, checked
from bench.table import Progress, apart_args
from bench.workload import Workload, shown_size

COUNTS: Final = ((1, 1), (1, 2), (2, 1), (2, 2), (4, 2))
SIZES: Final = (1 << 10, 16 << 10, 64 << 10)
QUICK_COUNTS: Final = ((1, 1), (2, 2))
QUICK_SIZES: Final = (1 << 10, 16 << 10)
POLICIES: Final = ("round_robin", "prefix_hash")
CLIENTS: Final = 16  # of each I/O process
CLIENTS_APART: Final = 64  # of one I/O process and one worker, a core each: 16 fill neither
APART: Final = "apart"


def run_scaling(args: argparse.Namespace) -> int:
    """Exit code 0; the models, their checks and all samples go to bench/out/."""
    require(["wrk", "cc", "taskset"])
    cpus = choose_cpus(args.cpus)
    (front_end,) = choose_front_ends([args.front_end], POLICIES, say)
    rounds, seconds = (1, 1.0) if args.quick else (args.rounds, args.seconds)
    counts, sizes = (QUICK_COUNTS, QUICK_SIZES) if args.quick else (COUNTS, SIZES)
    total = len(POLICIES) * len(sizes) * (len(counts) + 1)
    total_s = len(POLICIES) * (len(counts) + 1) * START_S
    total_s += total * (WARM_UP_S + AROUND_ROUND_S + rounds * (seconds + AROUND_ROUND_S))
    say(f"scaling of {front_end.name}: {total * rounds} rounds, about {max(1, round(total_s / 60))} minutes")
    progress = Progress(total * rounds, say)
    models, kept = {}, {}
    for policy in POLICIES:
        samples = measure_policy(args, front_end, cpus, policy, counts, sizes, rounds, seconds, progress)
        models[policy] = fit(samples)
        kept[policy] = {"samples": [asdict(one) for one in samples], "model": asdict(models[policy])}
        say(f"\n{checked(policy, models[policy], samples)}\n")
    text = advice(models, args.target_cores)
    path = keep("scaling", {"machine": describe(cpus), "front_end": front_end.name, "policies": kept})
    say(f"\n{text}\n\nsamples and models: {path}")
    return 0


def measure_policy(
    args: argparse.Namespace,
    front_end: FrontEnd,
    cpus: Cpus,
    policy: str,
    counts: Sequence[tuple[int, int]],
    sizes: Sequence[int],
    rounds: int,
    seconds: float,
    progress: Progress,
) -> list[Sample]:
    """All samples of one policy; an invalid round gives none."""
    tokenizer = choose_tokenizer(args.tokenizer) if policy in TOKEN_POLICIES else None
    more = tuple(shlex.split(args.meshd_args))
    apart = two_front_cores(cpus)
    found: list[Sample] = []
    with ExitStack() as stack:
        backend = stack.enter_context(Backend(cpus.backend))

        def start(on: Cpus, flags: Sequence[str]) -> Running:
            one = Running(front_end, on.front, backend.urls, policy, tokenizer, (*more, *flags))
            return stack.enter_context(one)

        sites: dict[tuple[int, int] | str, tuple[Running, Cpus]] = {
            pair: (start(cpus, _flags(*pair)), cpus) for pair in counts
        }
        sites[APART] = start(apart, apart_args(apart, 1)), apart
        for one, _ in sites.values():
            one.settle()
        for size in sizes:
            for key, (one, on) in sites.items():
                run_round(one, backend, on, Workload(_clients(key), WARM_UP_S, size))
            for number, key in enumerate(turns(list(sites), rounds)):
                one, on = sites[key]
                done = run_round(one, backend, on, Workload(_clients(key), seconds, size))
                progress.step(_told(policy, key, size, done))
                if done.is_valid:
                    pair = key if isinstance(key, tuple) else (1, 1)
                    found.append(sample_from(done, number // len(sites), pair, size, on, key == APART))
    return found


def sample_from(
    done: Round,
    pass_number: int,
    counts: tuple[int, int],
    body_bytes: int,
    cpus: Cpus,
    is_apart: bool = False,
) -> Sample:
    """Split a round's CPU by stage: names that `meshd ps` also shows tell the processes apart."""
    by_name: Mapping[str, float] = done.cpu_us_by_process
    io_us = sum(used for name, used in by_name.items() if name.startswith("meshd:io"))
    prepare_us = sum(used for name, used in by_name.items() if name.startswith("meshd:prep"))
    is_shared = is_apart and not cpus.is_front_alone
    load = done.load_core * len(cpus.load)  # in cores; backend included where they share
    load_us = load / done.per_s * 1e6 if is_shared and done.per_s else 0.0
    return Sample(
        pass_number,
        *counts,
        body_bytes / 1024,
        io_us=io_us,
        prepare_us=prepare_us,
        rest_us=done.cpu_us - io_us - prepare_us,
        load_us=load_us,
        per_s=done.per_s,
        core=done.core,
        # of the core with the load, what the load takes is no stranger's
        strangers=max(0.0, done.strangers - (load / len(cpus.front) if is_shared else 0.0)),
        is_apart=is_apart,
    )


def _clients(key: tuple[int, int] | str) -> int:
    return CLIENTS * key[0] if isinstance(key, tuple) else CLIENTS_APART


def _told(policy: str, key: tuple[int, int] | str, size: int, done: Round) -> str:
    counts = f"{key[0]} I/O + {key[1]} prepare" if isinstance(key, tuple) else "1 + 1, a core each"
    crowded = f"others took {done.strangers:.0%} of the core" if done.strangers > CROWDED_ABOVE else ""
    remarks = "; ".join(text for text in (*(f"INVALID: {fault}" for fault in done.faults), crowded) if text)
    return f"{policy} {counts}, {shown_size(size)}: {done.per_s:,.0f}/s, {done.cpu_us:.0f} µs CPU  {remarks}"


def _flags(io_processes: int, prepare_workers: int) -> tuple[str, ...]:
    return ("--io-processes", str(io_processes), "--prepare-workers", str(prepare_workers))
