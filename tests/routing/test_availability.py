"""Placement while upstreams are open, half open, cooling down or de-ranked; placers of three processes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from random import Random

import pytest

from meshd.api.endpoints import EndpointRegistry
from meshd.api.view import RoutingView
from meshd.memory import Segment
from meshd.metrics.cells import BufferedCounter
from meshd.metrics.cells import Counter as MetricCounter
from meshd.routing.availability import NoneAvailable
from meshd.routing.condition_cells import ENDS, LINE_WORDS, STATE
from meshd.routing.conditions import CLOSED, HALF_OPEN, OPEN, Conditions
from meshd.routing.conditions import segment_bytes as conditions_bytes
from meshd.routing.load import LoadTable
from meshd.routing.load import segment_bytes as load_bytes
from meshd.routing.placement import Placement, Placer
from meshd.routing.policies.table import PolicyParts, policy_table
from meshd.routing.prefix_index import MIN_BYTES, PrefixIndex
from meshd.routing.prefix_index import segment_bytes as index_bytes
from meshd.routing.registry import RegistryBoard
from meshd.routing.sessions import SessionTable
from meshd.routing.sessions import segment_bytes as sessions_bytes
from meshd.routing.upstream import Upstream

MakeUpstream = Callable[..., Upstream]
CHAT = EndpointRegistry().find("POST", "/v1/chat/completions").endpoint
VIEW = RoutingView("m1", token_ids=b"\1\0\0\0\2\0\0\0", prefix_key=7, key_position=1, session_key=b"s-1")
VIEW.assigned = 0
ROWS = 3


class NoMetrics:
    def selections(self, model: str, policy: str) -> BufferedCounter:
        return BufferedCounter(MetricCounter(memoryview(bytearray(8)).cast("Q"), 0), [])

    def decided(self, policy: str, reason: str) -> None: ...

    def fallback(self, policy: str, reason: str) -> None: ...


class Node:
    def __init__(self, upstreams: list[Upstream], policy: str) -> None:
        self.now_s = 1000.0
        board = RegistryBoard(Segment.create("registry", 1 << 20))
        board.publish(upstreams)
        self.board = board
        loads = Segment.create("load", load_bytes(ROWS))
        index = Segment.create("prefix_index", index_bytes(MIN_BYTES, ROWS))
        sessions = SessionTable(Segment.create("sessions", sessions_bytes()))
        segment = Segment.create("conditions", conditions_bytes(ROWS))
        self.io = [
            Conditions(segment, row, ROWS, owner=row + 1, clock=lambda: self.now_s) for row in range(ROWS)
        ]
        self.placers = [
            Placer(
                board,
                LoadTable(loads, row, ROWS),
                policy_table(
                    PolicyParts(
                        Random(row),
                        row,
                        PrefixIndex(index, row, ROWS, MIN_BYTES),
                        sessions,
                        1.25,
                        0.3,
                        64,
                        1.5,
                    )
                ),
                policy,
                NoMetrics(),
                conditions=conditions,
            )
            for row, conditions in enumerate(self.io)
        ]

    def set_state(self, number: int, state: int, ends_s: float = 0.0) -> None:
        cells = self.io[0].cells
        cells.breaker_times[number * LINE_WORDS + ENDS] = ends_s
        cells.breaker_words[number * LINE_WORDS + STATE] = state
        cells.watched[0] += 1

    def place(self, row: int = 0, tried: tuple[int, ...] = ()) -> Placement:
        return self.placers[row].place(CHAT, VIEW, tried)

    def picks(self, count: int = 30, tried: tuple[int, ...] = ()) -> Counter[int]:
        """Place and release on all processes; return how often each number was picked."""
        found: Counter[int] = Counter()
        for turn in range(count):
            placement = self.place(turn % ROWS, tried)
            found[placement.upstream.number] += 1
            self.placers[turn % ROWS].release(placement)
        return found


MakeNode = Callable[..., Node]


@pytest.fixture
def make_node(make_upstream: MakeUpstream) -> MakeNode:
    def make(count: int = 3, policy: str = "round_robin") -> Node:
        return Node([make_upstream(number) for number in range(count)], policy)

    return make


POLICIES = [
    "random", "round_robin", "power_of_two", "least_load", "prefix_hash", "cache_aware", "consistent_hash",
    "dp_sticky",
]  # fmt: skip


@pytest.mark.parametrize("policy", POLICIES)
def test_retry_goes_to_an_untried_upstream_while_one_remains_under_every_policy(
    make_node: MakeNode, policy: str
) -> None:
    node = make_node(policy=policy)
    for trouble in (False, True):
        if trouble:
            node.io[0].derank(2, 1001.0)
        assert set(node.picks(tried=(0, 1))) == {2}  # untried comes before de-ranked
        assert set(node.picks(tried=(0,))) <= {1, 2}
        assert node.picks(tried=(0, 1, 2)).total() == 30


@pytest.mark.parametrize("policy", POLICIES)
def test_deranked_upstream_gets_no_traffic_while_another_candidate_exists(
    make_node: MakeNode, policy: str
) -> None:
    node = make_node(policy=policy)
    node.io[1].derank(0, 1001.0)
    assert 0 not in node.picks()
    node.io[1].derank(1, 1001.0)
    assert set(node.picks()) == {2}
    node.io[2].derank(2, 1001.0)
    assert node.picks().total() == 30  # all of them are, so none is worse


def test_trouble_of_one_generation_does_not_outlive_it(
    make_node: MakeNode, make_upstream: MakeUpstream
) -> None:
    node = make_node()
    node.io[0].cool_down(0, 1010.0)
    assert set(node.picks()) == {1, 2}
    node.board.publish([make_upstream(0), make_upstream(5)])
    assert set(node.picks()) == {5}
    node.now_s = 1010.0
    assert set(node.picks()) == {0, 5}


def test_new_upstream_with_a_used_number_begins_without_its_cool_down(
    make_node: MakeNode, make_upstream: MakeUpstream
) -> None:
    node = make_node()
    node.io[0].cool_down(0, 1300.0)
    node.board.publish([make_upstream(1)])
    assert set(node.picks()) == {1}
    node.board.publish([make_upstream(0, id="another"), make_upstream(1)])
    assert set(node.picks()) == {0, 1}


def test_cooling_and_open_upstreams_get_nothing_from_any_process(make_node: MakeNode) -> None:
    node = make_node()
    node.io[0].cool_down(0, 1007.0)
    node.set_state(1, OPEN, ends_s=1060.0)
    assert set(node.picks()) == {2}
    node.now_s = 1007.0
    assert set(node.picks()) == {0, 2}
    node.set_state(1, CLOSED)
    assert set(node.picks()) == {0, 1, 2}


@pytest.mark.parametrize(
    ("cooldown_s", "open_s", "wait_s", "advice_s"),
    [
        ((0.3, 7), None, 0.3, 1),
        ((6.2, 7), None, 6.2, 7),
        ((120, 300), None, 120, 60),
        ((6.5, 6.5), (42, 0), 6.5, 7),  # the open one is not for the cool-down alone
        ((0, 0), (41.5, 42), math.inf, 42),
        ((50, 60), (41.5, 42), math.inf, 50),
    ],
)
def test_nobody_available_tells_how_long_a_cool_down_would_be_waited_for_and_when_to_come_again(
    make_node: MakeNode,
    cooldown_s: tuple[float, ...],
    open_s: tuple[float, ...] | None,
    wait_s: float,
    advice_s: int,
) -> None:
    node = make_node(2)
    for number in range(2):
        if cooldown_s[number]:
            node.io[number].cool_down(number, 1000.0 + cooldown_s[number])
        if open_s is not None and open_s[number]:
            node.set_state(number, OPEN, ends_s=1000.0 + open_s[number])
    with pytest.raises(NoneAvailable) as caught:
        node.place()
    assert (caught.value.code, caught.value.status) == ("no_available_workers", 503)
    assert caught.value.wait_s == pytest.approx(wait_s)
    assert caught.value.retry_after_s == advice_s
    assert node.placers[1].ready_in_s(CHAT, VIEW) == pytest.approx(wait_s)


def test_unhealthy_upstreams_are_not_waited_for(make_upstream: MakeUpstream) -> None:
    node = Node([make_upstream(0, is_healthy=False), make_upstream(1, state="draining")], "round_robin")
    node.io[0].cool_down(0, 1001.0)
    with pytest.raises(NoneAvailable) as caught:
        node.place()
    assert (caught.value.wait_s, caught.value.retry_after_s) == (math.inf, 5)
    assert node.placers[0].ready_in_s(CHAT, RoutingView("another model")) == math.inf


def test_ready_at_once_while_anybody_may_be_asked(make_node: MakeNode) -> None:
    node = make_node(2)
    assert node.placers[0].ready_in_s(CHAT, VIEW) == 0
    node.io[0].cool_down(0, 1010.0)
    node.io[0].derank(1, 1010.0)
    assert node.placers[0].ready_in_s(CHAT, VIEW) == 0
    node.set_state(1, HALF_OPEN)
    assert node.placers[0].ready_in_s(CHAT, VIEW) == 0


def test_half_open_upstream_gets_one_request_at_a_time_and_the_rest_goes_elsewhere(
    make_node: MakeNode,
) -> None:
    node = make_node(2)
    node.set_state(0, HALF_OPEN)
    placed = [node.place(row) for row in (0, 1, 2) * 4]
    assert Counter(placement.upstream.number for placement in placed) == {0: 1, 1: 11}
    at, trial = next((n, p) for n, p in enumerate(placed) if p.upstream.number == 0)
    node.placers[(0, 1, 2)[at % 3]].release(trial)  # without an outcome: neutral
    assert Counter(node.place(row).upstream.number for row in (0, 1, 2) * 2)[0] == 1


@pytest.mark.parametrize("outcome", ["success", "failure"])
def test_outcome_of_a_trial_goes_to_its_word_alone(make_node: MakeNode, outcome: str) -> None:
    node = make_node(1)
    node.set_state(0, HALF_OPEN)
    placement = node.place()
    with pytest.raises(NoneAvailable):
        node.place(1)
    assert node.placers[0].report(placement, outcome, 1000.0, 1001.0)  # type: ignore[arg-type]
    node.placers[0].release(placement)
    with pytest.raises(NoneAvailable):  # until the controller has counted it
        node.place(1)
    assert node.io[0].successes(0) == (outcome == "success")
    cells = node.io[0].cells
    cells.settled_words[0] = cells.trial_words[0]
    assert node.place(1).upstream.number == 0


def test_reports_without_a_trial_reach_ring_and_counts(make_node: MakeNode) -> None:
    node = make_node(1)
    placer = node.placers[0]
    for outcome in ("success", "failure", "neutral"):
        placement = node.place()
        assert placer.report(placement, outcome, 1000.0, 1001.0)  # type: ignore[arg-type]
        placer.release(placement)
    assert node.io[0].successes(0) == 1
    assert node.io[0].cells.ring_words[0][0] == 1
