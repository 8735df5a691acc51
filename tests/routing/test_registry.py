from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from meshd.config.urls import normalize_url
from meshd.memory import Segment
from meshd.routing.registry import Registry, RegistryBoard, Upstream

MakeUpstream = Callable[..., Upstream]
BYTES = 4 << 20


@pytest.fixture
def segment() -> Segment:
    return Segment.create("registry", BYTES)


def test_unknown_model_serves_any_name_and_a_named_one_only_its_own(make_upstream: MakeUpstream) -> None:
    any_model = make_upstream(0, models=("unknown",))
    named = make_upstream(1, models=("m1", "m2"))
    pending = make_upstream(2, models=())
    registry = Registry(1, [any_model, named, pending])
    assert registry.serving("m2") == (any_model, named, pending)
    assert registry.serving("other") == (any_model, pending)
    assert registry.serving("") == (any_model, named, pending)
    assert Registry(1, [named]).serving("M1") == ()
    assert registry.lists_model("m1") and not registry.lists_model("other")


def test_ranks_of_one_origin_are_found_by_their_own_url(make_upstream: MakeUpstream) -> None:
    ranks = [make_upstream(rank, base_url="http://h:1", dp_rank=rank) for rank in range(2)]
    registry = Registry(1, [*ranks, make_upstream(2)])
    assert registry.by_url["http://h:1@1"] is ranks[1]


def test_ring_is_shared_between_generations_with_the_same_urls(make_upstream: MakeUpstream) -> None:
    first = Registry(1, [make_upstream(0), make_upstream(1)])
    ring = first.ring
    same = Registry(2, [make_upstream(0, is_healthy=False), make_upstream(1)], first)
    assert same.ring is ring
    grown = Registry(3, [make_upstream(0), make_upstream(1), make_upstream(2)], same)
    assert grown.ring.urls == grown.by_url.keys()
    assert first.ring is ring


def test_board_without_a_publication_reads_as_generation_zero(segment: Segment) -> None:
    registry = RegistryBoard(segment).read()
    assert (registry.generation, registry.upstreams) == (0, ())


def test_reader_sees_each_publication_and_keeps_an_unchanged_one(
    segment: Segment, make_upstream: MakeUpstream
) -> None:
    writer, reader = RegistryBoard(segment), RegistryBoard(segment)
    upstreams = [make_upstream(0, labels={"policy": "random"}, api_key="k"), make_upstream(1, dp_rank=1)]
    assert writer.publish(upstreams) == reader.generation() == 1
    first = reader.read()
    assert first.upstreams == tuple(upstreams)
    assert reader.read() is first
    assert writer.publish(upstreams[:1]) == 2
    assert reader.read().upstreams == tuple(upstreams[:1])
    assert first.upstreams == tuple(upstreams)


def test_successor_of_the_writer_goes_on_from_the_published_generation(
    segment: Segment, make_upstream: MakeUpstream
) -> None:
    RegistryBoard(segment).publish([make_upstream(0), make_upstream(1, is_healthy=False)])
    successor = RegistryBoard(segment)
    found = successor.read()
    assert [upstream.is_healthy for upstream in found.upstreams] == [True, False]
    assert successor.publish(found.upstreams) == 2


def test_two_writings_of_one_url_or_one_number_cannot_both_be_registered(
    segment: Segment, make_upstream: MakeUpstream
) -> None:
    board = RegistryBoard(segment)
    one = make_upstream(0, base_url=normalize_url("http://h:1"))
    other = make_upstream(1, base_url=normalize_url("http://H:1/"))
    with pytest.raises(ValueError, match="one url"):
        board.publish([one, other])
    with pytest.raises(ValueError, match="one number"):
        board.publish([make_upstream(0), make_upstream(0, base_url="http://h:2")])
    assert board.generation() == 0


