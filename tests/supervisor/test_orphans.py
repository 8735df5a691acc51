from __future__ import annotations

import os
import signal
import time

import pytest

from meshd.control import ProcessBoard, Role, State, Topology
from meshd.supervisor.orphans import Orphans

LEADER = 4_000_000  # above the largest pid
SECOND = 1_000_000_000


@pytest.fixture
def board():
    return ProcessBoard.create(Topology.of(1, 2).board_seats)


@pytest.fixture
def worker():
    """A forked process that does nothing."""
    pid = os.fork()
    if pid == 0:
        signal.pause()
        os._exit(0)
    yield pid
    try:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    except (ProcessLookupError, ChildProcessError):
        pass


def seat_of(board, pid, leader=LEADER):
    row = board.row(Topology.of(1, 2).board_prepare(0))
    row.open(Role.PREPARE, 0, pid, "", leader)
    row.state = State.READY
    return row


def ended_by(pid):
    return -os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def is_waiting(pid):
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def test_an_orphan_serves_on_and_its_seat_is_cleared_when_it_was_reaped(board, worker):
    row = seat_of(board, worker)
    orphans = Orphans(board, Topology.of(1, 2))
    orphans.leader_died(LEADER)
    assert orphans and row.state is State.READY
    os.kill(worker, signal.SIGKILL)
    os.waitpid(worker, 0)
    orphans.bury(worker)
    assert not orphans
    assert (row.state, row.epoch, row.pid) == (State.GONE, 1, 0)


def test_workers_of_living_leaders_are_left_alone(board, worker):
    seat_of(board, worker, leader=LEADER + 1)
    orphans = Orphans(board, Topology.of(1, 2))
    orphans.leader_died(LEADER)
    assert not orphans


def test_a_worker_that_nobody_has_to_reap_is_cleared_with_its_leader(board):
    row = seat_of(board, pid=1)  # no child of ours
    orphans = Orphans(board, Topology.of(1, 2))
    orphans.leader_died(LEADER)
    assert not orphans and row.state is State.GONE


def test_a_seat_that_a_successor_took_is_not_cleared(board, worker):
    row = seat_of(board, worker)
    orphans = Orphans(board, Topology.of(1, 2))
    orphans.leader_died(LEADER)
    row.close()
    row.open(Role.PREPARE, 0, 123, "", LEADER + 1)
    orphans.bury(worker)
    assert (row.pid, row.epoch) == (123, 1)


def test_a_job_six_seconds_past_its_deadline_is_killed_and_not_before(board, worker):
    row = seat_of(board, worker)
    row.job_deadline_ns = time.monotonic_ns()
    orphans = Orphans(board, Topology.of(1, 2))
    orphans.leader_died(LEADER)
    orphans.kill_hung(row.job_deadline_ns + 6 * SECOND, 0)
    assert not is_waiting(worker)
    orphans.kill_hung(row.job_deadline_ns + 6 * SECOND + 1, 0)
    assert ended_by(worker) == signal.SIGKILL


def test_a_silent_idle_worker_is_killed_unless_we_slept_ourselves(board, worker):
    row = seat_of(board, worker)
    orphans = Orphans(board, Topology.of(1, 2))
    orphans.leader_died(LEADER)
    now_ns = row.heartbeat_ns + 12 * SECOND
    orphans.kill_hung(now_ns, awake_since_ns=now_ns)
    assert not is_waiting(worker)
    orphans.kill_hung(now_ns, 0)
    assert ended_by(worker) == signal.SIGKILL
