"""The budget: which ratios must hold, and whether they do; pure."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench import BenchError

Figures = Mapping[tuple[str, str, str], float]
"""(figure, point, front end) → its value."""


ROOM: Final = {"instructions": 1.15, "cpu": 1.4}  # how far above what was measured a limit should lie


@dataclass(frozen=True, slots=True)
class Limit:
    """``of``'s figure at the point ÷ ``over``'s must be no more than ``at_most``. ``counter``: "": any."""

    name: str
    figure: str
    point: str
    of: str
    over: str
    at_most: float
    counter: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """``ratio`` None: it could not be measured, which breaks the budget too: silence is no proof."""

    limit: Limit
    ratio: float | None

    @property
    def is_broken(self) -> bool:
        return self.ratio is None or self.ratio > self.limit.at_most

    @property
    def suggested(self) -> str:
        """A limit with room for this figure's noise; "–" when nothing was measured."""
        return "–" if self.ratio is None else f"{self.ratio * ROOM[self.limit.figure]:.2f}"

    def __str__(self) -> str:
        shown = "not measured" if self.ratio is None else f"{self.ratio:.3f}"
        word = "BROKEN" if self.is_broken else "kept  "
        return f"{word} {self.limit.name}: {shown}, at most {self.limit.at_most}"


def read_budget(path: Path) -> list[Limit]:
    """Raises `BenchError` when the file cannot be read or has no limit."""
    try:
        limits = [Limit(**row) for row in tomllib.loads(path.read_text())["budget"]]
    except (OSError, KeyError, TypeError, tomllib.TOMLDecodeError) as error:
        raise BenchError(f"{path} is no budget: {error}") from error
    if not limits:
        raise BenchError(f"{path} holds no limit")
    return limits


def in_force(limits: Sequence[Limit], counter: str) -> list[Limit]:
    """The limits that apply where instructions are counted by ``counter`` ("": not at all)."""
    return [
        limit
        for limit in limits
        if limit.figure != "instructions" or (counter and limit.counter in ("", counter))
    ]


def judge(limits: Sequence[Limit], figures: Figures) -> list[Verdict]:
    """One verdict a limit."""
    return [Verdict(limit, _ratio(limit, figures)) for limit in limits]


def _ratio(limit: Limit, figures: Figures) -> float | None:
    mine = figures.get((limit.figure, limit.point, limit.of), 0.0)
    other = figures.get((limit.figure, limit.point, limit.over), 0.0)
    return mine / other if mine > 0 and other > 0 else None