def test_a_set_that_does_not_fit_is_refused_and_the_old_one_stays(
    segment: Segment, make_upstream: MakeUpstream
) -> None:
    board = RegistryBoard(segment)
    board.publish([make_upstream(0)])
    with pytest.raises(ValueError, match="does not fit"):
        board.publish([make_upstream(0, labels={"x": "y" * BYTES})])
    assert RegistryBoard(segment).read().upstreams == (make_upstream(0),)


def test_a_thousand_upstreams_fit_the_smallest_segment(segment: Segment, make_upstream: MakeUpstream) -> None:
    fleet = [make_upstream(n, base_url=f"http://upstream-{n}.example.internal:8000") for n in range(1024)]
    RegistryBoard(segment).publish(fleet)
    assert RegistryBoard(segment).read().upstreams == tuple(fleet)


class _Died(Exception):
    pass


class _MortalStores:
    """Stores into a shared view until ``lives`` are spent, then dies *instead of* the next one."""

    def __init__(self, view: memoryview, lives: list[int]) -> None:
        self._view, self._lives = view, lives

    def __getitem__(self, key: Any) -> Any:
        return self._view[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        if not self._lives[0]:
            raise _Died
        self._lives[0] -= 1
        self._view[key] = value


def test_writer_that_dies_at_any_store_leaves_a_whole_generation(make_upstream: MakeUpstream) -> None:
    old, new, newer = ([make_upstream(n) for n in range(count)] for count in (1, 2, 3))
    outcomes = []
    for lives in range(20):
        segment = Segment.create("registry", BYTES)
        for _ in range(3):  # so that both buffers have been used
            RegistryBoard(segment).publish(old)
        left = [lives]
        mortal: Any = SimpleNamespace(
            words=_MortalStores(segment.words, left),
            bytes=_MortalStores(segment.bytes, left),
            size=segment.size,
        )
        try:
            RegistryBoard(mortal).publish(new)
            outcomes.append("published")
        except _Died:
            outcomes.append("died")
            assert RegistryBoard(segment).read().upstreams == tuple(old)
        successor = RegistryBoard(segment)
        successor.publish(newer)
        assert RegistryBoard(segment).read().upstreams == tuple(newer)
        segment.close()
    assert outcomes.count("died") >= 5 and outcomes[-1] == "published"


def test_damaged_memory_is_an_error_and_not_half_a_registry(
    segment: Segment, make_upstream: MakeUpstream
) -> None:
    RegistryBoard(segment).publish([make_upstream(0)])
    found = bytes(segment.bytes).index(b"10.0.0.1")
    segment.bytes[found : found + 8] = b"10.0.0.9"
    with pytest.raises(RuntimeError, match="damaged"):
        RegistryBoard(segment).read()


def test_readers_beside_a_racing_and_killed_writer_never_see_half(
    make_upstream: MakeUpstream, fork: Callable[[Callable[[], int]], int]
) -> None:
    segment = Segment.create("registry", BYTES)
    reader = RegistryBoard(segment)
    rng = random.Random(3)
    seen = 0
    for _ in range(8):
        pid = fork(partial(_publish_for_ever, segment, make_upstream))
        try:
            seen += _read_for(reader, rng.randrange(20, 120))
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        _assert_whole(RegistryBoard(segment).read())
    assert seen > 8


def _read_for(reader: RegistryBoard, generations: int) -> int:
    """Read until so many generations went by; return how many different ones were seen."""
    last = reader.read().generation
    target, seen = last + generations, 0
    while last < target:
        registry = reader.read()
        assert registry.generation >= last
        seen += registry.generation != last
        last = registry.generation
        _assert_whole(registry)
    return seen


def _publish_for_ever(segment: Segment, make_upstream: MakeUpstream) -> int:
    board = RegistryBoard(segment)
    while True:
        generation = board.generation() + 1
        board.publish(
            [make_upstream(n, id=str(generation)) for n in range(1 + generation % 5)],
        )


def _assert_whole(registry: Registry) -> None:
    if registry.generation:
        assert [u.id for u in registry.upstreams] == [str(registry.generation)] * (
            1 + registry.generation % 5
        )
