from __future__ import annotations

from datetime import UTC, datetime

import pytest

from meshd.routing.retry_rules import RetryRules, retry_after_s

NOW = datetime(1994, 11, 6, 8, 49, 37, tzinfo=UTC).timestamp()


def test_statuses_that_are_asked_for_again() -> None:
    found = {status for status in range(100, 600) if RetryRules().is_retried(status)}
    assert found == {408, 429, 502, 503, 504}
    assert RetryRules(retries_500=True).is_retried(500)
    assert not RetryRules(retries_500=True).is_retried(501)


def test_delays_grow_by_the_multiplier_up_to_the_longest() -> None:
    rules = RetryRules()
    assert [rules.delay_s(retry, lambda: 0.5) for retry in (1, 2, 3, 4)] == pytest.approx(
        [0.05, 0.075, 0.1125, 0.16875]
    )
    assert rules.delay_s(99, lambda: 0.5) == 30.0
    assert RetryRules(multiplier=1000).delay_s(10_000, lambda: 0.5) == 30.0


def test_jitter_is_a_share_of_the_delay_either_way() -> None:
    rules = RetryRules(jitter=0.2)
    assert rules.delay_s(1, lambda: 0.0) == pytest.approx(0.04)
    assert rules.delay_s(1, lambda: 1.0) == pytest.approx(0.06)
    assert rules.delay_s(99, lambda: 1.0) == pytest.approx(36.0)
    assert RetryRules(jitter=0).delay_s(1, lambda: 0.9) == 0.05


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (None, None),
        (b"7", 7),
        (b" 0 ", 0),
        (b"00000000000000000007", 7),
        (b"120", 120),
        (b"301", 300),
        (b"9" * 400, 300),
        (b"Sun, 06 Nov 1994 08:49:47 GMT", 10),
        (b"Sunday, 06-Nov-94 08:49:47 GMT", 10),
        (b"Sun Nov  6 08:49:47 1994", 10),
        (b"Sun, 06 Nov 1994 08:00:00 GMT", 0),
        (b"Sun, 06 Nov 2094 08:00:00 GMT", 300),
        (b"", None),
        (b"-1", None),
        (b"1.5", None),
        (b"soon", None),
        (b"\xff", None),
        (b"Sun, 99 Nov 1994 08:49:47 GMT", None),
        (b"Sun, 06 Nov 99999999999 08:49:47 GMT", None),
        (b"06 Nov 99999999999999999999 00:00:00099999999999999999999", None),
    ],
)
def test_advice_of_an_upstream_is_seconds_or_a_date_or_absent(
    value: bytes | None, seconds: float | None
) -> None:
    assert retry_after_s(value, lambda: NOW) == seconds
