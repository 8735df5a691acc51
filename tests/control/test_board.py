from __future__ import annotations

import pytest

from meshd.control import ProcessBoard, Role, State
from meshd.errors import StartupError
from meshd.memory import Segment


@pytest.fixture
def board():
    return ProcessBoard.create(4)


def test_another_attachment_sees_every_word(board):
    row = board.row(2)
    row.open(Role.PREPARE, 1, 1234, "0-3,8", leader_pid=99)
    row.state = State.READY
    row.busy = 1
    row.job_deadline_ns = 2**63
    board.is_draining = 1
    seen = ProcessBoard.attach(board.segment.fd)
    other = seen.row(2)
    assert (other.role, other.index, other.pid, other.cpus) == (Role.PREPARE, 1, 1234, "0-3,8")
    assert (other.leader_pid, other.state, other.busy, other.job_deadline_ns) == (99, State.READY, 1, 2**63)
    assert seen.is_draining == 1


def test_words_of_a_row_do_not_overlap(board):
    row = board.row(0)
    names = ["index", "pid", "epoch", "started_ns", "restarts", "leader_pid", "heartbeat_ns", "busy"]
    names += ["job_deadline_ns"]
    row.open(Role.IO, 0, 1, "0")
    row.state = State.DRAINING
    for value, name in enumerate(names, 100):
        setattr(row, name, value)
    assert [getattr(row, name) for name in names] == list(range(100, 100 + len(names)))
    assert (row.role, row.state, row.cpus) == (Role.IO, State.DRAINING, "0")
    assert board.row(1).role is None and board.is_draining == 0


def test_a_life_in_a_seat_moves_the_epoch_at_each_death_and_counts_restarts(board):
    row = board.row(0)
    assert row.state is State.EMPTY and not row.is_alive
    for life in range(3):
        row.open(Role.IO, 0, 100 + life, "")
        assert (row.state, row.epoch, row.restarts) == (State.STARTING, life, life)
        row.close()
        assert (row.state, row.pid, row.epoch, row.is_alive) == (State.GONE, 0, life + 1, False)


def test_a_row_shows_what_a_test_wants_to_see(board):
    board.row(1).open(Role.CONTROLLER, 0, 7, "")
    assert repr(board) == "<board [<seat 1 controller 0 pid=7 STARTING epoch=0>]>"


def test_a_long_cpu_list_is_cut_to_its_place(board):
    board.row(0).open(Role.IO, 0, 1, ",".join(map(str, range(0, 200, 2))))
    assert len(board.row(0).cpus) == 64
    assert board.row(1).role is None


def test_another_segment_is_no_board():
    with pytest.raises(StartupError):
        ProcessBoard.attach(Segment.create("rings", 4096).fd)


def test_an_orderly_replacement_is_no_restart(board):
    row = board.row(0)
    row.open(Role.IO, 0, 1, "")
    row.close()
    row.open(Role.IO, 0, 2, "", is_restart=False)
    assert row.restarts == 0
