"""Spawning and reaping with a fake clock; the child processes are real."""

from __future__ import annotations

import select
import signal
import time
from pathlib import Path

import pytest

from meshd.control import ProcessBoard, Role, State, Topology
from meshd.log import Log
from meshd.supervisor.child import Child, ChildSpec
from meshd.supervisor.children import Children, describe_status
from meshd.supervisor.orphans import Orphans

FAKE_CHILD = str(Path(__file__).with_name("fake_child.py"))
SECOND = 1_000_000_000


class Clock:
    def __init__(self) -> None:
        self.now_ns = time.monotonic_ns()

    def __call__(self) -> int:
        return self.now_ns


class Family:
    """One child in seat 0 of a board."""

    def __init__(self, directory: Path, program: tuple[str, ...], *, has_manifest: bool = True) -> None:
        topology = Topology.of(1, 1)
        self.clock = Clock()
        self.board = ProcessBoard.create(topology.board_seats)
        self.deaths = 0
        fds = {"board": self.board.segment.fd}
        spec = ChildSpec(
            role=Role.IO, index=0, seat=0, program=program, fds=fds, cpus=(), has_manifest=has_manifest
        )
        orphans = Orphans(self.board, topology)
        self.children = Children(
            [spec], self.board, topology, {}, orphans, Log("test", stream_fd=2), self._died, self.clock
        )
        self.children.let_traffic_in()
        self.child: Child = self.children.all[0]
        self.row = self.board.row(0)

    def _died(self) -> None:
        assert self.row.state is State.GONE  # the board knows before anyone is told
        self.deaths += 1

    def start(self) -> None:
        self.children.start_due(lambda child: True)

    def wait_ready(self) -> None:
        while not self.child.is_ready:
            assert select.select([self.child.link], [], [], 20)[0]
            self.children.receive(self.child)
            assert self.child.link is not None

    def wait_dead(self) -> None:
        while self.child.is_alive:
            assert select.select([self.child.pidfd], [], [], 20)[0]
            self.children.reap()


@pytest.fixture
def make_family(tmp_path):
    families = []

    def make(mode: str) -> Family:
        families.append(Family(tmp_path, (FAKE_CHILD, mode, str(tmp_path / "record"))))
        return families[-1]

    yield make
    for family in families:
        if family.child.is_alive:
            family.child.kill()
            family.wait_dead()


def test_a_child_goes_from_starting_to_ready_on_the_board(make_family):
    family = make_family("serve")
    family.start()
    assert family.row.pid == family.child.process.pid
    family.wait_ready()
    assert (family.row.state, family.row.role) == (State.READY, Role.IO)


def test_a_death_is_on_the_board_before_anyone_is_told(make_family):
    family = make_family("serve")
    family.start()
    family.wait_ready()
    family.child.kill()
    family.wait_dead()
    assert (family.deaths, family.row.epoch, family.row.pid) == (1, 1, 0)


def test_the_first_successor_starts_at_once_and_the_next_waits_for_the_back_off(make_family):
    family = make_family("crash")
    for _ in range(2):
        family.start()
        family.wait_dead()
    family.start()
    assert not family.child.is_alive
    family.clock.now_ns += SECOND // 10
    family.start()
    assert family.child.is_alive
    family.wait_dead()
    assert family.child.failed_boots == 3


def test_a_child_that_was_ready_counts_no_failed_boot(make_family):
    family = make_family("serve")
    family.start()
    family.wait_ready()
    family.child.kill()
    family.wait_dead()
    assert family.child.failed_boots == 0


def test_a_silent_child_is_killed_after_ten_seconds_and_not_before(make_family):
    family = make_family("mute")
    family.start()
    family.wait_ready()
    family.clock.now_ns = family.row.heartbeat_ns + 10 * SECOND
    family.children.kill_hung(0)
    family.children.reap()
    assert family.child.is_alive
    family.clock.now_ns += 1
    family.children.kill_hung(0)
    family.wait_dead()


def test_silence_before_the_supervisor_woke_is_forgiven(make_family):
    family = make_family("mute")
    family.start()
    family.wait_ready()
    family.clock.now_ns = family.row.heartbeat_ns + 60 * SECOND
    family.children.kill_hung(awake_since_ns=family.clock.now_ns)
    assert not select.select([family.child.pidfd], [], [], 0.2)[0]  # a SIGKILL would show there at once
    assert family.child.is_alive


def test_a_child_that_cannot_be_started_is_tried_again_after_the_back_off(make_family, monkeypatch):
    family = make_family("serve")
    monkeypatch.setattr("meshd.supervisor.children.sys.executable", "/nonexistent/python")
    family.start()
    assert not family.child.is_alive
    assert family.child.next_start_ns == family.clock.now_ns + SECOND // 10
    monkeypatch.undo()
    family.clock.now_ns += SECOND // 10
    family.start()
    family.wait_ready()


def test_a_plain_program_is_ready_when_it_runs(tmp_path):
    program = ("-c", "import time; time.sleep(60)")
    family = Family(tmp_path, program, has_manifest=False)
    family.start()
    assert family.child.is_ready and family.row.state is State.READY
    family.child.kill()
    family.wait_dead()


def test_ways_to_end_have_names():
    assert describe_status(3) == "exit code 3"
    assert describe_status(-signal.SIGKILL) == "killed by SIGKILL"
    assert describe_status(-99) == "killed by signal 99"
