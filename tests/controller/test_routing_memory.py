from __future__ import annotations

import asyncio
from collections.abc import Callable

import orjson
import pytest

from meshd.api.block_keys import block_keys
from meshd.controller.admin import AdminRoutes
from meshd.controller.http_server import Request, Response
from meshd.controller.routing_memory import RoutingMemory
from meshd.log import Log
from meshd.memory import Segment
from meshd.routing.prefix_index import MIN_BYTES, PrefixIndex, segment_bytes
from meshd.routing.sessions import ASSIGNMENT_PATH, SessionId, SessionLedger
from meshd.routing.sessions import segment_bytes as sessions_bytes

KEYS = block_keys("m", b"a" * 1000)


class Node:
    """What an I/O process and a controller share, with a clock that a test moves."""

    def __init__(self) -> None:
        index = Segment.create("prefix_index", segment_bytes(MIN_BYTES, 1))
        self._sessions = Segment.create("sessions", sessions_bytes())
        self.index = PrefixIndex(index, 0, 1, MIN_BYTES)
        self._swept = PrefixIndex(index, 1, 1, MIN_BYTES)
        self.current = {1, 2}
        self.now_s = 0.0

    def memory(self) -> RoutingMemory:
        memory = RoutingMemory(
            self._swept,
            SessionLedger(self._sessions),
            lambda: self.current,
            lambda number: 0,
            120.0,
            lambda: self.now_s,
        )
        memory.start()
        return memory

    def held(self, number: int) -> int:
        return self.index.matched_bytes(KEYS, 1000, number)


@pytest.fixture
def node() -> Node:
    return Node()


@pytest.fixture
def memory(node: Node) -> RoutingMemory:
    return node.memory()


def _look(memory: RoutingMemory) -> None:
    asyncio.run(memory._look())


def _ask(memory: RoutingMemory, body: bytes) -> Response:
    routes = AdminRoutes(memory.routes(), Log("test", "error", False))
    return asyncio.run(routes.handle(Request("POST", ASSIGNMENT_PATH, "", {}, body)))


def _question(key: str, *candidates: int) -> bytes:
    return orjson.dumps({"session": [*SessionId.of(key.encode())], "candidates": candidates})


def test_a_number_rests_until_nothing_remembers_its_former_owner(node: Node, memory: RoutingMemory) -> None:
    node.index.insert(KEYS, 2)
    assert memory.is_clean(3)
    assert not memory.is_clean(2)
    node.current = {1}
    assert not memory.is_clean(2)
    _look(memory)
    assert memory.is_clean(2)
    assert node.held(2) == 0


def test_sessions_of_who_has_left_are_forgotten(node: Node, memory: RoutingMemory) -> None:
    _ask(memory, _question("a", 2))
    _ask(memory, _question("b", 1))
    node.current = {1}
    _look(memory)
    assert memory.values()["mesh_sessions_active"] == {(): 1.0}


def test_a_successor_forgets_whom_its_predecessor_had_no_time_to_forget(node: Node) -> None:
    node.index.insert(KEYS, 2)
    node.current = {1}
    node.memory()
    assert node.held(2) == 0


def test_a_late_entry_of_an_upstream_that_has_left_is_swept_in_time(
    node: Node, memory: RoutingMemory
) -> None:
    node.current = {1}
    _look(memory)
    node.index.insert(KEYS, 2)
    _look(memory)
    assert node.held(2) == 1000
    node.now_s = 121.0
    _look(memory)
    assert node.held(2) == 0


def test_flushed_caches_are_forgotten_and_others_kept(node: Node, memory: RoutingMemory) -> None:
    node.index.insert(KEYS, 1)
    node.index.insert(KEYS, 2)
    memory.forget_cached([2])
    _look(memory)
    assert (node.held(1), node.held(2)) == (1000, 0)
    assert not memory.is_clean(2)


def test_a_session_is_assigned_once(memory: RoutingMemory) -> None:
    first = dict(_ask(memory, _question("s", 1, 2)).headers)["x-mesh-assigned"]
    assert first == "1"
    assert dict(_ask(memory, _question("s", 2, 1)).headers)["x-mesh-assigned"] == first
    assert dict(_ask(memory, _question("t", 1, 2)).headers)["x-mesh-assigned"] == "2"


def test_a_rehearsed_assignment_is_told_and_not_kept(memory: RoutingMemory) -> None:
    _ask(memory, _question("s", 1, 2))
    question = orjson.loads(_question("t", 1, 2))
    for _ in range(3):
        answer = _ask(memory, orjson.dumps({**question, "rehearsed": True}))
        assert dict(answer.headers)["x-mesh-assigned"] == "2"
    assert memory.values()["mesh_sessions_active"] == {(): 1.0}


def test_without_candidates_nothing_is_assigned(memory: RoutingMemory) -> None:
    answer = _ask(memory, _question("s"))
    assert answer.status == 200
    assert "x-mesh-assigned" not in dict(answer.headers)


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"session":[1],"candidates":[1]}', b'{"session":1}'])
def test_what_is_no_question_is_refused(memory: RoutingMemory, body: bytes) -> None:
    assert _ask(memory, body).status == 400


def test_the_gauges_tell_entries_and_limit(node: Node, memory: RoutingMemory) -> None:
    node.index.insert(KEYS, 1)
    values = memory.values()
    assert values["mesh_prefix_index_entries"] == {(): 8.0}
    assert values["mesh_prefix_index_limit_bytes"] == {(): float(MIN_BYTES)}


def test_it_looks_again_and_again_until_cancelled(node: Node, memory: RoutingMemory) -> None:
    async def play(wait: Callable[[], bool]) -> None:
        task = asyncio.create_task(memory.run())
        async with asyncio.timeout(10):
            while not wait():
                await asyncio.sleep(0.01)
        task.cancel()

    node.index.insert(KEYS, 2)
    node.current = {1}
    asyncio.run(play(lambda: node.held(2) == 0))
