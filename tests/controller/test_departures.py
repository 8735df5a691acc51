"""When a draining upstream may leave, and what is told of those that have left."""

from __future__ import annotations

from dataclasses import replace

from meshd.controller.departures import CUT_S, SEEN_S, SERIES_KEPT_S, Departures
from meshd.routing.registry import Upstream

A = Upstream(1, "a", "http://a:1")
B = Upstream(2, "b", "http://b:1")


class Node:
    def __init__(self) -> None:
        self.now_s = 100.0
        self.departures = Departures(lambda: self.now_s, lambda: 1790000000.0 + self.now_s)


def test_an_upstream_leaves_no_sooner_than_every_front_door_has_seen_it_drain() -> None:
    node = Node()
    assert not node.departures.may_leave(A)
    node.departures.begin(A)
    node.now_s += SEEN_S - 0.01
    assert not node.departures.may_leave(A)
    node.now_s += 0.02
    assert node.departures.may_leave(A)


def test_a_successor_lets_those_that_drain_be_seen_once_more() -> None:
    node = Node()
    node.departures.resume([replace(A, state="draining"), B], {"http://c:1": 1790000099}, ["c"])
    assert not node.departures.may_leave(A)
    assert (node.departures.cut, node.departures.departed) == (["c"], {"http://c:1": 1790000099})
    node.now_s += SEEN_S + 0.01
    assert node.departures.may_leave(A) and not node.departures.may_leave(B)


def test_only_one_removed_by_force_is_cut_and_only_for_a_while() -> None:
    node = Node()
    node.departures.left(A)
    node.departures.left(B, is_forced=True)
    assert node.departures.cut == ["b"]
    node.now_s += CUT_S
    assert node.departures.cut == []


def test_who_has_left_is_remembered_in_the_order_of_leaving_and_then_forgotten() -> None:
    node = Node()
    node.departures.left(A)
    node.now_s += 10
    node.departures.left(B)
    node.now_s += 10
    node.departures.left(A)
    assert list(node.departures.departed) == ["http://b:1", "http://a:1"]
    node.now_s += SERIES_KEPT_S - 10
    assert list(node.departures.departed) == ["http://a:1"]
