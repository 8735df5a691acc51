"""The grid, its state file, and what is left to measure."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bench import BenchError
from bench.cpu_sets import Cpus
from bench.front_ends import FRONT_ENDS
from bench.grid import (
    CLIENTS,
    FAIRNESS,
    GRIDS,
    PROXY,
    SIZES,
    SMALL_CLIENTS,
    WHOLE_PROMPTS,
    all_points,
    choose,
)
from bench.rounds import Round
from bench.state import Entry, State, differences, read
from bench.table import Plan, Progress, apart_args, rounds_by_point, takes_part, todo
from bench.table_command import estimate

POINTS = all_points(5.0)
ROUND = Round(
    front_end="meshd",
    workload="w",
    done=1,
    per_s=1.0,
    cpu_us=1.0,
    cpu_us_by_process={"io": 1.0},
    mean_us=1.0,
    p50_us=1.0,
    p99_us=1.0,
    max_us=1.0,
    core=1.0,
    strangers=0.0,
    load_core=0.5,
    backend_core=0.5,
    upstream_share=0.5,
    bottleneck="front end",
    faults=(),
    notes=("a note",),
)
CONDITIONS = {"seconds": 5.0, "cpu": "a Xeon"}


def plan(*names: str, rounds: int = 2) -> Plan:
    return Plan(
        points=POINTS,
        front_ends=[FRONT_ENDS[name] for name in names],
        rounds=rounds,
        cpus=Cpus((0,), (1,), (1,)),
        apart=Cpus((0, 1), (1,), (1,)),
        tokenizer=Path("tokenizer.json"),
    )


def test_grid_has_every_size_with_every_number_of_clients() -> None:
    names = {point.name for point in POINTS}
    assert len(names) == len(POINTS)
    assert {
        f"{kind}/{size}/{count}" for kind in ("proxy", "tokenize") for size in SIZES for count in CLIENTS
    } <= names
    assert {"proxy", "tokenize", "whole", "stream", "mixed", "fairness"} == {point.kind for point in POINTS}


def test_points_are_chosen_by_pattern_and_keep_their_order() -> None:
    assert [point.name for point in choose(POINTS, ["stream/*", "proxy/1k/16"])] == [
        "proxy/1k/16",
        "stream/16",
        "stream/64",
        "stream/256",
    ]
    quick = GRIDS["quick"].patterns
    assert len(choose(POINTS, quick)) == len(quick)


def test_small_grid_has_every_workload_every_size_and_a_spread_of_clients() -> None:
    found = choose(POINTS, GRIDS["small"].patterns)
    assert {point.kind for point in found} == {point.kind for point in POINTS}
    for kind in ("proxy", "tokenize"):
        mine = [point.workload for point in found if point.kind == kind]
        assert {work.body_bytes for work in mine} == set(SIZES.values())
        assert {work.clients for work in mine} == set(SMALL_CLIENTS) <= set(CLIENTS)
    assert GRIDS["full"].patterns == ("*",)


def test_estimate_of_the_small_grid_is_about_what_its_help_says(tmp_path: Path) -> None:
    small = GRIDS["small"]
    one = replace(
        plan(*FRONT_ENDS, rounds=small.rounds), points=choose(all_points(small.seconds), small.patterns)
    )
    text = estimate(one, State(tmp_path / "s.jsonl", CONDITIONS, {}))
    assert 20 <= int(text.split()[1]) <= 32 and "25 minutes" in small.what


def test_a_pattern_that_matches_nothing_is_refused() -> None:
    with pytest.raises(BenchError, match=r"no point is named proxy/2k"):
        choose(POINTS, ["stream/*", "proxy/2k/*"])


def test_floors_take_part_where_bodies_do_not_matter() -> None:
    assert takes_part(FRONT_ENDS["haproxy"], PROXY)
    assert not takes_part(FRONT_ENDS["haproxy"], WHOLE_PROMPTS)


def test_only_who_tokenizes_takes_part_in_whole_prompts() -> None:
    assert takes_part(FRONT_ENDS["fastapi"], WHOLE_PROMPTS)
    assert not takes_part(FRONT_ENDS["smg"], WHOLE_PROMPTS)


def test_fairness_keeps_io_and_preparation_on_different_cores() -> None:
    assert FAIRNESS.is_apart
    words = apart_args(Cpus((4, 6), (1,), (1,)), 2)
    assert words[words.index("--io-cpus") + 1] == "4" and words[words.index("--prepare-cpus") + 1] == "6"


def test_a_run_goes_on_where_the_last_one_stopped(tmp_path: Path) -> None:
    path, wanted = tmp_path / "deep" / "state.jsonl", plan("meshd", "fastapi")
    point = POINTS[0]
    state = State(path, CONDITIONS, {"cpu": "a Xeon"})
    everything = [("direct", 0), ("meshd", 0), ("fastapi", 0), ("fastapi", 1), ("meshd", 1)]
    assert todo(wanted, point, state) == everything
    for name, number in everything[:3]:
        state.add(Entry(point.name, name, number, replace(ROUND, front_end=name)))
    again = State(path, CONDITIONS, {"cpu": "ignored"})
    assert todo(wanted, point, again) == everything[3:]
    assert again.machine == {"cpu": "a Xeon"} and again.entries == state.entries
    assert todo(plan("meshd", "fastapi", rounds=3), point, again) == [
        ("fastapi", 1),
        ("meshd", 1),
        ("meshd", 2),
        ("fastapi", 2),
    ]


def test_a_front_end_that_was_absent_is_not_tried_again(tmp_path: Path) -> None:
    state = State(tmp_path / "state.jsonl", CONDITIONS, {})
    state.add(Entry(POINTS[0].name, "meshd", 0, None, "did not start"))
    assert ("meshd", 0) not in todo(plan("meshd"), POINTS[0], State(tmp_path / "state.jsonl", CONDITIONS, {}))
    assert rounds_by_point(state.entries) == {}


def test_other_conditions_must_not_add_to_a_state(tmp_path: Path) -> None:
    State(tmp_path / "state.jsonl", CONDITIONS, {})
    with pytest.raises(BenchError, match=r"other conditions \(seconds\); give --restart"):
        State(tmp_path / "state.jsonl", {**CONDITIONS, "seconds": 1.0}, {})


def test_conditions_that_are_new_or_gone_are_differences() -> None:
    assert differences({"a": 1, "b": 2}, {"b": 2, "c": 3}) == ["a", "c"]


def test_a_line_that_a_crash_left_unfinished_is_dropped_and_its_round_is_measured_again(
    tmp_path: Path,
) -> None:
    path = tmp_path / "state.jsonl"
    State(path, CONDITIONS, {}).add(Entry("proxy/1k/1", "meshd", 0, ROUND))
    whole = path.read_text()
    path.write_text(whole + '{"point": "proxy/1k/1", "front_e')
    state = State(path, CONDITIONS, {})
    assert (len(state.entries), path.read_text()) == (1, whole)
    state.add(Entry("proxy/1k/1", "meshd", 1, ROUND))
    assert [one.number for one in read(path).entries] == [0, 1]


def test_a_file_that_is_no_state_is_refused(tmp_path: Path) -> None:
    for text in ("", "[]\n", '{"machine": {}}\n', "no JSON\n"):
        (tmp_path / "x").write_text(text)
        with pytest.raises(BenchError, match="no state of"):
            read(tmp_path / "x")


def test_progress_guesses_the_time_left_from_the_rounds_so_far() -> None:
    lines: list[str] = []
    times = iter([0.0, 60.0, 90.0])
    progress = Progress(3, lines.append, clock=lambda: next(times))
    progress.step("a")
    progress.step("b")
    assert lines == ["[1/3, 2 min left] a", "[2/3, 1 min left] b"]
