from __future__ import annotations

import random

import pytest

from meshd.cpus import (
    CpuTopology,
    cap_by_quota,
    fill_groups,
    format_cpu_list,
    plan_cpus,
    read_topology,
)
from meshd.errors import StartupError


def machine(nodes: int, cores: int, threads: int = 2) -> CpuTopology:
    """Number CPUs as Linux does on Xeons: first threads of all cores, node by node, then the second ones."""
    core_of, node_of = {}, {}
    for thread in range(threads):
        for core in range(nodes * cores):
            cpu = thread * nodes * cores + core
            core_of[cpu] = core
            node_of[cpu] = core // cores
    return CpuTopology(core_of, node_of)


XEON = machine(2, 56)
EVERY_XEON_CPU = range(224)


def cores_of(topology, cpus):
    return {topology.core(cpu) for cpu in cpus}


def test_sixteen_cpus_give_eight_and_eight_pinned_to_disjoint_cpus_with_siblings_together():
    topology = machine(1, 8)
    plan = plan_cpus(range(16), topology)
    assert sorted(plan.io_pins) == sorted(plan.io_cpus) and len(plan.io_pins) == 8
    assert sorted(plan.prepare_pins) == sorted(plan.prepare_cpus) and len(plan.prepare_pins) == 8
    assert not set(plan.io_cpus) & set(plan.prepare_cpus)
    assert not cores_of(topology, plan.io_cpus) & cores_of(topology, plan.prepare_cpus)
    assert plan.warnings == ()


def test_one_cpu_runs_one_of_each_and_says_that_they_share_it():
    plan = plan_cpus([5], CpuTopology({}, {}))
    assert (plan.io_pins, plan.prepare_pins) == ((5,), (5,))
    assert any("share CPU 5" in warning for warning in plan.warnings)


def test_a_quota_of_two_on_64_cpus_gives_one_and_one():
    topology = machine(1, 32)
    available = cap_by_quota(range(64), 2.0, topology)
    plan = plan_cpus(available, topology)
    assert (len(plan.io_pins), len(plan.prepare_pins)) == (1, 1)
    assert set(plan.io_pins) != set(plan.prepare_pins)


def test_a_large_machine_is_cut_in_two_on_each_node_and_groups_stay_on_one():
    plan = plan_cpus(EVERY_XEON_CPU, XEON)
    assert (len(plan.io_pins), len(plan.prepare_pins), len(plan.groups)) == (112, 112, 28)
    assert len(set(plan.io_pins)) == len(set(plan.prepare_pins)) == 112
    for node in (0, 1):
        assert sum(XEON.node(cpu) == node for cpu in plan.io_cpus) == 56
    for group in plan.groups:
        assert len({XEON.node(plan.prepare_pins[worker]) for worker in group}) == 1
    assert not cores_of(XEON, plan.io_cpus) & cores_of(XEON, plan.prepare_cpus)


def test_fewer_processes_than_cpus_take_free_cores_and_nodes_in_turn():
    plan = plan_cpus(EVERY_XEON_CPU, XEON, io_processes=8, prepare_workers=16)
    assert len(cores_of(XEON, plan.io_pins)) == 8
    assert [XEON.node(cpu) for cpu in plan.io_pins] == [0, 1] * 4
    assert len(cores_of(XEON, plan.prepare_pins)) == 16


def test_a_cut_that_would_divide_a_core_moves_up():
    topology = machine(1, 3)
    plan = plan_cpus(range(6), topology)
    assert (len(plan.io_cpus), len(plan.prepare_cpus)) == (4, 2)
    assert not cores_of(topology, plan.io_cpus) & cores_of(topology, plan.prepare_cpus)


def test_two_siblings_of_one_core_are_parted_rather_than_shared():
    plan = plan_cpus([0, 1], machine(1, 1))
    assert (plan.io_pins, plan.prepare_pins) == ((0,), (1,))


def test_an_io_list_alone_gives_as_many_processes_and_leaves_the_rest_to_preparation():
    plan = plan_cpus(range(16), machine(1, 8), io_cpus="0-3")
    assert sorted(plan.io_pins) == [0, 1, 2, 3]
    assert set(plan.prepare_cpus) == set(range(4, 16))
    assert len(plan.prepare_pins) == 8


