"""When a dead child may be started again."""

from __future__ import annotations

from typing import Final

_SECOND: Final = 1_000_000_000
_FIRST_NS: Final = _SECOND // 10
_LONGEST_NS: Final = 10 * _SECOND
_SETTLED_NS: Final = 10 * _SECOND  # a child that lived this long starts with a clean sheet


class Backoff:
    """The delays of one seat: none after a settled life, else 0.1 s doubling to 10 s.

    The very first death restarts at once too, so that a single crash costs its clients only the start.
    """

    def __init__(self) -> None:
        self._next_ns = 0

    def after_death(self, lived_ns: int) -> int:
        """Return how long to wait after a child died that had lived for ``lived_ns``."""
        delay = 0 if lived_ns >= _SETTLED_NS else self._next_ns
        self._next_ns = min(_LONGEST_NS, max(_FIRST_NS, delay * 2))
        return delay
