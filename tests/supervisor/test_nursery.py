"""Children of one kind that start together: forked from one process, which ends, and ours from then on."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable, Iterator
from glob import glob
from pathlib import Path

import pytest

from meshd.control import ProcessBoard, Role, State, Topology
from meshd.log import Log
from meshd.supervisor.child import Child, ChildSpec
from meshd.supervisor.children import Children
from meshd.supervisor.orphans import Orphans, become_subreaper

COUNT = 3


class Litter:
    """I/O processes of a node that starts."""

    def __init__(self, module: str, record: Path) -> None:
        topology = Topology.of(COUNT, 1)
        self.board = ProcessBoard.create(topology.board_seats)
        self.record = record
        program = ("-m", "meshd.birth", module, str(record))
        fds = {"board": self.board.segment.fd}
        specs = [
            ChildSpec(role=Role.IO, index=seat, seat=seat, program=program, fds=fds, may_be_forked=True)
            for seat in range(COUNT)
        ]
        log, orphans = Log("test", stream_fd=2), Orphans(self.board, topology)
        self.children = Children(specs, self.board, topology, {}, orphans, log, lambda: None)
        self.children.start_due(lambda child: True)

    def wait_until(self, is_so: Callable[[], bool]) -> None:
        end = time.monotonic() + 30
        while not is_so():
            assert time.monotonic() < end
            select.select([child.link for child in self.children.living if child.link], [], [], 0.02)
            for child in self.children.living:
                self.children.receive(child)
            self.children.reap()

    def pids(self) -> set[int]:
        return {child.process.pid for child in self.all if child.process is not None}

    @property
    def all(self) -> list[Child]:
        return self.children.all


@pytest.fixture
def bear(tmp_path: Path) -> Iterator[Callable[..., Litter]]:
    litters: list[Litter] = []

    def make(module: str = "tests.supervisor.newborn") -> Litter:
        litters.append(Litter(module, tmp_path / "record"))
        return litters[-1]

    become_subreaper()
    yield make
    for litter in litters:
        litter.children.kill(Role.IO)
        litter.wait_until(lambda litter=litter: not litter.children.living)


def test_children_that_start_together_are_forked_from_one_and_are_ours_when_it_has_ended(bear):
    litter = bear()
    [nursery] = litter.pids()
    litter.wait_until(lambda: all(child.is_loaded for child in litter.all))
    assert len(litter.pids() - {nursery}) == COUNT
    for child in litter.all:
        row = litter.board.row(child.spec.seat)
        stat = Path(f"/proc/{row.pid}/stat").read_text()
        assert row.pid == child.process.pid and int(stat.rpartition(")")[2].split()[1]) == os.getpid()
    litter.children.let_traffic_in()
    litter.wait_until(lambda: all(child.is_ready for child in litter.all))
    assert litter.record.read_text().split("\n").count("io ready") == COUNT


def test_no_child_holds_the_link_of_another(bear):
    litter = bear()
    litter.wait_until(lambda: all(child.is_loaded for child in litter.all))
    victim = litter.all[0]
    link = victim.link.dup()
    os.kill(victim.process.pid, signal.SIGKILL)
    assert select.select([link], [], [], 20)[0] and link.recv(100) == b""
    link.close()


def test_a_child_that_dies_is_followed_by_one_that_is_started_alone(bear):
    litter = bear()
    litter.wait_until(lambda: all(child.is_loaded for child in litter.all))
    litter.children.let_traffic_in()
    victim, *others = litter.all
    former, stay = victim.process.pid, [child.process.pid for child in others]
    os.kill(former, signal.SIGKILL)
    litter.wait_until(lambda: not victim.is_alive)
    litter.children.start_due(lambda child: True)
    assert victim.process.pid not in {former, *stay}
    litter.wait_until(lambda: victim.is_ready)
    assert [child.process.pid for child in others] == stay


def test_a_nursery_that_cannot_import_is_a_failed_boot_of_each_and_nobody_waits_for_it(bear):
    litter = bear("tests.supervisor.nobody")
    litter.wait_until(lambda: not litter.children.living)
    assert [child.failed_boots for child in litter.all] == [1] * COUNT
    assert all(litter.board.row(child.spec.seat).state is State.GONE for child in litter.all)
    litter.children.start_due(lambda child: True)
    assert len(litter.pids()) == COUNT, "each is tried alone"


def test_a_child_that_its_nursery_could_not_tell_of_ends_before_it_begins(bear):
    """Its seat is somebody else's by then."""
    before = own_children()  # that other tests have left
    litter = bear("tests.supervisor.untold")
    litter.wait_until(lambda: not litter.children.living)
    assert [child.failed_boots for child in litter.all] == [1] * COUNT
    litter.wait_until(lambda: own_children() <= before)
    assert not litter.record.exists() or not litter.record.read_text()


def own_children() -> set[str]:
    paths = glob(f"/proc/{os.getpid()}/task/*/children")
    return {pid for path in paths for pid in Path(path).read_text().split()}


def test_a_child_that_is_born_of_a_nursery_condemned_for_its_silence_can_be_condemned_again(bear):
    litter = bear()
    for child in litter.all:
        child.is_condemned = True
    litter.wait_until(lambda: all(child.is_loaded for child in litter.all))
    assert not any(child.is_condemned for child in litter.all)


def test_children_can_be_killed_before_they_are_born(bear):
    litter = bear()
    litter.children.kill(Role.IO)
    litter.wait_until(lambda: not litter.children.living)
    assert not litter.pids()
