"""The report of the goals in Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bench.environment import crowding_of, limits_of_machine
from bench.front_ends import BASELINE
from bench.goal_rounds import Measured
from bench.goals import START, Verdict, table_of_goals
from bench.grid import all_points
from bench.rounds import DIRECT
from bench.summary import Row, summarise
from bench.text_table import text_table


def markdown(
    verdicts: Sequence[Verdict],
    found: Mapping[bool, Measured],
    machine: Mapping[str, Any],
    samples: Mapping[tuple[str, str, str], Sequence[float | None]],
    about: Sequence[str],
) -> str:
    """The whole report of the goals. ``about``: the section on the machine."""
    parts = [
        "# Goals",
        "Ratios are of CPU time of the whole process tree for one request or event, on one front-end core, "
        "16 clients unless said, in one run. Written by `python -m bench goals`; the goals are in "
        "`bench/goals.toml`.",
        table_of_goals(verdicts),
    ]
    for is_own, title in ((False, "Beside others"), (True, "Beside itself, with tokens and without")):
        if found[is_own].rounds:
            parts += [f"## {title}", figures_of(found[is_own])]
    starts = [
        [name, ", ".join(f"{value:.2f} s" for value in values if value is not None)]
        for (figure, _, name), values in samples.items()
        if figure == START
    ]
    if starts:
        parts += ["## Starts", text_table(["front end", "to the last process"], starts)]
    rounds = [one for session in found.values() for here in session.rounds.values() for one in here]
    texts = (*crowding_of(rounds), *limits_of_machine(machine))
    parts += ["## Limits", "\n".join(f"- {text}" for text in texts), *about]
    return "\n\n".join(parts) + "\n"


def figures_of(found: Measured) -> str:
    """Medians by point and front end."""
    head = ["point", "front end", "rate", "CPU µs", "min–max", "p50 ms", "core used", "valid", "notes"]
    order = [point.name for point in all_points(1.0) if point.name in found.rounds]
    return text_table(
        head, [_line(name, row) for name in order for row in summarise(found.rounds[name], BASELINE)]
    )


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
