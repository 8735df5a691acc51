from __future__ import annotations

from collections.abc import Callable

import pytest

from meshd.admission.cells import HELD, WAITING, Cells
from meshd.admission.limits import SharedBound
from meshd.admission.line import Ending, Place, SharedLine
from meshd.memory import Fence

FAR = 10**18


class Lines:
    """Lines of all rows before one bound, with the log of what happened."""

    def __init__(self, cells: list[Cells], bound: int | None, queue: int | None) -> None:
        self.log: list[str] = []
        self.woken: list[int] = []
        self.bounds = [SharedBound(each, HELD, bound, Fence()) for each in cells]
        self.lines = [
            SharedLine(held, SharedBound(each, WAITING, queue, Fence()), row, self.woken.append)
            for row, (each, held) in enumerate(zip(cells, self.bounds, strict=True))
        ]

    def join(self, row: int, name: str, amount: int = 1, deadline_ns: int = FAR) -> Place:
        place = self.lines[row].join(
            amount, deadline_ns, lambda ending: self.log.append(f"{name} {ending.value}")
        )
        assert place is not None
        return place


@pytest.fixture
def lines(make_cells: Callable[[], list[Cells]]) -> Callable[..., Lines]:
    return lambda bound=2, queue=10: Lines(make_cells(), bound, queue)


def test_those_who_wait_are_served_in_order_of_arrival(lines: Callable[..., Lines]) -> None:
    node = lines(bound=1)
    assert node.lines[0].try_take(1)
    for name in "abc":
        node.join(0, name)
    for _ in range(3):
        node.lines[0].give(1)
    assert node.log == ["a granted", "b granted", "c granted"]


def test_newcomer_does_not_pass_those_who_wait_in_its_process_or_another(
    lines: Callable[..., Lines],
) -> None:
    node = lines(bound=2)
    assert node.lines[0].try_take(2)
    node.join(1, "waiting")
    node.lines[0].give(1)
    assert not node.lines[0].try_take(1)
    assert not node.lines[1].try_take(1)
    node.lines[1].poll(0)
    assert node.log == ["waiting granted"]
    node.lines[0].give(1)
    assert node.lines[0].try_take(1)


def test_turn_goes_around_the_processes_that_wait(lines: Callable[..., Lines]) -> None:
    node = lines(bound=3)
    assert node.lines[0].try_take(3)
    for name in "ab":
        node.join(0, name)
    for row in (1, 3):
        node.join(row, f"row {row}")
    for _ in range(3):
        node.lines[0].give(1)
    assert node.woken == [1, 3] and node.log == ["a granted"]
    node.lines[3].poll(0)
    node.lines[1].poll(0)
    assert node.log == ["a granted", "row 3 granted", "row 1 granted"]


def test_large_amount_at_the_front_is_not_passed_by_a_small_one(lines: Callable[..., Lines]) -> None:
    node = lines(bound=10)
    assert node.lines[0].try_take(8)
    large = node.join(0, "large", amount=5)
    node.join(0, "small", amount=1)
    node.lines[0].poll(0)
    assert node.log == []
    assert node.lines[0].leave(large)
    assert node.log == ["small granted"]


def test_place_given_up_is_free_at_once_and_nothing_is_granted_to_it(lines: Callable[..., Lines]) -> None:
    node = lines(bound=1, queue=1)
    assert node.lines[0].try_take(1)
    place = node.join(0, "gone")
    assert node.lines[1].join(1, FAR, lambda _: None) is None
    assert node.lines[0].leave(place) and not node.lines[0].leave(place)
    node.join(1, "next")
    node.lines[0].give(1)
    node.lines[1].poll(0)
    assert node.log == ["next granted"]


def test_place_that_was_granted_cannot_be_given_up(lines: Callable[..., Lines]) -> None:
    node = lines(bound=1)
    assert node.lines[0].try_take(1)
    place = node.join(0, "a")
    node.lines[0].give(1)
    assert not node.lines[0].leave(place)
    assert node.bounds[0].own == 1


def test_wait_ends_at_its_deadline_and_not_before(lines: Callable[..., Lines]) -> None:
    node = lines(bound=1)
    assert node.lines[0].try_take(1)
    node.join(0, "late", deadline_ns=200)
    node.join(0, "soon", deadline_ns=100)
    node.lines[0].poll(99)
    assert node.log == []
    node.lines[0].poll(100)
    node.lines[0].poll(200)
    assert node.log == ["soon expired", "late expired"]


def test_joining_calls_nobody_back_even_with_room(lines: Callable[..., Lines]) -> None:
    node = lines(bound=1)
    node.join(0, "a")
    assert node.log == []
    node.lines[0].poll(0)
    assert node.log == ["a granted"]


def test_callback_that_gives_back_at_once_lets_all_through_without_recursion(
    lines: Callable[..., Lines],
) -> None:
    node = lines(bound=1, queue=None)
    line = node.lines[0]
    assert line.try_take(1)
    served: list[int] = []

    def pass_through(ending: Ending) -> None:
        served.append(len(served))
        line.give(1)

    for _ in range(5000):
        assert line.join(1, FAR, pass_through)
    line.give(1)
    assert len(served) == 5000 and node.bounds[0].own == 0


def test_callback_that_makes_another_leave_keeps_that_one_from_being_ended(
    lines: Callable[..., Lines],
) -> None:
    node = lines(bound=1)
    line = node.lines[0]
    assert line.try_take(1)
    places: list[Place] = []
    assert line.join(1, 5, lambda _: node.log.append(f"left {line.leave(places[0])}"))
    places.append(node.join(0, "second", deadline_ns=5))
    line.poll(5)
    assert node.log == ["left True"]


def test_closing_ends_every_wait(lines: Callable[..., Lines]) -> None:
    node = lines(bound=1)
    assert node.lines[0].try_take(1)
    for name in "ab":
        node.join(0, name)
    node.lines[0].close()
    assert node.log == ["a closed", "b closed"]
