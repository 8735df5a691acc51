"""One cell of the table: a front end at a point."""

from __future__ import annotations

from dataclasses import dataclass

from bench.grid import Point
from bench.summary import Row


@dataclass(frozen=True, slots=True)
class Cell:
    """The medians of one front end at one point."""

    point: Point
    row: Row
