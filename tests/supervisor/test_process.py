"""The supervisor with real processes: replacement, order of the end, signals, notification."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshd.control import Role, State


def test_io_processes_load_beside_the_others_and_begin_when_controller_and_leader_are_ready(make_node):
    node = make_node()
    node.wait_ready()
    events = node.events()
    assert events[-2:] == ["io take_over", "io ready"]
    assert sorted(events[:-2]) == ["controller ready", "io loaded", "leader ready"]


def test_an_io_process_that_dies_while_it_waits_is_followed_by_one_that_waits_as_well(make_node):
    node = make_node({Role.LEADER: "late"})
    node.wait_until(lambda: node.events().count("io loaded") == 1, "an I/O process loaded")
    former = node.io.pid
    os.kill(former, signal.SIGKILL)
    node.wait_until(lambda: node.events().count("io loaded") == 2, "its successor loaded")
    assert "io ready" not in node.events()
    node.record.with_name("go").touch()
    node.wait_ready()
    assert node.events()[-2:] == ["io take_over", "io ready"]


def test_a_signal_ends_io_processes_that_wait(make_node):
    node = make_node({Role.LEADER: "late"})
    node.wait_until(lambda: "io loaded" in node.events(), "an I/O process loaded")
    node.process.send_signal(signal.SIGTERM)
    assert node.wait() == 0
    assert "io take_over" not in node.events()


def test_killed_io_process_is_replaced_in_its_seat_and_the_epoch_moves(make_node):
    node = make_node()
    node.wait_ready()
    epoch = node.io.epoch
    node.kill_and_wait_for_successor(node.io)
    assert (node.io.epoch, node.io.restarts) == (epoch + 1, 1)


def test_every_role_is_replaced_and_the_others_stay(make_node):
    node = make_node(io_processes=2)
    node.wait_ready()
    other = node.board.row(node.topology.board_io(1)).pid
    for row in (node.controller, node.io, node.leader):
        node.kill_and_wait_for_successor(row)
    assert node.board.row(node.topology.board_io(1)).pid == other


def test_a_child_that_cannot_boot_ends_the_node_with_exit_code_3(make_node):
    node = make_node({Role.CONTROLLER: "crash"})
    assert node.wait() == 3
    assert node.controller.epoch == 3
    assert "controller 0 could not start 3 times in a row" in node.stderr.read_text()


def test_killing_the_supervisor_leaves_no_process(make_node):
    node = make_node(io_processes=2)
    node.wait_ready()
    pids = [pid for pid in node.pids() if pid != node.process.pid]
    assert len(pids) == 5
    node.process.kill()
    node.process.wait()
    node.wait_until(lambda: not any(node.is_running(pid) for pid in pids), "all children gone")


def test_sigterm_drains_io_processes_before_it_closes_the_rest(make_node):
    node = make_node(io_processes=2)
    node.wait_ready()
    begun = len(node.events())
    node.process.send_signal(signal.SIGTERM)
    assert node.wait() == 0
    ends = node.events()[begun:]
    assert ends[:4] == ["io linger", "io linger", "io drain", "io drain"] or ends[:4] == [
        "io linger", "io drain", "io linger", "io drain"
    ]  # fmt: skip
    assert sorted(ends[4:]) == ["controller quit", "leader quit"]
    assert node.board.is_draining == 1


def test_draining_is_on_the_board_during_the_delay_while_io_processes_serve(make_node):
    node = make_node(shutdown_delay_secs=600.0, shutdown_grace_period_secs=900.0)
    node.wait_ready()
    node.process.send_signal(signal.SIGTERM)
    node.wait_until(lambda: node.board.is_draining, "draining announced")
    assert "accepting_for_s=600.000" in node.stderr.read_text()
    assert node.io.state is State.READY
    node.kill_and_wait_for_successor(node.io)  # still replaced: connections are still served
    node.process.send_signal(signal.SIGTERM)
    assert node.wait() == 0


def test_a_deaf_io_process_is_killed_after_the_grace_period_and_exit_is_clean(make_node):
    node = make_node({Role.IO: "deaf"}, shutdown_grace_period_secs=0.0)
    node.wait_ready()
    pids = node.pids()
    assert len(pids) == 5
    node.process.send_signal(signal.SIGTERM)
    assert node.wait() == 0
    assert not any(node.is_running(pid) for pid in pids)


def test_a_second_signal_cuts_at_once(make_node):
    node = make_node({Role.IO: "deaf"}, shutdown_grace_period_secs=900.0)
    node.wait_ready()
    node.process.send_signal(signal.SIGTERM)
    node.wait_until(lambda: "io drain" in node.events(), "drain begun")
    node.process.send_signal(signal.SIGTERM)
    assert node.wait() == 0
    assert "io quit" in node.events()


def test_a_signal_during_start_ends_the_node(make_node):
    node = make_node({Role.LEADER: "deaf"})  # no prepare worker ever: the node never becomes ready
    node.wait_until(lambda: "leader ready" in node.events(), "leader ready")
    node.process.send_signal(signal.SIGTERM)
    assert node.wait() == 0


def test_a_node_whose_workers_were_renewed_before_it_was_ready_becomes_ready(make_node):
    node = make_node({Role.LEADER: "renewing"})
    node.wait_ready()
    assert (node.worker.pid, len(node.row_of(Role.PREPARE))) == (0, 1)


def test_signals_to_the_whole_group_leave_children_to_the_supervisor(make_node):
    node = make_node()
    node.wait_ready()
    for pid in node.pids():
        if pid != node.worker.pid:
            os.kill(pid, signal.SIGINT)
    assert node.wait() == 0
    assert "io drain" in node.events()


def test_workers_of_a_killed_leader_are_reaped_and_the_new_leader_takes_their_seats(make_node):
    node = make_node()
    node.wait_ready()
    worker, epoch = node.worker.pid, node.worker.epoch
    node.kill_and_wait_for_successor(node.leader)
    node.wait_until(lambda: node.worker.state is State.READY and node.worker.pid != worker, "new worker")
    node.wait_until(lambda: not Path(f"/proc/{worker}").exists(), "old worker reaped")
    assert node.worker.epoch == epoch + 1


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[socket.socket]:
    """The service manager's end of the notification protocol."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as server:
        server.bind(str(tmp_path / "notify"))
        server.settimeout(20)
        yield server


def next_notice(manager: socket.socket, name: str) -> dict[str, str]:
    while True:
        lines = manager.recv(4096).decode().splitlines()
        fields = dict(line.split("=", 1) for line in lines)
        if name in fields:
            return fields


def test_the_service_manager_hears_ready_watchdog_reload_and_stop(make_node, manager):
    node = make_node(notify_socket=manager.getsockname(), watchdog_usec=100_000)
    assert next_notice(manager, "READY")["STATUS"].startswith("serving on http://")
    assert node.supervisor.state is State.READY
    assert all(node.board.row(row.seat).state is State.READY for row in node.board.rows())
    next_notice(manager, "WATCHDOG")
    node.process.send_signal(signal.SIGHUP)
    assert int(next_notice(manager, "RELOADING")["MONOTONIC_USEC"]) > 0
    next_notice(manager, "READY")
    node.process.send_signal(signal.SIGTERM)
    assert next_notice(manager, "STOPPING")["STATUS"] == "draining"
    assert node.wait() == 0
