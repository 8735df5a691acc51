"""The goals of bench/goals.toml: what each asks, and from samples whether it is reached; pure."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

from bench import BenchError
from bench.grid import SIZES
from bench.rounds import DIRECT, Round
from bench.workload import shown_size

GOALS: Final = Path(__file__).parent / "goals.toml"
OWN: Final = "own"  # the front end that is judged, at another point
CPU, ADDED_P50, IDLE, START = "cpu", "added_p50_us", "idle_kib", "start_s"
UNITS: Final = {CPU: "×", ADDED_P50: "µs", IDLE: "KiB", START: "s"}
P50: Final = "p50"

Samples = Mapping[tuple[str, str, str], Sequence[float | None]]
"""(figure, point, front end) → one value a round, None where the round was invalid. Figures: `CPU` and `P50`
(microseconds) of a point; `IDLE` and `START` with the point ""."""


@dataclass(frozen=True, slots=True)
class Goal:
    """One line of the table; the fields are those of the file, which explains them."""

    name: str
    what: str
    measure: str
    at_most: float
    point: str = ""
    over: tuple[str, ...] = ()
    over_point: str = ""

    @property
    def is_own(self) -> bool:
        """Whether a front end is compared with itself."""
        return OWN in self.over

    @property
    def asked(self) -> str:
        return f"≤ {self.at_most:g} {UNITS[self.measure]}"

    def needs(self, ours: str) -> list[tuple[str, str]]:
        """(point, front end) pairs whose rounds it is judged by; none for what is not measured in rounds."""
        if self.measure == ADDED_P50:
            return [(self.point, DIRECT), (self.point, ours)]
        others = [(self.over_point, ours if other == OWN else other) for other in self.over]
        return [*others, (self.point, ours)] if self.measure == CPU else []


@dataclass(frozen=True, slots=True)
class Verdict:
    """``reached`` None: not measured, for the reason ``why``. ``low``, ``high``: of single rounds.

    ``over``: the thriftiest of those compared with.
    """

    goal: Goal
    of: str
    reached: float | None
    low: float = 0.0
    high: float = 0.0
    over: str = ""
    why: str = ""

    @property
    def is_reached(self) -> bool:
        return self.reached is not None and self.reached <= self.goal.at_most

    @property
    def word(self) -> str:
        if self.reached is None:
            return "not measured"
        return "reached" if self.is_reached else "missed"

    @property
    def shown(self) -> str:
        """The value with the range of single rounds, in the goal's unit."""
        if self.reached is None:
            return "–"
        low, value, high = (_three_digits(one) for one in (self.low, self.reached, self.high))
        return f"{value} {UNITS[self.goal.measure]}" + (f" ({low}–{high})" if low != high else "")


def read_goals(path: Path = GOALS) -> list[Goal]:
    """All goals, those of several sizes one for each; raises `BenchError` when the file is none."""
    try:
        found = [goal for row in tomllib.loads(path.read_text())["goal"] for goal in _goals_of(row)]
    except (OSError, KeyError, TypeError, tomllib.TOMLDecodeError) as error:
        raise BenchError(f"{path} holds no goals: {error}") from error
    if strange := [goal.name for goal in found if goal.measure not in UNITS]:
        raise BenchError(f"{path}: {', '.join(strange)} measures what nobody can")
    return found


def choose_goals(goals: Sequence[Goal], names: Sequence[str]) -> list[Goal]:
    """Those whose name begins with one of ``names``; all, if none is given."""
    if unknown := [name for name in names if not any(goal.name.startswith(name) for goal in goals)]:
        known = ", ".join(dict.fromkeys(goal.name for goal in goals))
        raise BenchError(f"no goal is named {', '.join(unknown)}; there are {known}")
    return [goal for goal in goals if not names or any(goal.name.startswith(name) for name in names)]


def samples_of(rounds: Mapping[str, Sequence[Round]]) -> dict[tuple[str, str, str], list[float | None]]:
    """CPU and p50 of rounds by point."""
    found: dict[tuple[str, str, str], list[float | None]] = {}
    for point, here in rounds.items():
        for one in here:
            for figure, value in ((CPU, one.cpu_us), (P50, one.p50_us)):
                found.setdefault((figure, point, one.front_end), []).append(value if one.is_valid else None)
    return found


