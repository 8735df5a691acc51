"""From rounds to a table: medians over the valid rounds, and ratios to the baseline."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from bench.rounds import DIRECT, Round


@dataclass(frozen=True, slots=True)
class Row:
    """Medians of one front end under one workload. ``ratio``: CPU of the baseline ÷ CPU of this one.

    ``rate_ratio``: rate of this one ÷ rate of the baseline. ``bottleneck``: that of most valid rounds.
    """

    front_end: str
    workload: str
    rounds: int
    invalid: int
    per_s: float
    cpu_us: float
    cpu_us_low: float
    cpu_us_high: float
    mean_us: float
    p50_us: float
    p99_us: float
    core: float
    load_core: float
    backend_core: float
    bottleneck: str
    long_per_s: float
    long_p99_us: float
    rss_mib: float
    pss_mib: float
    ratio: float | None
    rate_ratio: float | None
    notes: tuple[str, ...]


def summarise(rounds: Sequence[Round], baseline: str) -> list[Row]:
    """One row for each pair of workload and front end, in order of first appearance."""
    groups: dict[tuple[str, str], list[Round]] = {}
    for found in rounds:
        groups.setdefault((found.workload, found.front_end), []).append(found)
    cpu = {key: _median([r.cpu_us for r in group if r.is_valid]) for key, group in groups.items()}
    rate = {key: _median([r.per_s for r in group if r.is_valid]) for key, group in groups.items()}
    return [
        _row(group, cpu.get((workload, baseline), 0.0), rate.get((workload, baseline), 0.0))
        for (workload, _), group in groups.items()
    ]


def markdown(rows: Sequence[Row], unit: str) -> str:
    """A table that reads well as plain text too."""
    head = ["workload", "front end", f"{unit}/s", f"CPU µs/{unit}", "min–max", "p50 ms", "p99 ms"]
    head += ["core", "load's core", "× less CPU than baseline", "rounds", "notes"]
    lines = [head, ["---"] * len(head)]
    lines += [_cells(row) for row in rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    lines[1] = ["-" * width for width in widths]
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |"
        for line in lines
    )


def _row(group: list[Round], baseline_cpu_us: float, baseline_per_s: float) -> Row:
    good = [found for found in group if found.is_valid]
    cpu_us = _median([found.cpu_us for found in good])
    per_s = _median([found.per_s for found in good])
    has_ratio = cpu_us > 0 and baseline_cpu_us > 0 and group[0].front_end != DIRECT
    texts = [text for found in group for text in (*found.faults, *found.notes)]
    return Row(
        front_end=group[0].front_end,
        workload=group[0].workload,
        rounds=len(group),
        invalid=len(group) - len(good),
        per_s=per_s,
        cpu_us=cpu_us,
        cpu_us_low=min((found.cpu_us for found in good), default=0.0),
        cpu_us_high=max((found.cpu_us for found in good), default=0.0),
        mean_us=_median([found.mean_us for found in good]),
        p50_us=_median([found.p50_us for found in good]),
        p99_us=_median([found.p99_us for found in good]),
        core=_median([found.core for found in good]),
        load_core=_median([found.load_core for found in good]),
        backend_core=_median([found.backend_core for found in good]),
        bottleneck=Counter(found.bottleneck for found in good).most_common(1)[0][0] if good else "",
        long_per_s=_median([found.long_per_s for found in good]),
        long_p99_us=_median([found.long_p99_us for found in good]),
        rss_mib=_median([found.rss_kib / 1024 for found in good]),
        pss_mib=_median([found.pss_kib / 1024 for found in good]),
        rate_ratio=per_s / baseline_per_s if has_ratio and baseline_per_s else None,
        ratio=baseline_cpu_us / cpu_us if has_ratio else None,
        notes=_kinds(texts),
    )


def _kinds(texts: Sequence[str]) -> tuple[str, ...]:
    """Each kind of note once (with its first numbers), with how often it came."""
    by_kind: dict[str, list[str]] = {}
    for text in texts:
        kind = "".join(character for character in text if not character.isdigit())
        by_kind.setdefault(kind, []).append(text)
    return tuple(group[0] + (f" ({len(group)}×)" if len(group) > 1 else "") for group in by_kind.values())


def _cells(row: Row) -> list[str]:
    is_direct = row.front_end == DIRECT
    valid = row.rounds - row.invalid
    if not valid:
        return [
            row.workload,
            row.front_end,
            *["–"] * 8,
            f"0 of {row.rounds}",
            "INVALID: " + "; ".join(row.notes),
        ]
    return [
        row.workload,
        row.front_end,
        f"{row.per_s:,.0f}",
        "–" if is_direct else f"{row.cpu_us:.1f}",
        "–" if is_direct else f"{row.cpu_us_low:.1f}–{row.cpu_us_high:.1f}",
        f"{row.p50_us / 1000:.2f}",
        f"{row.p99_us / 1000:.2f}",
        "–" if is_direct else f"{row.core:.0%}",
        f"{row.load_core:.0%}",
        f"{row.ratio:.2f}" if row.ratio else "–",
        f"{valid} of {row.rounds}",
        "; ".join(row.notes),
    ]


def _median(values: list[float]) -> float:
    return median(values) if values else 0.0
