"""Which CPUs go to whom."""

from __future__ import annotations

import os

import pytest

from bench import BenchError
from bench.cpu_sets import Cpus, choose_cpus, one_thread_a_core, parse_cpu_list, parse_cpus, share_out


def test_two_cpus_leave_one_for_backend_and_load() -> None:
    cpus = share_out([0, 1], [0, 1], front=1)
    assert cpus == Cpus((0,), (1,), (1,))
    assert (cpus.are_backend_and_load_apart, cpus.is_front_alone) == (False, True)


def test_three_cpus_are_three_sets() -> None:
    assert share_out([3, 4, 5], [3, 4, 5], front=1) == Cpus((3,), (4,), (5,))


def test_siblings_are_left_out_where_there_are_cores_enough() -> None:
    available = list(range(8))
    cores = one_thread_a_core(available, [(0, 4), (1, 5), (2, 6), (3, 7)])
    assert cores == [0, 1, 2, 3]
    assert share_out(available, cores, front=1) == Cpus((0,), (1,), (2, 3))


def test_siblings_are_used_where_cores_are_too_few() -> None:
    cores = one_thread_a_core([0, 1, 2, 3], [(0, 1), (2, 3)])
    assert share_out([0, 1, 2, 3], cores, front=1) == Cpus((0,), (1,), (2, 3))


def test_a_sibling_that_may_not_be_used_is_no_core_less() -> None:
    assert one_thread_a_core([1, 3], [(0, 1), (2, 3)]) == [1, 3]


def test_a_large_node_keeps_three_cpus_of_load_for_each_of_the_front_end() -> None:
    cpus = share_out(list(range(112)), list(range(56)), front=4)
    assert (len(cpus.front), len(cpus.backend), len(cpus.load)) == (4, 4, 8)
    assert len({*cpus.front, *cpus.backend, *cpus.load}) == 16


def test_one_cpu_is_too_few() -> None:
    with pytest.raises(BenchError, match="2 CPUs are needed"):
        share_out([0], [0], front=1)


def test_cpu_lists_have_ranges() -> None:
    assert parse_cpu_list("0-3,8,2\n") == (0, 1, 2, 3, 8)


def test_cpus_are_given_in_two_or_three_parts() -> None:
    available = list(range(6))
    assert parse_cpus("0,1", available) == Cpus((0,), (1,), (1,))
    assert parse_cpus("0-1/2,3", available) == Cpus((0, 1), (2, 3), (2, 3))
    assert parse_cpus("0-1/2/3-5", available) == Cpus((0, 1), (2,), (3, 4, 5))


@pytest.mark.parametrize("text", ["0", "0,9", "a/b", "0/1/2/3", "0-1/1-2", ""])
def test_cpus_that_make_no_sense_are_refused(text: str) -> None:
    with pytest.raises(BenchError, match="--cpus wants"):
        parse_cpus(text, [0, 1, 2, 3])


def test_the_same_cpu_twice_is_refused() -> None:
    only = min(os.sched_getaffinity(0))
    with pytest.raises(BenchError, match="different CPUs"):
        choose_cpus(f"{only},{only}")
