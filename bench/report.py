"""``python -m bench report``: from the state of `table` to Markdown, plots, CSV and raw data beside them."""

from __future__ import annotations

import argparse
import csv
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

from bench import BenchError
from bench.cell import Cell
from bench.chosen import say
from bench.front_ends import BASELINE, FRONT_ENDS
from bench.grid import all_points
from bench.plots import heat_maps, pareto
from bench.rounds import DIRECT
from bench.state import Kept, read
from bench.summary import Row, summarise
from bench.table import rounds_by_point

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
    if not args.state.exists():
        raise BenchError(f"{args.state} is not there: run `python -m bench table` first")
    kept = read(args.state)
    cells = cells_of(kept)
    if not cells:
        raise BenchError(f"{args.state} holds no round yet")
    args.to.mkdir(parents=True, exist_ok=True)
    write_csv(cells, args.to / "table.csv")
    shutil.copyfile(args.state, args.to / "rounds.jsonl")
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
    parts = ["# Benchmark", *environment(kept), *limits_of(kept, cells)]
    for kind, title in KINDS.items():
        mine = [cell for cell in cells if cell.point.kind == kind]
        if mine:
            parts += [f"## {title}", mine[0].point.setup.what + "."]
            parts += [f"![{name}]({name})" for name in plots if f"-{kind}." in name and name.endswith(".svg")]
            parts.append(table_of(mine))
    parts += ["## Raw data", "Medians: [table.csv](table.csv). Every round: [rounds.jsonl](rounds.jsonl)."]
    return "\n\n".join(parts) + "\n"


def environment(kept: Kept) -> list[str]:
    """Hardware, versions, and how rounds were taken."""
    machine, conditions = kept.machine, kept.conditions
    rows = [
        ("CPU", f"{machine['cpu']}, {machine['cpus_online']} online"),
        ("front end on CPUs", _numbers(machine["cpus_front_end"])),
        ("backends on CPUs", _numbers(machine["cpus_backend"])),
        ("load generator on CPUs", _numbers(machine["cpus_load"])),
        ("kernel", machine["kernel"]),
        ("Python", machine["python"]),
        ("meshd at commit", machine.get("revision") or "unknown"),
        ("load average at the start", ", ".join(f"{one:.2f}" for one in machine["load_average"])),
        ("rounds", f"{conditions['seconds']:g} s each, alternating, each front end warmed up; medians"),
        ("tokenizer, SHA-256", conditions["tokenizer"]),
        ("packages", _versions(machine["packages"])),
        ("programs", "; ".join(machine["programs"].values())),
        ("other routers", _versions(machine["peers"]) or "none installed"),
    ]
    return ["## Environment", _table(["what", ""], [list(row) for row in rows])]


def limits_of(kept: Kept, cells: Sequence[Cell]) -> list[str]:
    """What the figures cannot say, from the figures themselves."""
    machine = kept.machine
    found = [
        "All requests are a closed loop: a client sends the next one when it has the "
        "answer. Latencies are those "
        "at that number of clients, not at a given rate.",
        "Everything runs on one machine over loopback: no network card, no loss.",
    ]
    if set(machine["cpus_backend"]) & set(machine["cpus_load"]):
        found.append("Backend and load generator share their CPUs, so each takes time from the other.")
    if not machine["apart"]["is_front_alone"] and any(cell.point.setup.is_apart for cell in cells):
        found.append(
            "In the setup with two cores the second one also carries backend and load "
            "generator: there were too "
            "few CPUs. Latencies there include waiting for that CPU; compare front ends, not values."
        )
    if differing := machine.get("not_as_pinned"):
        found.append(f"The baseline was not run with the pinned versions: {_versions(differing)}.")
    found += [
        f"{name} was built from older sources than the commit named." for name in machine.get("stale", ())
    ]
    found += _limits_by_front_end(cells)
    bound = [
        cell
        for cell in cells
        if cell.row.front_end != DIRECT and cell.row.bottleneck not in ("front end", "")
    ]
    bound = [cell for cell in bound if not cell.point.workload.streams]
    if bound:
        found.append(
            f"In {len(bound)} cells (◦ in the tables) the front end was not the bottleneck: "
            f"rates there are lower "
            "bounds of what it can do. CPU a request holds all the same."
        )
    absent = {(one.front_end, one.why_absent.splitlines()[0]) for one in kept.entries if one.why_absent}
    found += [f"{name} could not be measured everywhere: {why}" for name, why in sorted(absent)]
    return ["## Limits", "\n".join(f"- {text}" for text in found)]


def _limits_by_front_end(cells: Sequence[Cell]) -> list[str]:
    names = {cell.row.front_end for cell in cells}
    found = []
    rewriting = [one.name for one in FRONT_ENDS.values() if one.rewrites_bodies and one.name in names]
    if rewriting:
        found.append(
            f"{', '.join(rewriting)} write the body anew, so the backend gets more bytes "
            f"than were sent; that the "
            "body arrived whole is checked by a lower bound only."
        )
    tokenizing = [cell for cell in cells if cell.point.kind == "tokenize"]
    for name in sorted({cell.row.front_end for cell in tokenizing} - {DIRECT}):
        if not FRONT_ENDS[name].tokenizes:
            policy = FRONT_ENDS[name].policies["prefix_hash"]
            found.append(
                f"{name} does not tokenize as it was started here, without a tokenizer; "
                f"it ran its policy {policy} on the text."
            )
    floors = [one.name for one in FRONT_ENDS.values() if not one.policies and one.name in names]
    if floors:
        found.append(f"{', '.join(floors)} do not look into bodies: floors, not rivals.")
    return found


def table_of(cells: Sequence[Cell]) -> str:
    """One kind's table. ◦: not bound by the front end. Added delays are less those of the direct way."""
    kind = cells[0].point.kind
    unit = "events/s" if kind == "stream" else "req/s"
    head = ["point", "front end", unit, "× baseline", "CPU µs", "× less CPU", "mean ms", "p50 ms", "p99 ms"]
    if kind == "stream":
        head += ["added p50 ms", "added p99 ms"]
    if kind in ("mixed", "fairness"):
        head += ["long req/s", "long p99 ms"]
    head += ["PSS MiB", "RSS MiB", "bottleneck", "valid", "notes"]
    direct = {cell.point.name: cell.row for cell in cells if cell.row.front_end == DIRECT}
    return _table(head, [_line(cell, kind, direct.get(cell.point.name)) for cell in cells])


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
        line += [f"{row.long_per_s:,.1f}", _ms(row.long_p99_us)]
    line += ["–", "–"] if is_direct else [f"{row.pss_mib:.0f}", f"{row.rss_mib:.0f}"]
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


def _numbers(cpus: Sequence[int]) -> str:
    return ", ".join(map(str, cpus))


def _versions(found: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {version}" for name, version in found.items())


def _table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join("| " + " | ".join(cell.replace("|", "/") for cell in row) + " |" for row in rows)
