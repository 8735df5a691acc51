"""The top of the report: the figures most readers want, the goals, and what of the grid was not measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from bench.cell import Cell
from bench.front_ends import FRONT_ENDS
from bench.goals import IDLE, START, judge_goal, read_goals, samples_of, table_of_goals
from bench.grid import all_points
from bench.rounds import DIRECT
from bench.state import Kept
from bench.table import rounds_by_point, takes_part
from bench.text_table import text_table

OURS: Final = ("meshd", "meshd-compiled")
SHOWN: Final = {
    "proxy/1k/16": "proxy 1 KiB",
    "proxy/128k/16": "proxy 128 KiB",
    "proxy/1m/16": "proxy 1 MiB",
    "tokenize/1k/16": "tokenize 1 KiB",
    "tokenize/128k/16": "tokenize 128 KiB",
    "stream/256": "256 streams",
}
NOT_MEASURED: Final = "not measured"


def in_short(cells: Sequence[Cell]) -> list[str]:
    """Rate and CPU of each front end at a few points, 16 clients; nothing where none of them was measured."""
    found = {(cell.point.name, cell.row.front_end): cell for cell in cells}
    points = [name for name in SHOWN if any(point == name for point, _ in found)]
    names = list(dict.fromkeys(name for _, name in found if name != DIRECT))
    if not points:
        return []
    lines = [[name, *(_short(found.get((point, name)), name, point) for point in points)] for name in names]
    text = (
        "Rate of one front-end core, and CPU time of the whole process tree for one request (or event). "
        "16 clients; streams: 100 events/s each. ◦: the front end was not the bottleneck, so the rate is a "
        "lower bound."
    )
    return ["## In short", text, text_table(["front end", *(SHOWN[point] for point in points)], lines)]


def goals_of(kept: Kept, cells: Sequence[Cell]) -> list[str]:
    """What of bench/goals.toml these rounds can judge."""
    ours = [name for name in OURS if any(cell.row.front_end == name for cell in cells)]
    samples = samples_of(rounds_by_point(kept.entries))
    verdicts = [
        judge_goal(goal, name, samples, "not measured by `table`")
        for goal in read_goals()
        if goal.measure not in (IDLE, START)
        for name in ours
    ]
    if not any(verdict.reached is not None for verdict in verdicts):
        return []
    text = (
        "Of `bench/goals.toml`, judged from the rounds of this report (range: single rounds). "
        "`python -m bench goals` measures all of them, memory and start included."
    )
    return ["## Goals", text, table_of_goals(verdicts)]


def missing_of(cells: Sequence[Cell]) -> str:
    """The points of the full grid that have no round, in a sentence; empty when there are none."""
    measured = {cell.point.name for cell in cells}
    missing = [point.name for point in all_points(1.0) if point.name not in measured]
    if not missing:
        return ""
    shown = ", ".join(_together(missing))
    return f"Of the full grid {len(missing)} points were not measured: {shown}."


def _together(points: Sequence[str]) -> list[str]:
    """``proxy/1k/{1,4}`` for ``proxy/1k/1`` and ``proxy/1k/4``."""
    groups: dict[str, list[str]] = {}
    for point in points:
        before, _, last = point.rpartition("/")
        groups.setdefault(before, []).append(last)
    return [
        f"{before}/{last[0]}" if len(last) == 1 else f"{before}/{{{','.join(last)}}}"
        for before, last in groups.items()
    ]


def lacking(cells: Sequence[Cell]) -> list[tuple[str, str]]:
    """(point, front end) of the measured points without a round, though the front end takes part in them."""
    have = {(cell.point.name, cell.row.front_end) for cell in cells}
    names = list(dict.fromkeys(name for _, name in have if name != DIRECT))
    points = {cell.point.name: cell.point for cell in cells}
    return [
        (point.name, name)
        for point in points.values()
        for name in names
        if (point.name, name) not in have and takes_part(FRONT_ENDS[name], point.setup)
    ]


def _short(cell: Cell | None, name: str, point: str) -> str:
    if cell is None:
        (known,) = [one for one in all_points(1.0) if one.name == point]
        return NOT_MEASURED if takes_part(FRONT_ENDS[name], known.setup) else "takes no part"
    row = cell.row
    if row.invalid == row.rounds:
        return "no valid round"
    is_bound = not cell.point.workload.streams and row.bottleneck != "front end"
    rate = "" if cell.point.workload.streams else f"{row.per_s:,.0f}/s{' ◦' if is_bound else ''}, "
    return f"{rate}{row.cpu_us:,.0f} µs" if row.cpu_us >= 100 else f"{rate}{row.cpu_us:.1f} µs"
