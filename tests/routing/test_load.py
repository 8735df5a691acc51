from __future__ import annotations

import os
import random
from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshd.memory import Segment
from meshd.routing.load import LoadTable, free_number, segment_bytes

ROWS = 4


@pytest.fixture
def segment() -> Segment:
    return Segment.create("load", segment_bytes(ROWS))


def test_load_is_the_sum_over_all_processes(segment: Segment) -> None:
    first, second = LoadTable(segment, 0, ROWS), LoadTable(segment, 3, ROWS)
    reader = LoadTable(segment, None, ROWS)
    first.add(7)
    second.add(7)
    second.add(7)
    second.add(1023)
    assert [table.load(7) for table in (first, second, reader)] == [3, 3, 3]
    assert reader.loads((7, 8, 1023)) == [3, 0, 1]
    second.release(7)
    assert first.load(7) == 2 and "own={7: 1}" in repr(first) and "7: 1" in repr(second)


def test_release_without_a_count_is_an_error_and_changes_nothing(segment: Segment) -> None:
    table, other = LoadTable(segment, 0, ROWS), LoadTable(segment, 1, ROWS)
    other.add(5)
    with pytest.raises(RuntimeError, match="upstream 5"):
        table.release(5)
    assert table.load(5) == 1


def test_clearing_a_dead_row_leaves_the_others_untouched(segment: Segment) -> None:
    dead, living = LoadTable(segment, 1, ROWS), LoadTable(segment, 2, ROWS)
    for number in (0, 9, 9, 1023):
        dead.add(number)
        living.add(number)
    LoadTable(segment, None, ROWS).clear_row(1)
    assert [living.load(number) for number in (0, 9, 1023)] == [1, 2, 1]


def test_new_owner_of_a_row_starts_from_zero(segment: Segment) -> None:
    LoadTable(segment, 1, ROWS).add(3)
    assert LoadTable(segment, 1, ROWS).load(3) == 0


def test_cell_zeroed_under_a_living_process_is_right_again_at_its_next_change(segment: Segment) -> None:
    table = LoadTable(segment, 1, ROWS)
    table.add(3)
    table.add(3)
    LoadTable(segment, None, ROWS).clear_row(1)
    table.release(3)
    assert table.load(3) == 1


def test_row_or_segment_that_does_not_exist_is_refused(segment: Segment) -> None:
    with pytest.raises(ValueError, match="row 4"):
        LoadTable(segment, ROWS, ROWS)
    with pytest.raises(ValueError, match="too few"):
        LoadTable(segment, 0, ROWS * 100)


@settings(max_examples=60, deadline=None)
@given(
    steps=st.lists(
        st.tuples(st.integers(0, ROWS - 1), st.sampled_from([0, 1, 511, 1023]), st.booleans()), max_size=60
    )
)
def test_any_interleaving_keeps_sums_equal_to_what_is_held(steps: list[tuple[int, int, bool]]) -> None:
    shared = Segment.create("load", segment_bytes(ROWS))
    tables = [LoadTable(shared, row, ROWS) for row in range(ROWS)]
    held = dict.fromkeys([(row, number) for row in range(ROWS) for number in (0, 1, 511, 1023)], 0)
    for row, number, is_release in steps:
        if is_release and held[row, number]:
            tables[row].release(number)
            held[row, number] -= 1
        elif not is_release:
            tables[row].add(number)
            held[row, number] += 1
        for reader in tables:
            expected = [sum(held[r, n] for r in range(ROWS)) for n in (0, 1, 511, 1023)]
            assert reader.loads((0, 1, 511, 1023)) == expected
    shared.close()


def test_racing_processes_end_at_zero_and_no_reader_sees_a_load_out_of_range(
    segment: Segment, fork: Callable[[Callable[[], int]], int]
) -> None:
    children = [fork(partial(_churn, segment, row)) for row in (1, 2, 3)]
    reader = LoadTable(segment, None, ROWS)
    seen, statuses = set(), []
    while children:
        seen.update(reader.loads((0, 1)))
        pid, status = os.waitpid(children[-1], os.WNOHANG)
        if pid:
            children.pop()
            statuses.append(status)
    assert statuses == [0, 0, 0]
    assert seen <= set(range(3 * 5 + 1))
    assert reader.loads((0, 1)) == [0, 0]


def _churn(segment: Segment, row: int) -> int:
    table, rng = LoadTable(segment, row, ROWS), random.Random(row)
    held: list[int] = []
    for _ in range(20_000):
        if held and (len(held) == 5 or rng.random() < 0.5):
            table.release(held.pop())
        else:
            held.append(rng.randrange(2))
            table.add(held[-1])
    for number in held:
        table.release(number)
    return 0


def test_number_is_not_given_out_while_registered_or_held() -> None:
    busy = {1, 2}
    assert free_number({0}, lambda number: number not in busy, last=-1, columns=6) == 3
    assert free_number({0, 3, 4, 5}, lambda number: number not in busy, last=2, columns=6) is None


def test_number_given_up_rests_until_the_others_were_used() -> None:
    given_out = []
    last = -1
    for _ in range(6):
        number = free_number((), lambda _: True, last, columns=4)
        assert number is not None
        given_out.append(number)
        last = number
    assert given_out == [0, 1, 2, 3, 0, 1]


def test_held_cell_of_any_process_keeps_a_number_in_use(segment: Segment) -> None:
    table, controller = LoadTable(segment, 2, ROWS), LoadTable(segment, None, ROWS)
    table.add(0)
    assert free_number((), controller.is_idle) == 1
    table.release(0)
    assert free_number((), controller.is_idle) == 0
