"""The report from kept rounds."""

from __future__ import annotations

import argparse
import csv
from dataclasses import replace
from pathlib import Path

import pytest

from bench import BenchError
from bench.cell import Cell
from bench.grid import all_points
from bench.plots import frontier, rate_ratios
from bench.report import added_delays, cells_of, markdown_of, run_report, table_of
from bench.report_limits import limits_of
from bench.report_summary import goals_of, lacking, missing_of
from bench.rounds import Round
from bench.state import Entry, Kept, State, merged

BASE = Round(
    front_end="meshd",
    workload="w",
    done=100,
    per_s=1000.0,
    cpu_us=100.0,
    cpu_us_by_process={},
    mean_us=1000.0,
    p50_us=900.0,
    p99_us=2000.0,
    max_us=3000.0,
    core=1.0,
    strangers=0.0,
    load_core=0.5,
    backend_core=0.3,
    upstream_share=0.5,
    bottleneck="front end",
    faults=(),
    notes=(),
    rss_kib=2048,
    pss_kib=1024,
)
MACHINE = {
    "cpu": "a Xeon",
    "cpus_online": 2,
    "cpus_front_end": [0],
    "cpus_backend": [1],
    "cpus_load": [1],
    "kernel": "6",
    "python": "3.11",
    "revision": None,
    "load_average": [0.1, 0.2, 0.3],
    "packages": {"meshd": "0.1.0"},
    "programs": {"wrk": "wrk 4"},
    "peers": {"smg": "1.0"},
    "not_as_pinned": {"uvicorn": "0.1"},
    "stale": ["meshd-compiled"],
    "apart": {"cpus_front_end": [0, 1], "is_front_alone": False},
}
CONDITIONS = {"seconds": 5.0, "tokenizer": "abc"}


def entries() -> list[Entry]:
    found = []
    for name, per_s in (("direct", 9000.0), ("meshd", 1000.0), ("fastapi", 400.0), ("smg", 500.0)):
        done = replace(BASE, front_end=name, per_s=per_s)
        found += [Entry(point, name, 0, done) for point in ("proxy/1k/1", "proxy/1k/16", "tokenize/1k/16")]
        streams = replace(BASE, front_end=name, p50_us=50.0 if name == "direct" else 250.0)
        found.append(Entry("stream/64", name, 0, streams))
    return found


KEPT = Kept(CONDITIONS, MACHINE, entries())


def test_cells_are_in_the_order_of_the_grid_with_ratios() -> None:
    cells = cells_of(Kept(CONDITIONS, MACHINE, entries()[::-1]))
    names = list(dict.fromkeys(cell.point.name for cell in cells))
    assert names == ["proxy/1k/1", "proxy/1k/16", "stream/64", "tokenize/1k/16"]
    ratios = {cell.row.front_end: cell.row.rate_ratio for cell in cells if cell.point.name == "proxy/1k/1"}
    assert ratios == {"direct": None, "meshd": 2.5, "fastapi": 1.0, "smg": 1.25}


def test_limits_name_what_the_figures_cannot_say() -> None:
    absent = Entry("proxy/1k/1", "nginx", 0, None, "nginx: did not start\nlog")
    kept = Kept(CONDITIONS, MACHINE, [*entries(), absent])
    text = limits_of(kept, cells_of(kept))[1]
    assert "share their CPUs" in text and "not run with the pinned versions: uvicorn 0.1" in text
    assert "meshd-compiled was built from older sources" in text
    assert "Bodies are written anew by smg" in text and "smg does not tokenize" in text
    assert "nginx could not be measured everywhere: nginx: did not start\n" not in text
    assert "nginx could not be measured everywhere: nginx: did not start" in text


def test_a_cell_that_the_front_end_did_not_bound_is_marked() -> None:
    bound = Entry("proxy/1k/4", "meshd", 0, replace(BASE, bottleneck="load generator"))
    kept = Kept(CONDITIONS, MACHINE, [*entries(), bound])
    cells = cells_of(kept)
    assert "1,000 ◦" in table_of([cell for cell in cells if cell.point.name == "proxy/1k/4"])
    assert "(◦ in the tables): 1." in limits_of(kept, cells)[1]


def test_added_delay_is_less_that_of_the_direct_way() -> None:
    rows = {cell.row.front_end: cell.row for cell in cells_of(KEPT) if cell.point.kind == "stream"}
    assert added_delays(rows["meshd"], rows["direct"]) == ["0.20", "0.00"]
    assert added_delays(rows["direct"], rows["direct"]) == ["–", "–"]