def judge_goal(goal: Goal, ours: str, samples: Samples, why: str = "") -> Verdict:
    """The verdict on one front end of ours. ``why``: what is known of why samples are missing."""
    if goal.measure == CPU:
        return _judge_cpu(goal, ours, samples, why)
    if goal.measure == ADDED_P50:
        mine, direct = (samples.get((P50, goal.point, name), ()) for name in (ours, DIRECT))
        values = [one - median(valid(direct)) for one in valid(mine)] if valid(direct) else []
    else:
        values = valid(samples.get((goal.measure, "", ours), ()))
    if not values:
        return Verdict(goal, ours, None, why=why or "no valid round")
    return Verdict(goal, ours, median(values), min(values), max(values))


def _judge_cpu(goal: Goal, ours: str, samples: Samples, why: str) -> Verdict:
    mine = samples.get((CPU, goal.point, ours), ())
    others = {
        name: samples.get((CPU, goal.over_point, ours if name == OWN else name), ()) for name in goal.over
    }
    measured = {name: median(valid(values)) for name, values in others.items() if valid(values)}
    if not valid(mine) or not measured:
        lacking = ours if not valid(mine) else " or ".join(goal.over)
        return Verdict(goal, ours, None, why=why or f"no valid round of {lacking}")
    best = min(measured, key=lambda name: measured[name])
    pairs = zip(mine, others[best], strict=False)
    ratios = [one / other for one, other in pairs if one is not None and other]
    reached = median(valid(mine)) / measured[best]
    return Verdict(goal, ours, reached, min(ratios, default=reached), max(ratios, default=reached), best)


def table_of_goals(verdicts: Sequence[Verdict]) -> str:
    """Markdown: a line a goal, two columns for each front end of ours, and whom it was compared with."""
    ours = list(dict.fromkeys(verdict.of for verdict in verdicts))
    by_goal: dict[str, list[Verdict]] = {}
    for verdict in verdicts:
        by_goal.setdefault(verdict.goal.name, []).append(verdict)
    head = ["goal", "asked", *(text for name in ours for text in (f"{name} reached", "verdict")), "notes"]
    lines = [head, ["---"] * len(head)]
    for group in by_goal.values():
        found = {verdict.of: verdict for verdict in group}
        cells = [found.get(name) for name in ours]
        shown = [text for one in cells for text in ((one.shown, one.word) if one else ("–", "–"))]
        lines.append([group[0].goal.what, group[0].goal.asked, *shown, _notes(group)])
    return "\n".join("| " + " | ".join(text.replace("|", "/") for text in line) + " |" for line in lines)


def valid(values: Sequence[float | None]) -> list[float]:
    """Without the invalid rounds."""
    return [value for value in values if value is not None]


def _notes(group: Sequence[Verdict]) -> str:
    """Each reason and each best rival once."""
    found = [f"{verdict.of}: {verdict.why}" for verdict in group if verdict.why]
    rivals = {verdict.over for verdict in group if verdict.over} - {OWN}
    if len(group[0].goal.over) > 1 and rivals:
        found.insert(0, f"best: {', '.join(sorted(rivals))}")
    return "; ".join(found)


def _three_digits(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _goals_of(row: Mapping[str, Any]) -> list[Goal]:
    kept = {name: value for name, value in row.items() if name != "sizes"}
    kept["over"] = tuple(kept.get("over", ()))
    kept.setdefault("over_point", kept.get("point", ""))
    if "sizes" not in row:
        return [Goal(**kept)]
    return [
        Goal(**{**kept, "name": f"{kept['name']}-{size}", **_with_size(kept, size)}) for size in row["sizes"]
    ]


def _with_size(row: Mapping[str, Any], size: str) -> dict[str, str]:
    points = {name: row[name].replace("{size}", size) for name in ("point", "over_point")}
    return {**points, "what": row["what"].replace("{size}", shown_size(SIZES[size]))}
