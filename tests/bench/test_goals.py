"""What goals ask, and verdicts on them; pure."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bench import BenchError
from bench.commands import make_parser
from bench.environment import crowding_of
from bench.front_ends import FRONT_ENDS
from bench.goal_rounds import Measured, seconds_of, sessions_of
from bench.goals import (
    ADDED_P50,
    CPU,
    IDLE,
    P50,
    START,
    Goal,
    choose_goals,
    judge_goal,
    read_goals,
    samples_of,
    table_of_goals,
)
from bench.goals_command import why_absent
from bench.goals_text import figures_of
from bench.grid import all_points
from bench.rounds import DIRECT, Round

RATIO = Goal("rust", "proxy ÷ best", CPU, 0.6, "proxy/1k/16", ("smg", "vllm-router"), "proxy/1k/16")
TOKENIZE = Goal("tok", "tokenize ÷ proxy", CPU, 1.6, "tokenize/1k/16", ("own",), "proxy/1k/16")
ONE = Goal("one", "one client", ADDED_P50, 150.0, "proxy/1k/1", (), "proxy/1k/1")
ROUND = Round(
    front_end="meshd",
    workload="w",
    done=1,
    per_s=1.0,
    cpu_us=80.0,
    cpu_us_by_process={},
    mean_us=1.0,
    p50_us=300.0,
    p99_us=1.0,
    max_us=1.0,
    core=1.0,
    strangers=0.0,
    load_core=0.5,
    backend_core=0.5,
    upstream_share=0.5,
    bottleneck="front end",
    faults=(),
    notes=(),
)
EVERYONE = list(FRONT_ENDS)


def test_the_goals_of_the_project_name_points_and_front_ends_that_exist() -> None:
    goals = read_goals()
    known = {point.name for point in all_points(1.0)}
    for goal in goals:
        assert {point for point, _ in goal.needs("meshd")} <= known
        assert {name for _, name in goal.needs("meshd")} <= {DIRECT, *FRONT_ENDS}
    assert {goal.measure for goal in goals} == {CPU, ADDED_P50, IDLE, START}
    assert len({goal.name for goal in goals}) == len(goals) == 16


def test_a_goal_of_several_sizes_is_one_for_each() -> None:
    (found,) = choose_goals(read_goals(), ["tokenize-128k"])
    assert found.needs("meshd") == [("proxy/128k/16", "meshd"), ("tokenize/128k/16", "meshd")]
    assert "128 KiB" in found.what


def test_goals_are_chosen_by_how_their_names_begin() -> None:
    assert {goal.measure for goal in choose_goals(read_goals(), ["start", "idle"])} == {START, IDLE}
    assert len(choose_goals(read_goals(), ["proxy-1k"])) == 3
    assert choose_goals(read_goals(), []) == read_goals()
    with pytest.raises(BenchError, match=r"no goal is named proxxy; there are proxy-1k-fastapi"):
        choose_goals(read_goals(), ["proxxy"])


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no TOML",
        "[[goal]]\nname = 'x'",
        "[[goal]]\nname = 'x'\nwhat = 'x'\nmeasure = 'beauty'\nat_most = 1.0",
    ],
)
def test_goals_without_sense_are_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "goals.toml").write_text(text)
    with pytest.raises(BenchError, match="goals"):
        read_goals(tmp_path / "goals.toml")


Values = dict[tuple[str, str, str], list[float | None]]


def cpu(**values: list[float | None]) -> Values:
    return {(CPU, "proxy/1k/16", name.replace("_", "-")): found for name, found in values.items()}


def test_ratio_is_of_medians_to_the_thriftiest_other() -> None:
    samples = cpu(meshd=[50.0, 60.0, 90.0], smg=[200.0, 150.0, 300.0], vllm_router=[100.0, 110.0, 120.0])
    found = judge_goal(RATIO, "meshd", samples)
    assert (found.reached, found.over) == (pytest.approx(60 / 110), "vllm-router")
    assert (found.low, found.high) == pytest.approx((0.5, 0.75))
    assert (found.is_reached, found.word, found.shown) == (True, "reached", "0.545 × (0.5–0.75)")


def test_a_ratio_above_the_goal_is_missed_and_one_at_the_goal_is_not() -> None:
    at = cpu(meshd=[60.0], smg=[100.0])
    above = cpu(meshd=[61.0], smg=[100.0])
    assert [judge_goal(RATIO, "meshd", found).word for found in (at, above)] == ["reached", "missed"]


def test_invalid_rounds_count_for_nothing() -> None:
    samples = cpu(meshd=[None, 50.0], smg=[100.0, 200.0])
    found = judge_goal(RATIO, "meshd", samples)
    assert (found.reached, found.low) == (pytest.approx(50 / 150), pytest.approx(0.25))


@pytest.mark.parametrize("samples", [{}, cpu(meshd=[50.0]), cpu(smg=[50.0]), cpu(meshd=[None], smg=[1.0])])
def test_what_was_not_measured_is_not_reached(samples: Values) -> None:
    found = judge_goal(RATIO, "meshd", samples)
    assert (found.is_reached, found.word, found.shown) == (False, "not measured", "–")
    assert "no valid round" in found.why
    assert judge_goal(RATIO, "meshd", samples, "smg is not there").why == "smg is not there"


def test_own_is_the_judged_front_end_at_the_other_point() -> None:
    samples = {
        (CPU, "tokenize/1k/16", "meshd"): [150.0],
        (CPU, "proxy/1k/16", "meshd"): [100.0],
        (CPU, "proxy/1k/16", "meshd-compiled"): [1.0],
    }
    assert judge_goal(TOKENIZE, "meshd", samples).reached == pytest.approx(1.5)


def test_added_p50_is_over_the_median_of_the_direct_way() -> None:
    samples = {
        (P50, "proxy/1k/1", DIRECT): [50.0, 60.0, 40.0],
        (P50, "proxy/1k/1", "meshd"): [190.0, 250.0, 180.0],
    }
    found = judge_goal(ONE, "meshd", samples)
    assert (found.reached, found.low, found.high, found.is_reached) == (140.0, 130.0, 200.0, True)
    assert found.shown == "140 µs (130–200)"


def test_memory_and_start_are_medians_of_their_own() -> None:
    start = Goal("start", "start", START, 2.0)
    assert judge_goal(start, "meshd", {(START, "", "meshd"): [1.5, 2.5, 1.6]}).reached == 1.6
    idle = Goal("idle", "idle", IDLE, 10.0)
    assert judge_goal(idle, "meshd", {(IDLE, "", "meshd"): [1.4]}).shown == "1.4 KiB"


def test_samples_of_rounds_keep_the_place_of_an_invalid_one() -> None:
    rounds = {"proxy/1k/16": [ROUND, replace(ROUND, faults=("3 read errors",)), replace(ROUND, cpu_us=90.0)]}
    found = samples_of(rounds)
    assert found[CPU, "proxy/1k/16", "meshd"] == [80.0, None, 90.0]
    assert found[P50, "proxy/1k/16", "meshd"] == [300.0, None, 300.0]


def test_table_shows_both_of_ours_beside_what_was_asked() -> None:
    samples = cpu(meshd=[70.0], meshd_compiled=[40.0], smg=[100.0])
    text = table_of_goals([judge_goal(RATIO, name, samples) for name in ("meshd", "meshd-compiled")])
    assert text.splitlines()[0].startswith(
        "| goal | asked | meshd reached | verdict | meshd-compiled reached |"
    )
    line = text.splitlines()[2]
    assert "≤ 0.6 ×" in line and "0.7 × | missed | 0.4 × | reached" in line and "best: smg" in line
    assert len({line.count("|") for line in text.splitlines()}) == 1


def test_turns_are_only_what_the_goals_need_and_alternate_by_workload() -> None:
    goals = read_goals()
    sessions = sessions_of(goals, ["meshd"], EVERYONE, 3.0)
    others, own = sessions[False], sessions[True]
    names = {block[0].point.name: [turn.front_end for turn in block] for block in others}
    assert names["proxy/1k/1"] == [DIRECT, "meshd"]
    assert names["proxy/128k/16"] == ["meshd", "haproxy"]
    assert names["proxy/1k/16"] == ["meshd", "fastapi", "vllm-router", "smg", "sglang-router", "haproxy"]
    assert {turn.point.kind for block in own for turn in block} == {"proxy", "tokenize"}
    assert [len(block) for block in own] == [2] * 6


def test_what_is_not_there_gets_no_turn_and_what_is_not_asked_no_session() -> None:
    goals = choose_goals(read_goals(), ["proxy-1k-rust"])
    (block,) = sessions_of(goals, ["meshd"], ["meshd", "smg"], 3.0)[False]
    assert [turn.front_end for turn in block] == ["meshd", "smg"]
    assert sessions_of(choose_goals(read_goals(), ["start", "idle"]), ["meshd"], EVERYONE, 3.0) == {}


def test_all_goals_of_both_builds_take_at_most_twelve_minutes_of_rounds() -> None:
    args = make_parser().parse_args(["goals"])
    sessions = sessions_of(read_goals(), args.front_ends, EVERYONE, args.seconds)
    assert seconds_of(sessions.values(), args.rounds, args.seconds) < 12 * 60


def test_reason_names_what_is_absent() -> None:
    reasons = {"smg": "smg is not there", "vllm-router": "vllm-router is not there"}
    assert why_absent(RATIO, "meshd", reasons) == "smg is not there; vllm-router is not there"
    assert why_absent(RATIO, "meshd", {"smg": "smg is not there"}) == ""
    assert why_absent(TOKENIZE, "meshd", {"meshd": "it does not start"}) == "it does not start"


def test_figures_are_shown_with_their_range_and_crowding_is_told() -> None:
    rounds = [ROUND, replace(ROUND, cpu_us=90.0, strangers=0.4)]
    found = Measured(rounds={"proxy/1k/16": rounds})
    assert "| 85.0 | 80.0–90.0 | 0.300 |" in figures_of(found)
    (told,) = crowding_of(rounds)
    assert "1 of 2 rounds" in told and "40%" in told
    assert crowding_of([ROUND]) == []
