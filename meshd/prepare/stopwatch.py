"""Time of the stages of one prepare job, one after the other; what a refused job spent is told too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

JSON_PARSE: Final = 0
VIEW: Final = 1
TEMPLATE: Final = 2
ENCODE: Final = 3
DECODE: Final = 4
STAGES: Final = ("json_parse", "view", "template", "encode", "decode")
"""Names of the stages, each at the number above; those that every view goes through come first."""


class Stopped(Exception):
    """The job was told to stop between two stages; its result would be dropped."""


class StageTimes:
    """Nanoseconds that a prepare job spent in each stage; 0 for a stage that did not run."""

    __slots__ = ("decode", "encode", "json_parse", "template", "view")

    def __init__(
        self, json_parse: int = 0, view: int = 0, template: int = 0, encode: int = 0, decode: int = 0
    ) -> None:
        self.json_parse = json_parse
        self.view = view
        self.template = template
        self.encode = encode
        self.decode = decode

    def all(self) -> tuple[int, int, int, int, int]:
        """Return the times by the numbers of their stages."""
        return self.json_parse, self.view, self.template, self.encode, self.decode

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StageTimes) and self.all() == other.all()

    def __repr__(self) -> str:
        return f"StageTimes{self.all()}"


class Stopwatch:
    """One stage runs at any time; ``clock``: monotonic nanoseconds.

    ``times``: of the job that began last, always the same object.
    """

    __slots__ = ("_clock", "_since", "_stage", "times")

    def __init__(self, clock: Callable[[], int]) -> None:
        self._clock = clock
        self._since = 0
        self._stage = JSON_PARSE
        self.times = StageTimes()

    def start(self) -> None:
        """Begin a job with the stage that every job begins with."""
        times = self.times
        times.json_parse = times.view = times.template = times.encode = times.decode = 0
        self._stage = JSON_PARSE
        self._since = self._clock()

    def enter(self, stage: int) -> None:
        """End the stage that runs and begin another; each may come several times."""
        now = self._clock()
        spent = now - self._since
        ended = self._stage
        self._since = now
        self._stage = stage
        times = self.times
        if ended == JSON_PARSE:
            times.json_parse += spent
        elif ended == VIEW:
            times.view += spent
        elif ended == TEMPLATE:
            times.template += spent
        elif ended == ENCODE:
            times.encode += spent
        else:
            times.decode += spent

    def stop(self) -> StageTimes:
        """End the job, in whatever stage it is."""
        self.enter(self._stage)
        return self.times

    def __repr__(self) -> str:
        return f"Stopwatch({self.times}, stage={STAGES[self._stage]})"
