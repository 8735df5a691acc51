"""Time of the stages of one prepare job, one after the other; what a refused job spent is told too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from meshd.api.view import StageTimes

# Stages by their place in ``StageTimes``; each a constant, which a compiled build need not look up.
JSON_PARSE: Final = 0
TEMPLATE: Final = 1
ENCODE: Final = 2
VIEW: Final = 3
DECODE: Final = 4


class Stopped(Exception):
    """The job was told to stop between two stages; its result would be dropped."""


class Stopwatch:
    """One stage runs at any time; ``clock``: monotonic nanoseconds."""

    __slots__ = ("_clock", "_ns", "_since", "_stage")

    def __init__(self, clock: Callable[[], int]) -> None:
        self._clock = clock
        self._ns = [0, 0, 0, 0, 0]
        self._since = 0
        self._stage = JSON_PARSE

    def start(self) -> None:
        """Begin a job with the stage that every job begins with."""
        self._ns = [0, 0, 0, 0, 0]
        self._stage = JSON_PARSE
        self._since = self._clock()

    def enter(self, stage: int) -> None:
        """End the stage that runs and begin another; each may come several times."""
        now = self._clock()
        self._ns[self._stage] += now - self._since
        self._since = now
        self._stage = stage

    def stop(self) -> StageTimes:
        """End the job, in whatever stage it is."""
        self.enter(self._stage)
        return StageTimes(*self._ns)

    def __repr__(self) -> str:
        return f"Stopwatch({StageTimes(*self._ns)}, stage={StageTimes._fields[self._stage]})"
