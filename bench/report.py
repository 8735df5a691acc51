"""``python -m bench report``: from the state of `table` to Markdown, plots, CSV and raw data beside them."""

from __future__ import annotations

import argparse
import csv
from collections import Counter
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Final

from bench import BenchError
from bench.cell import Cell
from bench.chosen import say
from bench.environment import environment
from bench.front_ends import BASELINE
from bench.grid import all_points
from bench.plots import heat_maps, pareto
from bench.report_limits import limits_of
from bench.report_summary import NOT_MEASURED, goals_of, in_short, lacking
from bench.rounds import DIRECT
from bench.state import Kept, merged, read, write
from bench.summary import Row, summarise
from bench.table import rounds_by_point
from bench.text_table import text_table

INTRODUCTION: Final = (
    "Written by `python -m bench report` from the rounds in [rounds.jsonl](rounds.jsonl). How they are "
    "taken, "
    "and what makes a round valid, is told in `docs/performance.md`. All front ends run on the same cores, "
    "against the same backend, in turns."
)
ALT: Final = {"heatmap": "Heat map of rates", "pareto": "p99 latency against rate"}
TABLE_LEGEND: Final = (
    "Points are kind/size/clients. CPU µs: CPU time of the whole process tree for one request. × baseline "
    "and "
    "× less CPU compare with `fastapi`."
)
LEGENDS: Final = {
    "proxy": TABLE_LEGEND,
    "tokenize": TABLE_LEGEND,
    "whole": TABLE_LEGEND,
    "stream": "Each stream gets 100 events/s. CPU µs are for one event; latencies are from the backend's "
    "send to the client's read, and the added ones are less those of the direct connection.",
    "mixed": "Latencies and rate are of the short requests; the long ones have columns of their own.",
    "fairness": "Latencies and rate are of the short requests; the long ones have columns of their own.",
}
KINDS: Final = {
    "proxy": "Parse and forward",
    "tokenize": "Parse, tokenize a prefix, forward",
    "whole": "Parse, tokenize whole prompts, forward",
    "stream": "Streams",
    "mixed": "Long prompts among short ones",
    "fairness": "Short requests beside one client with long prompts",
}


def run_report(args: argparse.Namespace) -> int:
    """The command; writes into ``--to`` and says where."""
    for path in args.state:
        if not path.exists():
            raise BenchError(f"{path} is not there: run `python -m bench table` first")
    kept = merged([read(path) for path in args.state])
    cells = cells_of(kept)
    if not cells:
        raise BenchError(f"{', '.join(map(str, args.state))}: no round yet")
    args.to.mkdir(parents=True, exist_ok=True)
    write_csv(cells, args.to / "table.csv")
    write(kept, args.to / "rounds.jsonl")
    plots = [*heat_maps(cells, args.to), *pareto(cells, args.to)]
    (args.to / "report.md").write_text(markdown_of(kept, cells, [path.name for path in plots]))
    say(f"{args.to / 'report.md'}, table.csv, rounds.jsonl, {len(plots)} plots")
    return 0


def cells_of(kept: Kept) -> list[Cell]:
    """Medians by point and front end, in the order of the grid."""
    rounds = rounds_by_point(kept.entries)
    points = [point for point in all_points(kept.conditions["seconds"]) if point.name in rounds]
    return [Cell(point, row) for point in points for row in summarise(rounds[point.name], BASELINE)]


def write_csv(cells: Sequence[Cell], path: Path) -> None:
    """One line a cell, units in the names of the columns."""
    names = [one.name for one in fields(Row)]
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["point", "body_bytes", "clients", "streams", *names])
        for cell in cells:
            work = cell.point.workload
            values = [getattr(cell.row, name) for name in names]
            shown = ["; ".join(value) if isinstance(value, tuple) else value for value in values]
            writer.writerow([cell.point.name, work.body_bytes, work.clients, work.streams, *shown])


