"""When probes turn an origin healthy or unhealthy, and when the next one is due."""

from __future__ import annotations

import random

from meshd.controller.health import HealthJudge, ProbeRules

RULES = ProbeRules(interval_s=60.0, failure_threshold=3, success_threshold=2)


def play(judge: HealthJudge, results: str) -> str:
    """Feed probes (+ success, - failure) and return health after each (H healthy, u unhealthy)."""
    states = ""
    for result in results:
        was = judge.is_healthy
        assert judge.record(result == "+") == (judge.is_healthy != was)
        states += "H" if judge.is_healthy else "u"
    return states


def test_first_success_ever_is_enough() -> None:
    assert play(HealthJudge(RULES), "----+") == "uuuuH"


def test_one_or_two_failures_do_not_eject_and_three_do() -> None:
    assert play(HealthJudge(RULES), "+--+--+---") == "HHHHHHHHHu"


def test_two_successes_bring_back_and_a_failure_between_starts_again() -> None:
    assert play(HealthJudge(RULES), "+---+-++") == "HHHuuuuH"


def test_published_health_of_a_former_controller_is_the_starting_point() -> None:
    assert play(HealthJudge(RULES, is_healthy=True, has_answered=True), "--+") == "HHH"
    assert play(HealthJudge(RULES, is_healthy=False, has_answered=True), "++") == "uH"


def test_origin_that_never_answered_is_probed_each_second_until_the_start_limit() -> None:
    judge = HealthJudge(RULES)
    judge.record(False)
    assert judge.next_delay_s(1800.0 - 1, random.Random(1)) == 1.0
    assert judge.next_delay_s(1800.0, random.Random(1)) >= 54.0


def test_interval_has_ten_percent_jitter_to_both_sides() -> None:
    judge = HealthJudge(RULES)
    judge.record(True)
    rng = random.Random(7)
    delays = [judge.next_delay_s(0.0, rng) for _ in range(500)]
    assert 54.0 <= min(delays) < 55.0
    assert 65.0 < max(delays) <= 66.0


def test_failing_probe_beside_successful_traffic_counts_as_a_success() -> None:
    judge = HealthJudge(ProbeRules(60.0, 2, 2), is_healthy=True, has_answered=True)
    judge.record(False)
    judge.record(False, has_traffic=True)
    assert judge.is_healthy
    judge.record(False)
    assert judge.is_healthy
    judge.record(False)
    assert not judge.is_healthy
    judge.record(False, has_traffic=True)
    judge.record(False, has_traffic=True)
    assert judge.is_healthy


def test_traffic_is_no_first_answer() -> None:
    judge = HealthJudge(ProbeRules(60.0, 2, 2))
    judge.record(False, has_traffic=True)
    assert (judge.is_healthy, judge.has_answered) == (False, False)
