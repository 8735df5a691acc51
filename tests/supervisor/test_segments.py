from __future__ import annotations

import os

import pytest

from meshd.control import ProcessBoard, Role, Topology
from meshd.supervisor.segments import NodeMemory


@pytest.fixture
def memory():
    return NodeMemory(Topology.of(1, 1, slab_bytes=1 << 20))


def test_every_child_gets_the_same_board(memory):
    fds = {memory.fds_for(role, 0)["board"] for role in (Role.CONTROLLER, Role.IO, Role.LEADER)}
    assert len(fds) == 1
    memory.board.row(0).open(Role.IO, 0, 42, "")
    assert ProcessBoard.attach(fds.pop()).row(0).pid == 42


def test_bodies_are_for_their_io_process_and_the_leaders(memory):
    def slabs(role):
        return {name for name in memory.fds_for(role, 0) if name.startswith("slab")}

    assert slabs(Role.IO) == {"slab0"}
    assert slabs(Role.LEADER) == {"slab0", "slab1"}  # the spare seat's too
    assert slabs(Role.CONTROLLER) == set()


def test_all_bells_ring_and_a_full_one_does_not_block(memory):
    fds = memory.fds_for(Role.LEADER, 0)
    os.eventfd_write(fds["bell_io0"], 2**64 - 2)
    memory.ring_all()
    assert os.eventfd_read(fds["bell_io0"]) == 2**64 - 2
    assert [os.eventfd_read(fds[name]) for name in ("bell_io1", "bell_prepare0", "bell_prepare1")] == [
        1,
        1,
        1,
    ]


def test_nothing_shared_is_inherited_unless_it_is_passed(memory):
    assert not any(os.get_inheritable(fd) for fd in memory.fds_for(Role.LEADER, 0).values())