def markdown_of(kept: Kept, cells: Sequence[Cell], plots: Sequence[str]) -> str:
    """The whole report."""
    parts = ["# Benchmark", INTRODUCTION, *in_short(cells), *goals_of(kept, cells)]
    parts += limits_of(kept, cells)
    absent = lacking(cells)
    for kind, title in KINDS.items():
        mine = [cell for cell in cells if cell.point.kind == kind]
        if mine:
            parts += [
                f"## {title}",
                f"{_sentence(mine[0].point.setup.what)} {LEGENDS.get(kind, '')}".rstrip(),
            ]
            for name in plots:
                if f"-{kind}." in name and name.endswith(".svg"):
                    parts.append(f"![{ALT[name.partition('-')[0]]}: {title.lower()}]({name})")
            parts.append(table_of(mine, absent))
    parts += _environment(kept)
    parts += ["## Raw data", "Medians: [table.csv](table.csv). Every round: [rounds.jsonl](rounds.jsonl)."]
    return "\n\n".join(parts) + "\n"


def _environment(kept: Kept) -> list[str]:
    counts = Counter((one.point, one.front_end) for one in kept.entries if one.front_end != DIRECT)
    few, many = min(counts.values(), default=0), max(counts.values(), default=0)
    lengths = sorted({kept.conditions["seconds"], *kept.conditions.get("other_seconds", ())})
    seconds = " or ".join(f"{one:g}" for one in lengths)
    rounds = f"{few if few == many else f'{few} to {many}'} of {seconds} s each"
    rounds += ", alternating, each front end warmed up; medians"
    return environment(kept.machine, rounds, kept.conditions["tokenizer"])


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def table_of(cells: Sequence[Cell], absent: Sequence[tuple[str, str]] = ()) -> str:
    """One kind's table. ◦: not bound by the front end. Added delays are less those of the direct way.

    ``absent``: (point, front end) pairs without a round; those of the points shown here get a line each.
    """
    kind = cells[0].point.kind
    unit = "events/s" if kind == "stream" else "req/s"
    head = ["point", "front end", unit, "× baseline", "CPU µs", "× less CPU", "mean ms", "p50 ms", "p99 ms"]
    if kind == "stream":
        head += ["added p50 ms", "added p99 ms"]
    if kind in ("mixed", "fairness"):
        head += ["long req/s", "long p99 ms"]
    head += ["PSS MiB", "RSS MiB", "bottleneck", "valid", "notes"]
    direct = {cell.point.name: cell.row for cell in cells if cell.row.front_end == DIRECT}
    lines = []
    for point in dict.fromkeys(cell.point.name for cell in cells):
        here = [cell for cell in cells if cell.point.name == point]
        lines += [_line(cell, kind, direct.get(point)) for cell in here]
        blanks = ["–"] * (len(head) - 3)
        lines += [[point, name, *blanks, NOT_MEASURED] for where, name in absent if where == point]
    return text_table(head, lines)


def _line(cell: Cell, kind: str, direct: Row | None) -> list[str]:
    row, valid = cell.row, cell.row.rounds - cell.row.invalid
    mark = " ◦" if row.bottleneck != "front end" and not cell.point.workload.streams else ""
    is_direct = row.front_end == DIRECT
    line = [
        cell.point.name,
        row.front_end,
        f"{row.per_s:,.0f}{'' if is_direct else mark}" if valid else "–",
        _ratio(row.rate_ratio),
        "–" if is_direct or not valid else f"{row.cpu_us:.1f}",
        _ratio(row.ratio),
        *(_ms(one) if valid else "–" for one in (row.mean_us, row.p50_us, row.p99_us)),
    ]
    if kind == "stream":
        line += added_delays(row, direct)
    if kind in ("mixed", "fairness"):
        line += [f"{row.long_per_s:,.1f}", _ms(row.long_p99_us)] if valid else ["–", "–"]
    line += ["–", "–"] if is_direct or not valid else [f"{row.pss_mib:.0f}", f"{row.rss_mib:.0f}"]
    return [*line, row.bottleneck, f"{valid} of {row.rounds}", "; ".join(row.notes)]


def added_delays(row: Row, direct: Row | None) -> list[str]:
    """What the front end adds to an event's way from backend to client, in ms, at p50 and p99."""
    if direct is None or row.front_end == DIRECT or row.rounds == row.invalid:
        return ["–", "–"]
    return [_ms(max(0.0, row.p50_us - direct.p50_us)), _ms(max(0.0, row.p99_us - direct.p99_us))]


def _ms(microseconds: float) -> str:
    return f"{microseconds / 1000:.2f}"


def _ratio(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"
