from __future__ import annotations

from meshd.supervisor.backoff import Backoff

SECOND = 1_000_000_000


def test_the_first_death_waits_for_nothing_and_quick_ones_double_up_to_ten_seconds():
    backoff = Backoff()
    delays = [backoff.after_death(SECOND) / SECOND for _ in range(10)]
    assert delays == [0, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10, 10]


def test_a_settled_life_clears_the_sheet():
    backoff = Backoff()
    for _ in range(5):
        backoff.after_death(SECOND)
    assert backoff.after_death(10 * SECOND) == 0
    assert backoff.after_death(SECOND) == SECOND // 10
