"""Which answers are asked for again, after what delay, and what an upstream's `retry-after` says. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC
from email.utils import parsedate_to_datetime
from typing import Final

MAX_COOLDOWN_S: Final = 300.0
DERANK_S: Final = 1.0
BUSY: Final = frozenset((429, 503))
"""Answers by which an upstream says that it has too much to do: no failures."""
FAILURES: Final = frozenset((500, 502, 504))
_RETRIED: Final = frozenset((408, 429, 502, 503, 504))


@dataclass(frozen=True, slots=True)
class RetryRules:
    """``max_attempts``: in all, the first included. ``jitter``: the delay may differ by that share of it."""

    max_attempts: int = 5
    initial_s: float = 0.05
    max_s: float = 30.0
    multiplier: float = 1.5
    jitter: float = 0.2
    retries_500: bool = False

    def is_retried(self, status: int) -> bool:
        """Say whether an answer with ``status`` is asked for again."""
        return status in _RETRIED or (status == 500 and self.retries_500)

    def delay_s(self, retry: int, uniform: Callable[[], float]) -> float:
        """Return the delay before retry number ``retry``, from 1; ``uniform`` draws from [0, 1)."""
        try:
            plain_s = self.initial_s * self.multiplier ** (retry - 1)
        except OverflowError:
            plain_s = self.max_s
        return min(plain_s, self.max_s) * (1.0 + self.jitter * (2.0 * uniform() - 1.0))


def retry_after_s(value: bytes | None, wall_clock: Callable[[], float]) -> float | None:
    """Return for how many seconds ``value`` asks to stay away, at most ``MAX_COOLDOWN_S``.

    ``value``: a field of RFC 9110 §10.2.3, seconds or a date. None if it is absent or cannot be read. A
    date that has passed is 0.
    """
    if value is None:
        return None
    text = value.strip()
    if text.isdigit():
        return min(float(text), MAX_COOLDOWN_S)
    try:
        date = parsedate_to_datetime(text.decode("ascii"))
    except (ValueError, TypeError, OverflowError):  # the last: a year or an hour of twenty digits
        return None
    if date.tzinfo is None:  # the two old forms of a date name no zone
        date = date.replace(tzinfo=UTC)
    return min(max(0.0, date.timestamp() - wall_clock()), MAX_COOLDOWN_S)
