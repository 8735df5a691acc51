from __future__ import annotations

from collections.abc import Callable

import pytest

from meshd.memory import Segment
from meshd.routing.sessions import (
    IDLE_NS,
    SEGMENT_KIND,
    SessionId,
    SessionLedger,
    SessionTable,
    segment_bytes,
)


class Clock:
    def __init__(self) -> None:
        self.now_ns = 10 * IDLE_NS

    def __call__(self) -> int:
        return self.now_ns


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def segment() -> Segment:
    return Segment.create(SEGMENT_KIND, segment_bytes(1024))


@pytest.fixture
def ledger(segment: Segment, clock: Clock) -> SessionLedger:
    return SessionLedger(segment, clock, 1024)


@pytest.fixture
def table(segment: Segment, clock: Clock) -> SessionTable:
    return SessionTable(segment, clock, 1024)


def _id(name: object) -> SessionId:
    return SessionId.of(str(name).encode())


def _idle(number: int) -> int:
    return 0


def test_an_assigned_session_is_found_by_every_process(ledger: SessionLedger, table: SessionTable) -> None:
    assert table.find(_id("s")) is None
    assert ledger.assign(_id("s"), [3, 4], _idle) == 3
    assert table.find(_id("s")) == 3


def test_who_asks_second_gets_what_the_first_was_given(ledger: SessionLedger) -> None:
    first = ledger.assign(_id("s"), [3, 4], _idle)
    assert ledger.assign(_id("s"), [4, 3], _idle) == first
    assert ledger.active == 1


def test_new_sessions_go_to_the_fewest_sessions_then_load_then_order(ledger: SessionLedger) -> None:
    loads: Callable[[int], int] = {1: 5, 2: 0, 3: 0}.__getitem__
    assert [ledger.assign(_id(n), [1, 2, 3], loads) for n in range(4)] == [2, 3, 1, 2]


def test_a_session_idle_for_two_hours_is_assigned_again(
    ledger: SessionLedger, table: SessionTable, clock: Clock
) -> None:
    ledger.assign(_id("s"), [3], _idle)
    clock.now_ns += IDLE_NS - 1
    table.refresh(_id("s"))
    clock.now_ns += IDLE_NS - 1
    assert table.find(_id("s")) == 3
    clock.now_ns += 1
    assert table.find(_id("s")) is None
    assert ledger.assign(_id("s"), [3, 4], lambda number: -number) == 4
    assert ledger.active == 1


def test_a_session_whose_upstream_is_no_candidate_is_assigned_again(ledger: SessionLedger) -> None:
    ledger.assign(_id("s"), [3], _idle)
    assert ledger.assign(_id("s"), [4, 5], _idle) == 4
    assert ledger.find(_id("s")) == 4
    assert ledger.active == 1


def test_the_table_keeps_its_size_over_many_sessions(
    ledger: SessionLedger, table: SessionTable, clock: Clock
) -> None:
    for number in range(3000):
        ledger.assign(_id(number), [1, 2, 3], _idle)
        clock.now_ns += 1
    assert ledger.active <= 1024
    assert ledger.active > 1000
    assert all(table.find(_id(number)) for number in range(2990, 3000))
    assert sum(table.find(_id(number)) is not None for number in range(3000)) == ledger.active


def test_most_of_the_table_fills_before_a_session_is_displaced(ledger: SessionLedger) -> None:
    for number in range(870):
        ledger.assign(_id(number), [1], _idle)
    assert ledger.active == 870


def test_sweeping_removes_the_expired_and_forgetting_those_of_an_upstream(
    ledger: SessionLedger, clock: Clock
) -> None:
    ledger.assign(_id("old"), [1], _idle)
    clock.now_ns += IDLE_NS
    ledger.assign(_id("new"), [1], _idle)
    ledger.assign(_id("other"), [2], _idle)
    assert ledger.sweep() == 1
    assert ledger.forget([2]) == 1
    assert ledger.active == 1
    assert ledger.find(_id("new")) == 1


def test_a_new_controller_goes_on_with_the_table_of_the_old(
    segment: Segment, ledger: SessionLedger, clock: Clock
) -> None:
    for number in range(10):
        ledger.assign(_id(number), [1, 2], _idle)
    successor = SessionLedger(segment, clock, 1024)
    assert successor.active == 10
    assert successor.assign(_id(3), [1, 2], _idle) == ledger.find(_id(3))


def test_no_candidates_are_no_assignment(ledger: SessionLedger) -> None:
    assert ledger.assign(_id("s"), [], _idle) is None
    assert ledger.active == 0


def test_choosing_tells_what_assigning_would_and_stores_nothing(
    ledger: SessionLedger, table: SessionTable, clock: Clock
) -> None:
    found = []
    for name in "abc":
        chosen = ledger.choose(_id(name), [3, 1, 2], lambda number: -number)
        assert table.find(_id(name)) is None
        assert ledger.assign(_id(name), [3, 1, 2], lambda number: -number) == chosen
        found.append(chosen)
    assert found == [3, 2, 1] and ledger.active == 3
    assert ledger.choose(_id("d"), [], _idle) is None
    clock.now_ns += IDLE_NS - 1
    assert ledger.choose(_id("a"), [1, 3], _idle) == 3
    clock.now_ns += 1
    assert table.find(_id("a")) is None, "choosing has kept it alive"
