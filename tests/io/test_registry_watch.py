"""What follows from a new generation of the set."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace

from meshd.io.registry_watch import RegistryWatch
from meshd.routing.registry import Registry
from meshd.routing.upstream import Upstream

A = Upstream(0, "id-a", "http://a:1", state="active")
B = Upstream(1, "id-b", "http://b:1", state="active")
RANKS = [replace(A, number=n, id=f"rank-{n}", dp_rank=n, origin_id="id-a") for n in range(2)]


@dataclass
class PlayedRequest:
    at: str
    causes: list[str] = field(default_factory=list)

    def cut_off(self, removed: Collection[str], cause: str) -> None:
        if self.at in removed:
            self.causes.append(cause)


@dataclass
class Process:
    registry: Registry = field(default_factory=lambda: Registry(1, (A, B)))
    closed: list[str] = field(default_factory=list)
    running: list[PlayedRequest] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.watch = RegistryWatch(lambda: self.registry, self.closed.append, lambda: self.running)
        self.watch.check()

    def see(self, *upstreams: Upstream, cut: tuple[str, ...] = ()) -> None:
        self.registry = Registry(self.registry.generation + 1, upstreams, cut=cut)
        self.watch.check()
        self.watch.check()


def test_idle_connections_to_a_draining_origin_are_closed_also_those_of_requests_that_end() -> None:
    process = Process()
    process.see(replace(A, state="draining"), B)
    process.closed.clear()
    process.watch.check()
    assert process.closed == ["http://a:1"]
    process.see(B)  # what ended last
    process.closed.clear()
    process.watch.check()
    assert process.closed == []


def test_connections_stay_while_one_rank_of_the_origin_takes_requests() -> None:
    process = Process(Registry(1, RANKS))
    process.see(replace(RANKS[0], state="draining"), RANKS[1])
    assert process.closed == []
    process.see(*(replace(rank, state="draining") for rank in RANKS))
    assert set(process.closed) == {"http://a:1"}


def test_requests_on_an_upstream_removed_by_force_are_cut_and_no_others() -> None:
    process = Process()
    process.running = [PlayedRequest("id-a"), PlayedRequest("id-b"), PlayedRequest("")]
    process.see(B, cut=("id-a",))
    assert [request.causes for request in process.running] == [
        ["the upstream was removed by force"],
        [],
        [],
    ]
    assert process.closed == ["http://a:1"]


def test_drained_upstream_that_leaves_cuts_nothing() -> None:
    process = Process()
    process.running = [PlayedRequest("id-a")]
    process.see(B)
    assert process.running[0].causes == []
