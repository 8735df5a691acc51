from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from meshd.control import ProcessBoard, Role, State
from meshd.supervisor import ps


@pytest.fixture
def board():
    """A board whose supervisor is this very process, so that it is found like a running instance."""
    board = ProcessBoard.create(4)
    board.supervisor_pid = os.getpid()
    board.row(3).open(Role.SUPERVISOR, 0, os.getpid(), "0")
    board.row(3).state = State.READY
    board.row(0).open(Role.IO, 0, os.getpid(), "0")
    board.row(1).open(Role.IO, 1, os.getpid(), "0")
    board.row(1).close()
    yield board
    board.segment.close()


def ours(boards):
    return next((found for found in boards if found.supervisor_pid == os.getpid()), None)


def test_an_instance_is_found_by_the_board_of_its_supervisor(board):
    found = ours(ps.find_boards())
    assert [(p.role, p.state) for p in ps.processes_of(found)] == [
        ("supervisor", "ready"),
        ("io", "starting"),
    ]


def test_a_seat_that_waits_for_its_next_start_is_shown_without_a_process(board):
    board.row(1).restart_at_ns = 1
    process = ps.processes_of(board)[-1]
    assert (process.role, process.index, process.pid, process.state) == ("io", 1, 0, "backoff")
    assert (process.cpus, process.rss_bytes, process.uptime_s) == ("0", 0, 0.0)
    board.row(1).open(Role.IO, 1, os.getpid(), "0")
    assert (ps.processes_of(board)[-1].state, board.row(1).restarts) == ("starting", 1)


def test_what_is_found_is_a_copy(board):
    found = ours(ps.find_boards())
    found.is_draining = 1
    assert board.is_draining == 0


def test_children_that_hold_the_board_are_not_taken_for_another_instance(board):
    board.supervisor_pid = 1
    assert ours(ps.find_boards()) is None


def test_real_memory_and_cpus_are_shown(board):
    process = ps.processes_of(board)[0]
    assert process.rss_bytes >= process.pss_bytes > 1 << 20
    assert process.cpus == ps.format_cpu_list(os.sched_getaffinity(0))


def test_the_table_has_a_line_a_process_and_a_sum(board):
    lines = ps.table(ps.processes_of(board)).splitlines()
    assert lines[0].split() == ["role", "index", "pid", "cpus", "rss", "pss", "state", "restarts", "uptime"]
    assert lines[1].startswith("supervisor  0")
    assert lines[-1].startswith("2 processes, ")


@pytest.fixture
def other_board():
    """The board of an instance whose only process is the parent of this one."""
    board = ProcessBoard.create(1)
    board.supervisor_pid, board.listen_port = os.getppid(), 30000
    board.row(0).open(Role.SUPERVISOR, 0, os.getppid(), "0")
    yield board
    board.segment.close()


def test_instances_are_told_apart_by_port_and_pid(board, other_board, capsys, monkeypatch):
    monkeypatch.setattr(ps, "find_boards", lambda: iter([board, other_board]))
    assert ps.main([]) == 0
    first, second = capsys.readouterr().out.split("\n\n")
    assert first.splitlines()[0] == f"meshd on port 0, pid {os.getpid()}"
    assert second.splitlines()[0] == f"meshd on port 30000, pid {os.getppid()}"
    assert second.splitlines()[1].startswith("role")


def test_json_is_one_array_of_the_processes_of_all_instances(board, other_board, capsys, monkeypatch):
    monkeypatch.setattr(ps, "find_boards", lambda: iter([board, other_board]))
    assert ps.main(["--json"]) == 0
    found = [(process["instance"], process["role"]) for process in json.loads(capsys.readouterr().out)]
    us, parent = os.getpid(), os.getppid()
    assert found == [(us, "supervisor"), (us, "io"), (parent, "supervisor")]


def test_a_reader_that_has_seen_enough_is_no_fault(board):
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "meshd", "ps"], stdout=write, stderr=subprocess.PIPE, check=False
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (0, b"")


def test_no_instance_is_said_plainly(monkeypatch, capsys):
    monkeypatch.setattr(ps, "find_boards", lambda: iter(()))
    assert ps.main([]) == 1
    assert "no running meshd" in capsys.readouterr().err


def test_processes_that_cannot_be_read_are_passed_over(tmp_path):
    (tmp_path / "12").mkdir()  # no fd directory: ended meanwhile
    (tmp_path / "13" / "fd").mkdir(parents=True)
    (tmp_path / "13" / "fd" / "3").symlink_to("/memfd:meshd:board (deleted)")  # cannot be opened
    assert list(ps.find_boards(tmp_path)) == []


@pytest.mark.parametrize(
    ("seconds", "text"), [(59.9, "0m59s"), (3599, "59m59s"), (3600, "1h00m"), (90000, "1d01h")]
)
def test_durations(seconds, text):
    assert ps._duration(seconds) == text
