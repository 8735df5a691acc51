from __future__ import annotations

from typing import Any

import pytest

from meshd.errors import MeshError


def test_reserved_bytes_stay_within_the_bound_over_processes(node: Any) -> None:
    one, other = node.gate(0).memory, node.gate(1).memory
    assert one.reserve(600) and not other.reserve(401) and other.reserve(400)
    assert (one.reserved_bytes, other.reserved_bytes) == (600, 400)
    one.release(600)
    assert other.reserve(600)


def test_known_length_waits_its_turn_and_a_growing_body_does_not(node: Any) -> None:
    memory = node.gate().memory
    assert memory.reserve(700)
    ended: list[MeshError | None] = []
    memory.wait(500, 10**18, ended.append)
    assert not memory.reserve(100)
    assert memory.grow(100) and not memory.grow(300)
    memory.release(800)
    assert ended == [None] and memory.reserved_bytes == 500


def test_wait_that_lasts_too_long_is_a_refusal_with_advice(node: Any) -> None:
    gate = node.gate()
    assert gate.memory.reserve(1000)
    ended: list[MeshError] = []
    gate.memory.wait(1, node.clock() + 5, ended.append)
    node.clock.now_ns += 5
    gate.poll()
    assert [(error.code, error.status, error.retry_after_s) for error in ended] == [
        ("buffer_budget_exhausted", 503, 1)
    ]
    assert gate.memory.reserved_bytes == 1000


def test_closing_refuses_and_leaving_gives_the_turn_on(node: Any) -> None:
    gate = node.gate()
    assert gate.memory.reserve(1000)
    ended: list[MeshError | None] = []
    place = gate.memory.wait(1000, 10**18, ended.append)
    gate.memory.wait(10, 10**18, ended.append)
    gate.memory.release(10)
    assert gate.memory.leave(place) and ended == [None]
    gate.memory.wait(100, 10**18, ended.append)
    gate.close()
    assert isinstance(ended[1], MeshError) and ended[1].code == "admission_closed"


def test_more_than_the_bound_is_never_granted_and_never_waited_for(node: Any) -> None:
    memory = node.gate().memory
    assert not memory.reserve(1001)
    with pytest.raises(ValueError, match="never"):
        memory.wait(1001, 10**18, lambda _: None)
    with pytest.raises(RuntimeError, match="given back"):
        memory.release(1)
