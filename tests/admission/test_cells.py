from __future__ import annotations

import pytest

from meshd.admission.cells import BODY_BYTES, GRANTED, HELD, WAITING, Cells, segment_size
from meshd.memory import Fence, Segment

ROWS = 3


@pytest.fixture
def segment() -> Segment:
    return Segment.create("gate", segment_size(ROWS))


def test_each_row_and_cell_is_a_word_of_its_own(segment: Segment) -> None:
    cells = [Cells(segment, row, ROWS, owner=row + 1) for row in range(ROWS)]
    for row, own in enumerate(cells):
        for cell in (HELD, WAITING, BODY_BYTES, GRANTED):
            own.column(cell)[row] = 10 * row + cell
    for cell in (HELD, WAITING, BODY_BYTES, GRANTED):
        assert list(cells[0].column(cell)) == [cell, 10 + cell, 20 + cell]
    assert [cells[0].owner(row) for row in range(ROWS)] == [1, 2, 3]


def test_unused_row_does_not_count_and_a_used_one_does(segment: Segment) -> None:
    cells = Cells(segment, 1, ROWS, owner=7)
    assert [cells.counts(row) for row in range(ROWS)] == [False, True, False]


def test_retired_row_stops_counting_until_a_successor_takes_it(segment: Segment) -> None:
    cells, controller = Cells(segment, 1, ROWS, owner=7), Cells(segment, None, ROWS)
    cells.column(HELD)[1] = 5
    cells.column(GRANTED)[1] = 9
    controller.retire(1, controller.owner(1))
    assert not cells.counts(1)
    successor = Cells(segment, 1, ROWS, owner=8)
    assert successor.counts(1)
    assert (successor.column(HELD)[1], successor.column(GRANTED)[1]) == (0, 9)


def test_late_retirement_of_a_predecessor_leaves_its_successor_counting(segment: Segment) -> None:
    Cells(segment, 1, ROWS, owner=7)
    successor = Cells(segment, 1, ROWS, owner=8)
    Cells(segment, None, ROWS).retire(1, 7)
    assert successor.counts(1)


def test_row_that_does_not_exist_or_has_no_owner_is_refused(segment: Segment) -> None:
    with pytest.raises(ValueError, match="row 3"):
        Cells(segment, ROWS, ROWS, owner=1)
    with pytest.raises(ValueError, match="no owner"):
        Cells(segment, 0, ROWS, owner=0)
    with pytest.raises(ValueError, match="too few"):
        Cells(segment, 0, 10_000, owner=1)


def test_fence_can_be_passed_again_and_again() -> None:
    fence = Fence()
    for _ in range(3):
        fence()
    assert fence._lock.acquire(blocking=False)
