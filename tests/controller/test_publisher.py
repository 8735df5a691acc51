"""When the set is published, who is told, and who waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from meshd.controller.publisher import Publisher
from meshd.memory import Segment
from meshd.routing.registry import SEGMENT_BYTES, RegistryBoard, Upstream
from tests.fakes.upstream_set import quiet_log


class Node:
    """A publisher of ``upstreams``; what it schedules runs when the test says so."""

    def __init__(self) -> None:
        self.upstreams: list[Upstream] = []
        self.due: list[Callable[[], None]] = []
        self.told: list[str] = []
        self.publisher = Publisher(
            RegistryBoard(Segment.create("registry", SEGMENT_BYTES)),
            quiet_log(),
            lambda: (self.upstreams, (), {}),
            lambda _delay_s, call: self.due.append(call),
            lambda: self.told.append("bells"),
        )
        self.publisher.subscribe(lambda: self.told.append("listener"))


def test_changes_until_the_publication_are_one_generation() -> None:
    node = Node()
    before = node.publisher.read().generation
    for number in range(3):
        node.upstreams.append(Upstream(number, f"u{number}", f"http://u{number}:1"))
        node.publisher.soon()
    (publish,) = node.due
    publish()
    registry = node.publisher.read()
    assert (registry.generation, len(registry.upstreams)) == (before + 1, 3)
    assert node.told == ["bells", "listener"]


def test_a_set_that_cannot_be_published_leaves_the_last_in_force_and_rings_nobody() -> None:
    node = Node()
    node.upstreams = [Upstream(1, "u1", "http://a:1")]
    node.publisher.now()
    node.upstreams = [Upstream(1, "u1", "http://a:1"), Upstream(2, "u2", "http://a:1")]
    node.publisher.now()
    assert [each.number for each in node.publisher.read().upstreams] == [1]
    assert node.told == ["bells", "listener", "listener"]


def test_who_waits_goes_on_when_the_change_is_in_force_and_at_once_without_one() -> None:
    async def scene() -> None:
        node = Node()
        await node.publisher.published()
        node.publisher.soon()
        waiting = asyncio.ensure_future(node.publisher.published())
        await asyncio.sleep(0)
        assert not waiting.done()
        node.due.pop()()
        await waiting

    asyncio.run(scene())


def test_what_is_scheduled_is_published_at_the_end_and_nothing_else() -> None:
    node = Node()
    node.publisher.finish()
    assert node.told == []
    node.publisher.soon()
    node.publisher.finish()
    assert node.told == ["bells", "listener"]
