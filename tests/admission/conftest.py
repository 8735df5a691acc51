from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from meshd.admission.cells import Cells, segment_size
from meshd.admission.gate import Gate, GateLimits
from meshd.memory import Segment

ROWS = 4


class FakeClock:
    def __init__(self) -> None:
        self.now_ns = 1_000_000_000

    def __call__(self) -> int:
        return self.now_ns

    def pass_s(self, seconds: float) -> None:
        self.now_ns += int(seconds * 1e9)


class GateNode:
    """One node's segment; ``gate(row)`` is the gate of a process, ``woken`` the rows that were woken."""

    def __init__(self) -> None:
        self.segment = Segment.create("gate", segment_size(ROWS))
        self.clock = FakeClock()
        self.woken: list[int] = []
        self.limits = GateLimits(2, 3, 60_000_000_000, 1000)

    def gate(self, row: int = 0, owner: int | None = None) -> Gate:
        owner = row + 100 if owner is None else owner
        return Gate(self.segment, row, ROWS, owner, self.limits, self.clock, self.woken.append)

    def controller(self) -> Cells:
        return Cells(self.segment, None, ROWS)


@pytest.fixture
def node() -> Iterator[GateNode]:
    node = GateNode()
    yield node
    node.segment.close()


@pytest.fixture
def make_cells() -> Callable[[], list[Cells]]:
    """Fresh cells of all rows of one new segment."""

    def make() -> list[Cells]:
        segment = Segment.create("gate", segment_size(ROWS))
        return [Cells(segment, row, ROWS, owner=row + 1) for row in range(ROWS)]

    return make
