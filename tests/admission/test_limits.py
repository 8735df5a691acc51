from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshd.admission.cells import HELD, Cells, segment_size
from meshd.admission.limits import GrantRate, SharedBound
from meshd.memory import Fence, Segment

Fork = Callable[[Callable[[], int]], int]

S = 1_000_000_000


def _bounds(cells: list[Cells], bound: int | None) -> list[SharedBound]:
    return [SharedBound(each, HELD, bound, Fence()) for each in cells]


def test_what_one_process_holds_is_not_there_for_another(make_cells: Callable[[], list[Cells]]) -> None:
    one, other, *_ = _bounds(make_cells(), 10)
    assert one.try_take(7)
    assert not other.try_take(4)
    assert other.try_take(3)
    assert (one.total(), one.own, other.own) == (10, 7, 3)
    one.give(7)
    assert other.try_take(7)


def test_nothing_fits_a_bound_of_zero_and_everything_fits_none(
    make_cells: Callable[[], list[Cells]],
) -> None:
    assert not _bounds(make_cells(), 0)[0].try_take()
    unbounded = _bounds(make_cells(), None)[0]
    assert all(unbounded.try_take(10**12) for _ in range(5))
    assert unbounded.total() == 5 * 10**12


def test_giving_more_than_is_held_is_an_error(make_cells: Callable[[], list[Cells]]) -> None:
    one, other, *_ = _bounds(make_cells(), 10)
    other.try_take(5)
    one.try_take(2)
    with pytest.raises(RuntimeError, match="3 given back where 2"):
        one.give(3)
    assert one.total() == 7


def test_amount_of_a_retired_process_is_free_again() -> None:
    segment = Segment.create("gate", segment_size(2))
    dead = SharedBound(Cells(segment, 0, 2, owner=50), HELD, 4, Fence())
    living = SharedBound(Cells(segment, 1, 2, owner=51), HELD, 4, Fence())
    assert dead.try_take(4) and not living.try_take()
    assert living.is_held_elsewhere() and living.holders() == [0]
    Cells(segment, None, 2).retire(0, 50)
    assert living.try_take(4) and not living.try_take()
    assert not living.is_held_elsewhere() and living.holders() == [1]


def test_two_that_announce_at_once_are_never_both_let_in(make_cells: Callable[[], list[Cells]]) -> None:
    """The fence is the moment between announcing and looking: there the other one announces."""
    cells = make_cells()
    other = SharedBound(cells[1], HELD, 1, Fence())
    took: list[bool] = []
    one = SharedBound(cells[0], HELD, 1, lambda: took.append(other.try_take()))
    took.append(one.try_take())
    assert sum(took) <= 1
    assert one.own + other.own == one.total() <= 1


def test_collision_withdraws_and_then_takes_what_is_left(make_cells: Callable[[], list[Cells]]) -> None:
    cells = make_cells()
    column = cells[1].column(HELD)
    announcements = iter([1, 0, 0])

    def other_announces_once() -> None:
        column[1] = next(announcements)

    one = SharedBound(cells[0], HELD, 1, other_announces_once)
    assert not one.try_take() and one.own == 0 and cells[0].column(HELD)[0] == 0
    column[1] = 0  # the other withdrew
    assert one.try_take()


@settings(max_examples=60, deadline=None)
@given(
    steps=st.lists(st.tuples(st.integers(0, 3), st.integers(-5, 5)), max_size=50), bound=st.integers(0, 12)
)
def test_sequential_takes_hold_the_bound_and_refuse_only_what_does_not_fit(
    steps: list[tuple[int, int]], bound: int
) -> None:
    segment = Segment.create("gate", segment_size(4))
    bounds = _bounds([Cells(segment, row, 4, owner=row + 1) for row in range(4)], bound)
    for row, amount in steps:
        before = sum(each.own for each in bounds)
        if amount > 0:
            assert bounds[row].try_take(amount) == (before + amount <= bound)
        else:
            bounds[row].give(min(-amount, bounds[row].own))
        assert bounds[0].total() == sum(each.own for each in bounds) <= bound
    segment.close()


@pytest.mark.parametrize(("processes", "bound"), [(2, 1), (3, 2), (4, 5)])
def test_racing_processes_never_hold_more_than_the_bound(processes: int, bound: int, fork: Fork) -> None:
    """The judge is a kernel semaphore of the same size: its units are taken while an amount is held."""
    segment = Segment.create("gate", segment_size(processes))
    judge = os.eventfd(bound, os.EFD_NONBLOCK | os.EFD_SEMAPHORE)
    start = os.eventfd(0, os.EFD_SEMAPHORE)

    def run(row: int) -> int:
        os.eventfd_read(start)
        return _race(SharedBound(Cells(segment, row, processes, row + 1), HELD, bound, Fence()), judge)

    children = [fork(partial(run, row)) for row in range(processes)]
    os.eventfd_write(start, processes)
    statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
    assert statuses == [0] * processes
    assert sum(Cells(segment, None, processes).column(HELD)) == 0
    for fd in (judge, start):
        os.close(fd)


def _race(shared: SharedBound, judge: int) -> int:
    """Take and give until 3000 were taken. Exit status: 0 fine, 2 the bound was exceeded."""
    rng, taken, exceeded = random.Random(shared._row), 0, 0
    judged: list[bool] = []
    while taken < 3000 or judged:
        if judged and (taken >= 3000 or rng.random() < 0.6):
            if judged.pop():
                os.eventfd_write(judge, 1)
            shared.give()
        elif shared.try_take():
            judged.append(_is_unit_left(judge))
            exceeded += not judged[-1]
            taken += 1
        elif not judged:
            os.sched_yield()
    return 2 if exceeded else 0


def _is_unit_left(judge: int) -> bool:
    try:
        os.eventfd_read(judge)
    except BlockingIOError:
        return False
    return True


def test_killed_processes_leave_the_bound_whole_once_retired(fork: Fork) -> None:
    segment = Segment.create("gate", segment_size(2))
    controller = Cells(segment, None, 2)
    for _ in range(5):
        ready, told = os.pipe()
        pid = fork(partial(_take_for_ever, segment, told))
        try:
            assert os.read(ready, 1) == b"x"
            own = SharedBound(Cells(segment, 1, 2, os.getpid()), HELD, 3, Fence())
            assert not own.try_take(3)
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        controller.retire(0, pid)
        assert own.try_take(3) and not own.try_take()
        own.give(3)
        for fd in (ready, told):
            os.close(fd)


def _take_for_ever(segment: Segment, told: int) -> int:
    """Say so once one is held; from then on between one and three are."""
    shared = SharedBound(Cells(segment, 0, 2, os.getpid()), HELD, 3, Fence())
    os.write(told, b"x" if shared.try_take() else b"-")
    while True:
        shared.try_take()
        if shared.own > 1:
            shared.give()


def test_advice_is_what_waits_over_the_recent_grants_per_second() -> None:
    rate = GrantRate()
    assert rate.retry_after_s(50, 0, 0) == 1
    for second in range(21):
        rate.note(second * 4, second * S)
    assert rate.retry_after_s(10, 84, 21 * S) == 3  # 4 a second: 2.5 s
    assert rate.retry_after_s(0, 84, 21 * S) == 1
    assert rate.retry_after_s(10_000, 84, 21 * S) == 60


def test_advice_forgets_grants_older_than_ten_seconds() -> None:
    rate = GrantRate()
    rate.note(0, 0)
    rate.note(1000, S)
    for second in range(2, 30):
        rate.note(1000, second * S)
    assert rate.retry_after_s(10, 1000, 30 * S) == 1  # no grant lately: no data