def test_a_prepare_list_alone_gives_as_many_workers():
    plan = plan_cpus(range(16), machine(1, 8), prepare_cpus="14,15")
    assert sorted(plan.prepare_pins) == [14, 15]
    assert len(plan.io_pins) == 8 and not set(plan.io_cpus) & {14, 15}


def test_a_list_of_everything_leaves_the_other_side_no_choice_but_to_share():
    plan = plan_cpus(range(4), machine(1, 2), io_cpus="0-3")
    assert set(plan.prepare_cpus) == {0, 1, 2, 3}
    assert any("share CPU 0-3" in warning for warning in plan.warnings)


def test_more_processes_than_cpus_share_evenly_with_a_warning():
    plan = plan_cpus(range(4), machine(1, 4, threads=1), io_processes=5, prepare_workers=4)
    assert sorted(plan.io_pins.count(cpu) for cpu in plan.io_cpus) == [2, 3]
    assert sorted(plan.prepare_pins.count(cpu) for cpu in plan.prepare_cpus) == [2, 2]
    assert len(plan.warnings) == 2


@pytest.mark.parametrize(
    ("lists", "message"),
    [
        ({"io_cpus": "0-3", "prepare_cpus": "3-5"}, "overlap in 3"),
        ({"io_cpus": "0,9-11"}, "--io-cpus: CPU 9-11 is not available; this process may use 0-7"),
        ({"prepare_cpus": "1-"}, "--prepare-cpus: '1-' is not a list of CPUs"),
    ],
)
def test_impossible_lists_are_configuration_errors(lists, message):
    with pytest.raises(StartupError, match=message) as caught:
        plan_cpus(range(8), machine(1, 4), **lists)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("seed", range(50))
def test_any_plan_stays_inside_what_is_available(seed):
    dice = random.Random(seed)
    topology = machine(dice.randint(1, 4), dice.randint(1, 8), dice.randint(1, 2))
    available = dice.sample(sorted(topology.core_of), dice.randint(1, len(topology.core_of)))
    plan = plan_cpus(
        available, topology, dice.randint(0, 9), dice.randint(0, 9), group_size=dice.randint(1, 5)
    )
    assert set(plan.io_pins) <= set(plan.io_cpus) <= set(available)
    assert set(plan.prepare_pins) <= set(plan.prepare_cpus) <= set(available)
    assert {*plan.io_cpus, *plan.prepare_cpus} == set(available)
    assert sorted(worker for group in plan.groups for worker in group) == list(range(len(plan.prepare_pins)))
    is_disjoint = not set(plan.io_cpus) & set(plan.prepare_cpus)
    assert is_disjoint == (len(available) > 1)


def test_groups_are_filled_evenly():
    assert [len(group) for group in fill_groups(9, 4)] == [3, 3, 3]
    assert fill_groups(1, 4) == ((0,),)
    assert fill_groups(5, 4) == ((0, 1), (2, 3, 4))


def test_a_quota_keeps_cores_whole_and_rotation_moves_its_place():
    topology = machine(1, 8)
    assert cores_of(topology, cap_by_quota(range(16), 4, topology)) == {0, 1}
    assert cores_of(topology, cap_by_quota(range(16), 3.2, topology, rotation=7)) == {7, 0}
    assert len(cap_by_quota(range(16), 0.5, topology)) == 1
    assert cap_by_quota([3, 1], None, topology) == (1, 3)
    assert len(cap_by_quota(range(16), 99, topology)) == 16


def test_cpu_lists_are_written_in_the_format_of_the_kernel():
    assert format_cpu_list([16, 2, 0, 1, 4]) == "0-2,4,16"
    assert format_cpu_list([]) == ""


def test_topology_is_read_from_sysfs_and_what_is_missing_counts_as_a_core_of_one_node(tmp_path):
    for cpu, siblings in ((0, "0,2"), (1, "1,3"), (2, "0,2"), (3, "1,3")):
        directory = tmp_path / f"cpu/cpu{cpu}/topology"
        directory.mkdir(parents=True)
        (directory / "thread_siblings_list").write_text(siblings + "\n")
    for node, listed in ((0, "0,2"), (1, "1,3"), (2, "")):  # node 2 has memory alone
        (tmp_path / f"node/node{node}").mkdir(parents=True)
        (tmp_path / f"node/node{node}/cpulist").write_text(listed + "\n")
    topology = read_topology(range(5), tmp_path)
    assert topology.order(range(5)) == (0, 2, 4, 1, 3)
    assert topology.core(3) == 1 and topology.core(4) == 4