def test_every_table_has_as_many_cells_in_each_line() -> None:
    text = markdown_of(KEPT, cells_of(KEPT), [])
    for block in text.split("\n\n"):
        if block.startswith("|"):
            assert len({line.count("|") for line in block.splitlines()}) == 1


def test_an_invalid_round_gives_no_figures() -> None:
    bad = Entry("proxy/1k/1", "meshd", 0, replace(BASE, faults=("3 read errors",)))
    (cell,) = cells_of(Kept(CONDITIONS, MACHINE, [bad]))
    line = table_of([cell]).splitlines()[-1]
    assert "0 of 1" in line and "3 read errors" in line and "1,000" not in line


def test_heat_map_holds_our_rate_over_the_rivals() -> None:
    proxy = [cell for cell in cells_of(KEPT) if cell.point.kind == "proxy"]
    assert rate_ratios(proxy, "meshd", "smg") == {(1024, 1): 2.0, (1024, 16): 2.0}


def test_frontier_keeps_what_nobody_beats_in_both() -> None:
    assert frontier([(100, 5), (200, 5), (300, 9), (250, 10)]) == [(200, 5), (300, 9)]


def test_report_writes_markdown_plots_csv_and_raw_rounds(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    state = State(tmp_path / "state.jsonl", CONDITIONS, MACHINE)
    for entry in entries():
        state.add(entry)
    assert run_report(argparse.Namespace(state=[tmp_path / "state.jsonl"], to=tmp_path / "report")) == 0
    report = (tmp_path / "report" / "report.md").read_text()
    for name in ("heatmap-proxy.svg", "pareto-proxy.svg", "heatmap-tokenize.svg"):
        assert f"]({name})" in report and (tmp_path / "report" / name).stat().st_size > 0
        assert (tmp_path / "report" / name.replace(".svg", ".png")).exists()
    with (tmp_path / "report" / "table.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(entries())
    assert {row["per_s"] for row in rows if row["front_end"] == "smg" and row["streams"] == "0"} == {"500.0"}
    assert (tmp_path / "report" / "rounds.jsonl").read_text() == (tmp_path / "state.jsonl").read_text()


def test_what_was_not_measured_is_marked_so() -> None:
    entries_now = [one for one in entries() if (one.point, one.front_end) != ("proxy/1k/16", "smg")]
    kept = Kept(CONDITIONS, MACHINE, entries_now)
    cells = cells_of(kept)
    assert lacking(cells) == [("proxy/1k/16", "smg")]
    text = markdown_of(kept, cells, [])
    (line,) = [line for line in text.splitlines() if line.startswith("| proxy/1k/16 | smg |")]
    assert line.endswith("| not measured |")
    assert "points were not measured: " in text and "proxy/16k/{1,4,16,64,256}, " in text
    assert "| smg | not measured |" in text  # in short
    assert missing_of([Cell(point, cells[0].row) for point in all_points(1.0)]) == ""


def test_report_begins_with_its_main_figures_and_the_goals() -> None:
    kept = Kept(CONDITIONS, MACHINE, entries())
    text = markdown_of(kept, cells_of(kept), [])
    assert "| meshd | 1,000/s, 100 µs |" in text
    goals = text[text.index("## Goals") : text.index("## Limits")]
    assert "proxy 1 KiB, CPU a request ÷ FastAPI | ≤ 0.125 × | 1 × | missed" in goals
    assert "10,000 idle" not in goals


def test_goals_that_no_round_can_judge_are_left_out() -> None:
    kept = Kept(CONDITIONS, MACHINE, [one for one in entries() if one.front_end == "smg"])
    assert goals_of(kept, cells_of(kept)) == []


def test_states_of_one_machine_are_merged_and_the_first_counts() -> None:
    small = [Entry("proxy/1k/1", "meshd", 0, BASE), Entry("proxy/16k/4", "meshd", 0, BASE)]
    both = merged([KEPT, Kept({**CONDITIONS, "seconds": 2.0}, MACHINE, small)])
    found = {(one.point, one.front_end): one.round for one in both.entries}
    assert found["proxy/16k/4", "meshd"] == BASE
    assert len(both.entries) == len(KEPT.entries) + 1
    assert "of 2 or 5 s each" in markdown_of(both, cells_of(both), [])


def test_states_of_different_machines_make_no_report() -> None:
    other = Kept({**CONDITIONS, "kernel": "7"}, MACHINE, [])
    with pytest.raises(BenchError, match="different conditions \\(kernel\\)"):
        merged([KEPT, other])


def test_report_without_a_state_says_what_to_run_first(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="run `python -m bench table` first"):
        run_report(argparse.Namespace(state=[tmp_path / "none"], to=tmp_path))
