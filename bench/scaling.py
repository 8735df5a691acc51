"""``python -m bench scaling``: measure what each stage costs, fit the model, check it, and advise."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final

from bench.alternate import WARM_UP_S
from bench.backend import Backend
from bench.chosen import choose_tokenizer, keep, say
from bench.cpu_sets import Cpus, choose_cpus, two_front_cores
from bench.front_end import TOKEN_POLICIES
from bench.front_ends import FRONT_ENDS
from bench.launch import Running
from bench.machine import describe, require
from bench.rounds import Round, run_round
from bench.scaling_model import PLANNED, Model, Sample, errors_left_out, fit
from bench.table import apart_args
from bench.workload import Workload, shown_size

COUNTS: Final = ((1, 1), (1, 2), (2, 1), (2, 4))
SIZES: Final = (1 << 10, 16 << 10, 64 << 10)
QUICK_COUNTS: Final = ((1, 1), (2, 2))
QUICK_SIZES: Final = (1 << 10, 16 << 10)
POLICIES: Final = ("round_robin", "prefix_hash")
RESERVED_CORES: Final = 2  # for the controller, the supervisor and the system
CLIENTS: Final = 16


def run_scaling(args: argparse.Namespace) -> int:
    """Exit code 0; the model and its samples go to bench/out/."""
    require(["wrk", "cc", "taskset"])
    cpus = choose_cpus(args.cpus)
    seconds = 1.0 if args.quick else args.seconds
    counts, sizes = (QUICK_COUNTS, QUICK_SIZES) if args.quick else (COUNTS, SIZES)
    models = {}
    kept = {}
    for policy in POLICIES:
        tokenizer = choose_tokenizer(args.tokenizer) if policy in TOKEN_POLICIES else None
        samples = []
        for io_processes, prepare_workers in counts:
            more = (*shlex.split(args.meshd_args), *_counts(io_processes, prepare_workers))
            samples += _measure(cpus, policy, tokenizer, more, io_processes, prepare_workers, sizes, seconds)
        models[policy] = fit(samples)
        kept[policy] = {"samples": [asdict(one) for one in samples], "model": asdict(models[policy])}
        say(f"\n{checked(policy, models[policy], samples)}")
        say(_check_apart(cpus, policy, tokenizer, models[policy], sizes, seconds))
    say(f"\n{advice(models, args.target_cores)}")
    path = keep("scaling", {"machine": describe(cpus), "policies": kept})
    say(f"\nsamples and models: {path}")
    return 0


def sample_from(
    done: Round, io_processes: int, prepare_workers: int, body_bytes: int, cores: int = 1
) -> Sample:
    """Split a round's CPU by stage: names that `meshd ps` also shows tell the processes apart."""
    by_name: Mapping[str, float] = done.cpu_us_by_process
    return Sample(
        io_processes,
        prepare_workers,
        body_bytes / 1024,
        io_us=sum(used for name, used in by_name.items() if name.startswith("meshd:io")),
        prepare_us=sum(used for name, used in by_name.items() if name.startswith("meshd:prep")),
        rate=done.per_s / (done.core * cores) if done.core > 0 else 0.0,
        per_s=done.per_s,
    )


def checked(policy: str, model: Model, samples: Sequence[Sample]) -> str:
    """The model in words, and how far it is off where the machine can tell."""
    lines = [f"policy {policy}, CPU microseconds of a request:"]
    for name, stage, peer in (("I/O", model.io, "prepare worker"), ("prepare", model.prepare, "I/O process")):
        lines.append(
            f"  {name:8} {stage.base:.1f} + {stage.per_peer:.2f} for each {peer} + "
            f"{stage.per_kib:.2f} for each KiB"
        )
    for one, ratio in errors_left_out(samples):
        lines.append(
            f"  check: {one.io_processes} I/O + {one.prepare_workers} prepare on one core, "
            f"{one.kib:.0f} KiB: "
            f"{one.rate:,.0f}/s measured, {ratio:.0%} of it predicted from the other samples"
        )
    return "\n".join(lines)


def advice(models: Mapping[str, Model], cores: int, sizes: Sequence[int] = SIZES) -> str:
    """The best split of a node's cores by policy and size, as a table."""
    usable = cores - RESERVED_CORES
    lines = [
        f"A node of {cores} cores ({RESERVED_CORES} of them for the controller and the system):",
        "",
        "| policy | body | --io-processes | --prepare-workers | limit, requests/s | "
        f"to plan for ({PLANNED:.0%} of the lower one) |",
        "|---|---|---|---|---|---|",
    ]
    for policy, model in models.items():
        for size in sizes:
            kib = size / 1024
            io_processes, prepare_workers = model.with_free_peers().best_split(usable, kib)
            low = model.rate(io_processes, prepare_workers, kib)
            high = model.with_free_peers().rate(io_processes, prepare_workers, kib)
            lines.append(
                f"| {policy} | {shown_size(size)} | {io_processes} | {prepare_workers} | "
                f"{low:,.0f}–{high:,.0f} "
                f"| {low * PLANNED:,.0f} |"
            )
    lines += [
        "",
        "Predicted from a few processes on one core: memory bandwidth, clocks under full "
        "load and the kernel's "
        "locks are not in the model. The lower limit charges every peer what a second one "
        "cost on a shared core, the "
        "upper one charges nothing. The split is steadier than the rates: it "
        "is the ratio of the two stages' costs. Count cores, not SMT threads, and give "
        "each socket its half of "
        "both kinds, so that bodies stay in the memory of one socket.",
    ]
    return "\n".join(lines)


def _measure(
    cpus: Cpus,
    policy: str,
    tokenizer: Path | None,
    more: tuple[str, ...],
    io_processes: int,
    prepare_workers: int,
    sizes: Sequence[int],
    seconds: float,
) -> list[Sample]:
    found = []
    with (
        Backend(cpus.backend) as backend,
        Running(FRONT_ENDS["meshd"], cpus.front, backend.urls, policy, tokenizer, more) as running,
    ):
        running.settle()
        for size in sizes:
            run_round(running, backend, cpus, Workload(CLIENTS, WARM_UP_S, size))
            done = run_round(running, backend, cpus, Workload(CLIENTS, seconds, size))
            say(
                f"{policy} {io_processes} I/O + {prepare_workers} prepare, "
                f"{shown_size(size)}: {done.per_s:,.0f}/s, "
                f"{done.cpu_us:.0f} µs a request; {'; '.join((*done.faults, *done.notes))}"
            )
            if done.is_valid:
                found.append(sample_from(done, io_processes, prepare_workers, size, len(cpus.front)))
    return found


def _check_apart(
    cpus: Cpus, policy: str, tokenizer: Path | None, model: Model, sizes: Sequence[int], seconds: float
) -> str:
    """One I/O process and one prepare worker, a core each: predicted and measured, if there are cores."""
    apart = two_front_cores(cpus)
    if not apart.is_front_alone:
        return "  no check on two cores: backend and load generator need the second one here"
    found = _measure(apart, policy, tokenizer, apart_args(apart, 1), 1, 1, sizes, seconds)
    return "\n".join(
        f"  check: 1 I/O + 1 prepare, a core each, {one.kib:.0f} KiB: {one.per_s:,.0f}/s measured, "
        f"{model.rate(1, 1, one.kib) / max(1.0, one.per_s):.0%} of it predicted"
        for one in found
    )


def _counts(io_processes: int, prepare_workers: int) -> tuple[str, ...]:
    return ("--io-processes", str(io_processes), "--prepare-workers", str(prepare_workers))
