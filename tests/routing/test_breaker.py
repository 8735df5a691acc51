from __future__ import annotations

from meshd.routing.breaker import Breaker, BreakerRules

NEVER = 0.0


def fail(breaker: Breaker, *ends_s: float, last_success_s: float = NEVER) -> None:
    for end_s in ends_s:
        breaker.fail(began_s=end_s - 0.1, ended_s=end_s, last_success_s=last_success_s, now_s=end_s)


def opened(at_s: float = 1003.0) -> Breaker:
    breaker = Breaker(BreakerRules(failure_threshold=3))
    fail(breaker, at_s - 2, at_s - 1, at_s)
    assert breaker.state == "open"
    return breaker


def test_ten_failures_in_a_row_open_and_nine_do_not() -> None:
    breaker = Breaker(BreakerRules())
    fail(breaker, *range(1001, 1010))
    assert (breaker.state, breaker.failures) == ("closed", 9)
    fail(breaker, 1010)
    assert (breaker.state, breaker.opened_s, breaker.ends_s) == ("open", 1010, 1070)


def test_success_starts_the_run_again_even_if_it_is_learnt_only_with_the_next_failure() -> None:
    breaker = Breaker(BreakerRules(failure_threshold=3))
    fail(breaker, 1001, 1002)
    fail(breaker, 1004, 1005, last_success_s=1003)
    assert (breaker.state, breaker.failures) == ("closed", 2)
    breaker.note_success(1006)
    assert breaker.failures == 0


def test_failure_that_a_success_has_outlived_does_not_count() -> None:
    breaker = Breaker(BreakerRules(failure_threshold=3))
    fail(breaker, 1001, 1002, 1003, 1004, last_success_s=1005)
    assert (breaker.state, breaker.failures) == ("closed", 0)
    fail(breaker, 1006, last_success_s=1005)
    assert breaker.failures == 1


def test_gap_longer_than_the_window_starts_the_run_again() -> None:
    breaker = Breaker(BreakerRules(failure_threshold=3))
    fail(breaker, 1000, 1120)
    assert breaker.failures == 2
    fail(breaker, 1240.5)
    assert (breaker.state, breaker.failures) == ("closed", 1)


def test_open_admits_trials_when_its_time_has_passed() -> None:
    breaker = opened()
    breaker.tick(1062.9)
    assert breaker.state == "open"
    breaker.tick(1063.0)
    assert breaker.state == "half_open"


def test_three_successful_trials_close_and_the_run_is_gone() -> None:
    breaker = opened()
    breaker.tick(1063)
    for _ in range(2):
        breaker.end_trial(True, 1064)
    assert (breaker.state, breaker.successes) == ("half_open", 2)
    breaker.end_trial(True, 1065)
    assert (breaker.state, breaker.failures, breaker.successes) == ("closed", 0, 0)


def test_one_failed_trial_opens_for_a_whole_time_again() -> None:
    breaker = opened()
    breaker.tick(1063)
    breaker.end_trial(True, 1064)
    breaker.end_trial(False, 1065)
    assert (breaker.state, breaker.successes, breaker.ends_s) == ("open", 0, 1125)


def test_outcome_of_a_request_from_before_the_opening_changes_nothing() -> None:
    breaker = opened(1003)
    breaker.fail(began_s=1002.5, ended_s=1064, last_success_s=NEVER, now_s=1064)
    assert breaker.state == "open"
    breaker.tick(1063)
    breaker.fail(began_s=1002.5, ended_s=1064, last_success_s=NEVER, now_s=1064)
    assert breaker.state == "half_open"
    for _ in range(3):
        breaker.end_trial(True, 1065)
    breaker.fail(began_s=1002.5, ended_s=1066, last_success_s=NEVER, now_s=1066)
    assert (breaker.state, breaker.failures) == ("closed", 0)
    breaker.fail(began_s=1065.5, ended_s=1066, last_success_s=NEVER, now_s=1066)
    assert breaker.failures == 1


def test_trial_that_ends_outside_half_open_changes_nothing() -> None:
    for breaker in (Breaker(BreakerRules()), opened()):
        before = breaker.state
        breaker.end_trial(False, 1004)
        breaker.end_trial(True, 1004)
        assert (breaker.state, breaker.successes) == (before, 0)


def test_disabled_breaker_counts_and_never_opens() -> None:
    breaker = Breaker(BreakerRules(failure_threshold=3, is_disabled=True))
    fail(breaker, *range(1000, 1100))
    assert (breaker.state, breaker.failures) == ("closed", 100)
