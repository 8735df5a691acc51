"""The scaling model in words: what was fitted, how far predictions were off, and advice with its sums."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Final

from bench.rounds import CROWDED_ABOVE
from bench.scaling_model import PLANNED, Check, Model, Sample, Stage, checks_apart, checks_shared
from bench.text_table import text_table
from bench.workload import shown_size

RESERVED_CORES: Final = 2  # for the controller, the supervisor and the system
NO_SECOND_CORE: Final = (
    "load generator and backend had to use the second core as well: their measured cost counts to that stage"
)


def checked(policy: str, model: Model, samples: Sequence[Sample]) -> str:
    """The model, its checks, and how quiet the machine was."""
    lines = [f"policy {policy}, CPU microseconds of a request:"]
    for name, stage in (("I/O", model.io), ("prepare", model.prepare)):
        lines.append(f"  {name:8} {_stage(stage)}")
    lines.append(f"  others   {model.rest_us:.1f} (controller, supervisor, leader)")
    shared = checks_shared(samples)
    lines += ["", "  N processes on one core, predicted by a fit that has not seen these counts:"]
    lines += [
        _line(one, f"{one.io_processes} I/O + {one.prepare_workers} prepare", "/s a core") for one in shared
    ]
    apart = checks_apart(samples)
    if apart:
        is_loaded = any(one.load_us for one in samples)
        lines += ["", "  1 I/O + 1 prepare, a core each, predicted from rounds on one core:"]
        lines += [f"  ({NO_SECOND_CORE})"] if is_loaded else []
        lines += [_line(one, "a core each", "/s") for one in apart]
    lines += ["", f"  {_verdict(shared, apart)}"]
    busy = [one for one in samples if one.strangers > CROWDED_ABOVE]
    if busy:
        share = max(one.strangers for one in busy)
        lines.append(
            f"  In {len(busy)} of {len(samples)} rounds others took more than {CROWDED_ABOVE:.0%} of the "
            "core, up to "
            f"{share:.0%}: not a quiet machine, so the errors above are the noise's as well as the model's."
        )
    return "\n".join(lines)


def advice(models: Mapping[str, Model], cores: int, sizes: Sequence[int] | None = None) -> str:
    """The best split of a node's cores by policy and size, with the sums that lead to it."""
    usable = cores - RESERVED_CORES
    head = ["policy", "body", "I/O µs", "prepare µs", "--io-processes N", "--prepare-workers M"]
    head += ["N ÷ I/O", "M ÷ prepare", f"plan for, requests/s ({PLANNED:.0%})", "if crowded"]
    lines = []
    for policy, model in models.items():
        for kib in [size / 1024 for size in sizes] if sizes else [kib for kib, _ in model.io.base_us]:
            io, prepare = model.best_split(usable, kib)
            io_us, prepare_us = model.io.at(kib) * model.io.apart, model.prepare.at(kib) * model.prepare.apart
            rate = model.rate(io, prepare, kib)
            figures = (io / io_us * 1e6, prepare / prepare_us * 1e6, rate * PLANNED)
            line = [policy, shown_size(round(kib * 1024)), f"{io_us:.0f}", f"{prepare_us:.0f}"]
            line += [str(io), str(prepare), *(f"{figure:,.0f}" for figure in figures)]
            lines.append([*line, f"{model.crowded_rate(io, prepare, kib) * PLANNED:,.0f}"])
    return "\n".join(
        [
            f"A node of {cores} cores, {RESERVED_CORES} of them for the controller and the system, so "
            f"N + M = {usable}. Both stages end at the same rate when N : M = I/O µs : prepare µs:",
            "",
            text_table(head, lines),
            "",
            "I/O µs and prepare µs are the measured costs with a core for each stage. N ÷ I/O is what N "
            "processes of that cost can do in a second, the smaller of the two is the limit, and the "
            "share of it to plan for keeps waiting short. 'If crowded' charges the exponents in full, as "
            "if all processes pushed one another off their cores: a bound from below. Memory bandwidth, "
            "clocks under full load and the kernel's locks are in neither. The split is steadier than the "
            "rates, since it is a ratio of costs. Count cores, not SMT threads, and give each socket its "
            "half of both kinds, so that bodies stay in the memory of one socket.",
        ]
    )


def _stage(stage: Stage) -> str:
    base = ", ".join(f"{us:.1f} at {shown_size(round(kib * 1024))}" for kib, us in stage.base_us)
    return (
        f"{base}; × N^{stage.by_io:.2f} × M^{stage.by_prepare:.2f} on one core; "
        f"× {stage.apart:.2f} with a core each"
    )


def _line(one: Check, counts: str, unit: str) -> str:
    return (
        f"    {counts}, {shown_size(round(one.kib * 1024))}: {one.measured:,.0f}{unit} measured, "
        f"{one.predicted:,.0f} predicted ({one.error:+.0%})"
    )


def _verdict(shared: Sequence[Check], apart: Sequence[Check]) -> str:
    found = []
    for what, checks in (("on one core", shared), ("with a core each", apart)):
        if checks:
            errors = [abs(one.error) for one in checks]
            found.append(f"{what}: median {median(errors):.0%}, worst {max(errors):.0%} of {len(errors)}")
    return f"errors {'; '.join(found)}" if found else "nothing to check: too few counts"
