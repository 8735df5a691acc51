"""The keeper of breakers over real cells, with this test as the I/O processes and as the clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from meshd.control import ProcessBoard, Role, Topology
from meshd.controller.breakers import BreakerKeeper, TransitionTeller
from meshd.log import Log
from meshd.memory import Segment
from meshd.metrics.catalog import build_catalog
from meshd.metrics.cells import MetricRow, segment_size
from meshd.metrics.table import MetricTable
from meshd.routing.breaker import BreakerRules
from meshd.routing.conditions import Conditions, segment_bytes
from meshd.routing.registry import RegistryBoard, Upstream

RULES = BreakerRules(failure_threshold=3, success_threshold=2, open_s=60, window_s=120)
UPSTREAMS = [Upstream(n, f"id-{n}", f"http://{n}:1", is_healthy=True, state="active") for n in range(4)]


class Node:
    def __init__(self) -> None:
        self.topology = Topology.of(1, 1)
        self.board = ProcessBoard.create(self.topology.board_seats)
        self.registry = Segment.create("registry", 1 << 20)
        self.segment = Segment.create("conditions", segment_bytes(self.topology.io_seats))
        self.now_s = 1000.0
        self.changes: list[tuple[str, str, str]] = []
        self.io = [self.start_io(seat, pid=100 + seat) for seat in range(self.topology.io_seats)]
        self.publish(UPSTREAMS)
        self.keeper = self.new_keeper()

    def start_io(self, seat: int, pid: int) -> Conditions:
        self.board.row(self.topology.board_io(seat)).open(Role.IO, seat, pid, "0")
        conditions = Conditions(
            self.segment, seat, self.topology.io_seats, owner=pid, clock=lambda: self.now_s
        )
        conditions.watch(range(8))
        return conditions

    def publish(self, upstreams: Sequence[Upstream]) -> None:
        RegistryBoard(self.registry).publish(upstreams)

    def new_keeper(self, rules: BreakerRules = RULES) -> BreakerKeeper:
        return BreakerKeeper(
            Conditions(self.segment, None, self.topology.io_seats).cells,
            RegistryBoard(self.registry),
            self.board,
            self.topology,
            rules,
            lambda *change: self.changes.append(change),
            clock=lambda: self.now_s,
        )

    def fail(self, number: int, seat: int = 0) -> None:
        self.now_s += 0.1
        assert self.io[seat].failed(number, self.now_s - 0.05, self.now_s)

    def succeed(self, number: int, seat: int = 0) -> None:
        self.now_s += 0.1
        self.io[seat].succeeded(number, self.now_s - 0.05, self.now_s)

    def open(self, number: int) -> None:
        for turn in range(3):
            self.fail(number, turn % 2)
        self.keeper.look()
        assert self.state(number) == "open"

    def half_open(self, number: int) -> None:
        self.open(number)
        self.now_s += 60
        self.keeper.look()
        assert self.state(number) == "half_open"

    def state(self, number: int) -> str:
        return self.io[0].breaker_of(number)


@pytest.fixture
def node() -> Node:
    return Node()


def test_failures_of_several_processes_are_one_run(node: Node) -> None:
    node.fail(1, seat=0)
    node.fail(1, seat=1)
    node.keeper.look()
    assert node.state(1) == "closed" and node.io[0].runs_of(1) == (2, 0)
    node.fail(1, seat=0)
    assert node.io[1].trouble() is None
    node.keeper.look()
    assert (node.state(1), node.state(0)) == ("open", "closed")
    trouble = node.io[1].trouble()
    assert trouble is not None and trouble.excluded == {1}
    assert node.io[1].opens_in_s(1) == pytest.approx(60)
    assert node.changes == [("http://1:1", "closed", "open")]


def test_failures_are_put_in_order_whatever_ring_they_came_through(node: Node) -> None:
    node.fail(1, seat=1)
    node.fail(1, seat=1)
    node.succeed(1, seat=0)
    node.fail(1, seat=0)
    node.fail(1, seat=1)
    node.keeper.look()
    assert node.state(1) == "closed" and node.io[0].runs_of(1) == (2, 0)


def test_success_in_another_process_ends_the_run_and_the_gauge_shows_it(node: Node) -> None:
    node.fail(1, seat=0)
    node.keeper.look()
    node.succeed(1, seat=1)
    node.keeper.look()
    assert node.io[0].runs_of(1) == (0, 0)
    node.fail(1)
    node.fail(1)
    node.keeper.look()
    assert node.state(1) == "closed"


def test_failures_of_an_upstream_that_has_left_are_nobodys(node: Node) -> None:
    node.fail(7)
    node.keeper.look()
    assert node.changes == []


def test_trials_are_counted_once_and_close_it(node: Node) -> None:
    node.half_open(1)
    for seat in (0, 1):
        assert node.io[seat].try_trial(1)
        node.keeper.look()
        assert node.io[1 - seat].is_tried(1)  # it runs
        node.io[seat].end_trial(1, "success")
        for _ in range(3):
            node.keeper.look()
        assert node.io[0].runs_of(1)[1] == (1 if seat == 0 else 0)
    assert node.state(1) == "closed"
    assert [change[1:] for change in node.changes] == [
        ("closed", "open"),
        ("open", "half_open"),
        ("half_open", "closed"),
    ]
    assert node.io[0].trouble() is None


def test_failed_trial_opens_it_for_a_whole_time_and_nobody_slips_in_before(node: Node) -> None:
    node.half_open(1)
    assert node.io[0].try_trial(1)
    node.io[0].end_trial(1, "failure")
    assert not node.io[1].try_trial(1)
    node.keeper.look()
    assert node.state(1) == "open" and not node.io[1].try_trial(1)
    node.now_s += 59.9
    node.keeper.look()
    assert node.state(1) == "open"
    node.now_s += 0.1
    node.keeper.look()
    assert node.state(1) == "half_open" and node.io[1].try_trial(1)


def test_neutral_trial_counts_nothing(node: Node) -> None:
    node.half_open(1)
    assert node.io[0].try_trial(1)
    node.io[0].end_trial(1, "neutral")
    node.keeper.look()
    assert node.state(1) == "half_open" and node.io[0].runs_of(1)[1] == 0
    assert node.io[1].try_trial(1)


def test_failures_that_are_no_trials_change_nothing_while_half_open(node: Node) -> None:
    node.half_open(1)
    for _ in range(5):
        node.fail(1)
    node.keeper.look()
    assert node.state(1) == "half_open"


@pytest.mark.parametrize("has_successor", [False, True])
def test_trial_of_a_dead_process_makes_way(node: Node, has_successor: bool) -> None:
    node.half_open(1)
    assert node.io[0].try_trial(1)
    node.board.row(node.topology.board_io(0)).close()
    if has_successor:
        node.io[0] = node.start_io(0, pid=555)
    assert not node.io[1].try_trial(1)
    node.keeper.look()
    assert node.state(1) == "half_open" and node.io[1].try_trial(1)


def test_last_word_of_a_dead_process_counts(node: Node) -> None:
    node.half_open(1)
    assert node.io[0].try_trial(1)
    node.io[0].end_trial(1, "failure")
    node.board.row(node.topology.board_io(0)).close()
    node.keeper.look()
    assert node.state(1) == "open"


def test_successor_of_the_controller_goes_on_from_what_was_published(node: Node) -> None:
    node.fail(0)
    node.fail(0)
    node.open(1)
    node.half_open(2)
    assert node.io[0].try_trial(2)
    node.io[0].end_trial(2, "success")
    node.keeper.look()
    before = [(node.state(number), node.io[0].runs_of(number)) for number in range(4)]
    changes = len(node.changes)
    node.keeper = node.new_keeper()
    node.keeper.look()
    assert [(node.state(number), node.io[0].runs_of(number)) for number in range(4)] == before
    assert len(node.changes) == changes
    node.fail(0)
    node.keeper.look()
    assert node.state(0) == "open"
    assert node.io[1].try_trial(2)
    node.io[1].end_trial(2, "success")
    node.keeper.look()
    assert node.state(2) == "closed"


def test_successor_counts_what_was_reported_while_there_was_no_controller(node: Node) -> None:
    node.keeper.look()
    for _ in range(3):
        node.fail(3)
    node.keeper = node.new_keeper()
    node.keeper.look()
    assert node.state(3) == "open"


def test_new_upstream_with_a_used_number_begins_closed(node: Node) -> None:
    node.half_open(1)
    assert node.io[0].try_trial(1)
    node.publish([UPSTREAMS[0], replace(UPSTREAMS[1], id="another")])
    node.keeper.look()
    assert (node.state(1), node.io[0].runs_of(1), node.io[0].is_tried(1)) == ("closed", (0, 0), False)
    node.half_open(1)
    assert node.io[1].try_trial(1)


def test_changes_of_the_set_leave_breakers_alone(node: Node) -> None:
    node.open(1)
    node.fail(2)
    node.keeper.look()
    node.publish([*UPSTREAMS[1:], replace(UPSTREAMS[0], number=9, id="new", base_url="http://9:1")])
    node.keeper.look()
    assert (node.state(1), node.io[0].runs_of(2)) == ("open", (1, 0))


def test_disabled_breakers_count_and_never_open(node: Node) -> None:
    keeper = node.new_keeper(replace(RULES, is_disabled=True))
    for _ in range(50):
        node.fail(1)
    keeper.look()
    assert node.state(1) == "closed" and node.io[0].runs_of(1) == (50, 0)


def test_changes_are_counted_by_upstream() -> None:
    catalog = build_catalog()
    segment = Segment.create("metrics", segment_size(1))
    tell = TransitionTeller(MetricRow(segment, 0, catalog), Log("ctl", "error", True))
    tell("http://1:1", "closed", "open")
    tell("http://1:1", "closed", "open")
    totals = MetricTable(segment, 1, catalog).sum_rows({0})
    assert totals.value("mesh_worker_cb_transitions_total", "http://1:1", "closed", "open") == 2
