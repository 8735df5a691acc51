"""Bounds are of a process, so each test has one of its own."""

from __future__ import annotations

import resource
from collections.abc import Callable

from meshd.prepare.child_answers import answers_of_child
from meshd.prepare.memory_bound import JobMemory, bound_data, data_bytes

MIB = 1 << 20


def can_have(size: int) -> str:
    try:
        return str(len(bytearray(size)) == size)
    except MemoryError:
        return "MemoryError"


def in_child(work: Callable[[], list[str]]) -> list[str]:
    return answers_of_child(work, 30.0)


def test_what_is_above_the_bound_is_a_memory_error_and_the_process_goes_on() -> None:
    def work() -> list[str]:
        bound_data(data_bytes() + 100 * MIB)
        return [can_have(200 * MIB), can_have(50 * MIB)]

    assert in_child(work) == ["MemoryError", "True"]


def test_a_large_body_has_a_larger_bound_and_the_next_small_one_has_not() -> None:
    def work() -> list[str]:
        memory = JobMemory(100 * MIB, 10, MIB)
        found = []
        for body_bytes in (MIB, 20 * MIB, MIB, 0):
            memory.prepare_for(body_bytes)
            found.append(can_have(200 * MIB))
        return found

    assert in_child(work) == ["MemoryError", "True", "MemoryError", "MemoryError"]


def test_a_hard_limit_of_the_operator_stays_the_limit() -> None:
    def work() -> list[str]:
        hard = data_bytes() + 200 * MIB
        resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))
        bound_data(hard * 2)
        return [str(resource.getrlimit(resource.RLIMIT_DATA) == (hard, hard)), can_have(300 * MIB)]

    assert in_child(work) == ["True", "MemoryError"]
