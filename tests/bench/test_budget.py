"""Verdicts of the guard, and counts of instructions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bench import BenchError
from bench.__main__ import RUN
from bench.budget import Limit, in_force, judge, read_budget
from bench.commands import BUDGET, COMMANDS, make_parser
from bench.front_end import FrontEnd, Site
from bench.front_ends import FRONT_ENDS
from bench.grid import all_points, choose
from bench.guard import there
from bench.instructions import parse_callgrind, parse_perf, per_request, under_callgrind

CPU = Limit("cpu", "cpu", "proxy/1k/16", "meshd", "fastapi", at_most=0.6)
BY_PERF = Limit("tree", "instructions", "proxy/1k/16", "meshd", "fastapi", 0.6, counter="perf")
BY_CALLGRIND = Limit("process", "instructions", "proxy/1k/1", "meshd", "fastapi", 0.8, counter="callgrind")


def figures(mine: float, other: float) -> dict[tuple[str, str, str], float]:
    return {("cpu", CPU.point, "meshd"): mine, ("cpu", CPU.point, "fastapi"): other}


@pytest.mark.parametrize(("mine", "is_broken"), [(50.0, False), (60.0, False), (61.0, True)])
def test_a_ratio_above_its_limit_breaks_the_budget(mine: float, is_broken: bool) -> None:
    (verdict,) = judge([CPU], figures(mine, 100.0))
    assert (verdict.ratio, verdict.is_broken) == (mine / 100.0, is_broken)
    assert str(verdict).startswith("BROKEN" if is_broken else "kept")


def test_what_was_not_measured_breaks_the_budget_too() -> None:
    (verdict,) = judge([CPU], {})
    assert verdict.is_broken and "not measured" in str(verdict)


@pytest.mark.parametrize(
    ("limit", "mine", "suggested"), [(CPU, 50.0, "0.70"), (replace(CPU, figure="instructions"), 50.0, "0.57")]
)
def test_a_suggested_limit_leaves_room_for_the_noise_of_its_figure(
    limit: Limit, mine: float, suggested: str
) -> None:
    figures_now = {(limit.figure, limit.point, "meshd"): mine, (limit.figure, limit.point, "fastapi"): 100.0}
    (verdict,) = judge([limit], figures_now)
    assert verdict.suggested == suggested
    assert judge([limit], {})[0].suggested == "–"


def test_limits_of_a_build_that_is_not_there_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = replace(CPU, of="meshd-compiled")
    absent = replace(FRONT_ENDS["meshd-compiled"], programs=("no-such-program",))
    monkeypatch.setitem(FRONT_ENDS, "meshd-compiled", absent)
    assert there([CPU, compiled]) == ([CPU], [compiled])
    monkeypatch.setitem(FRONT_ENDS, "meshd-compiled", replace(absent, programs=()))
    assert there([CPU, compiled]) == ([CPU, compiled], [])


def test_limits_of_another_counter_are_not_in_force() -> None:
    limits = [CPU, BY_PERF, BY_CALLGRIND]
    assert in_force(limits, "perf") == [CPU, BY_PERF]
    assert in_force(limits, "callgrind") == [CPU, BY_CALLGRIND]
    assert in_force(limits, "") == [CPU]


def test_the_budget_of_the_project_names_points_and_front_ends_that_exist() -> None:
    limits = read_budget(BUDGET)
    assert {limit.figure for limit in limits} == {"cpu", "instructions"}
    assert all({limit.of, limit.over} <= set(FRONT_ENDS) for limit in limits)
    points = choose(all_points(1.0), [limit.point for limit in limits])
    assert {point.setup.policy for point in points} == {"round_robin"}


@pytest.mark.parametrize("text", ["", "budget = []", "[[budget]]\nname = 'x'", "no TOML"])
def test_a_budget_without_sense_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "budget.toml").write_text(text)
    with pytest.raises(BenchError, match="budget"):
        read_budget(tmp_path / "budget.toml")


def test_every_command_can_be_run_and_parsed() -> None:
    assert tuple(RUN) == COMMANDS
    assert {make_parser().parse_args([name]).command for name in COMMANDS} == set(COMMANDS)


def test_perf_output_is_read() -> None:
    assert parse_perf("12345,,instructions:u,1000,100.00,,\n") == 12345
    assert parse_perf("<not supported>,,instructions:u,0,100.00,,\n") is None
    assert parse_perf("perf: permission denied\n") is None


def test_callgrind_dump_is_read() -> None:
    assert parse_callgrind("version: 1\nevents: Ir\nsummary: 57148606\n") == 57148606
    assert parse_callgrind("nothing here") == 0


def test_what_idling_costs_in_the_same_time_is_taken_off() -> None:
    assert per_request(busy=1_000_000, busy_s=4.0, idle=100_000, idle_s=2.0, requests=100) == 8000.0


def test_too_few_requests_are_no_count() -> None:
    with pytest.raises(BenchError, match="only 7 requests"):
        per_request(busy=1_000_000, busy_s=4.0, idle=100_000, idle_s=2.0, requests=7)


def test_of_meshd_the_io_process_runs_under_callgrind_and_of_others_the_whole(tmp_path: Path) -> None:
    site = Site(tmp_path, 7000, 7003, ("http://127.0.0.1:7001",), "round_robin", None)
    other = FrontEnd("other", "", (), {}, lambda site: ["router", str(site.port)])
    assert under_callgrind(other, tmp_path).command(site)[0] == "valgrind"
    command = under_callgrind(FRONT_ENDS["meshd"], tmp_path).command(site)
    assert command[0] != "valgrind" and command[3:] == FRONT_ENDS["meshd"].command(site)[3:]
    compiled = under_callgrind(FRONT_ENDS["meshd-compiled"], tmp_path).command(site)
    plain = FRONT_ENDS["meshd-compiled"].command(site)
    assert compiled[:3] == plain[:3] and compiled[3] == "-c" and compiled[5:] == plain[5:]
    script = (tmp_path / "python").read_text()
    assert "meshd.io.process" in script and "valgrind --tool=callgrind" in script
