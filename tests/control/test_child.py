from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from meshd.control import (
    SUPERVISOR_SIGNALS,
    ChildLink,
    Manifest,
    ProcessBoard,
    Role,
    State,
    Topology,
    receive_messages,
    send_message,
    start_child,
)
from meshd.errors import StartupError

REPORT = """
import json, os, signal, sys
from meshd.control import ChildLink, ProcessBoard, start_child
manifest = start_child(sys.argv[1:])
booted_on = sorted(os.sched_getaffinity(0))
link = ChildLink.open(manifest, ProcessBoard.attach(manifest.fds["board"]))
link.ready()
print(json.dumps({
    "name": open("/proc/self/comm").read().strip(),
    "booted_on": booted_on,
    "cpus": sorted(os.sched_getaffinity(0)),
    "ignored": [n for n in range(1, 32) if signal.getsignal(n) == signal.SIG_IGN],
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
    "inheritable": [os.get_inheritable(fd) for fd in manifest.fds.values()],
    "role": manifest.role,
}))
"""


def report_of(supervisor_pid: int = 0, cpus: tuple[int, ...] = ()) -> subprocess.CompletedProcess[str]:
    board = ProcessBoard.create(1)
    _, link = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    manifest = Manifest(
        role=Role.IO,
        index=3,
        seat=0,
        supervisor_pid=supervisor_pid or os.getpid(),
        topology=Topology.of(1, 1),
        fds={"board": board.segment.fd, "link": link.fileno()},
        cpus=cpus,
    )
    fd = manifest.to_memfd()
    signal.pthread_sigmask(signal.SIG_BLOCK, SUPERVISOR_SIGNALS)
    try:
        return subprocess.run(
            [sys.executable, "-c", REPORT, "--manifest-fd", str(fd)],
            pass_fds=[fd, *manifest.fds.values()],
            capture_output=True,
            text=True,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SUPERVISOR_SIGNALS)
        os.close(fd)


def test_a_child_takes_its_name_ignores_the_signals_of_the_supervisor_and_is_pinned_when_it_is_ready():
    cpu = max(os.sched_getaffinity(0))
    report = json.loads(report_of(cpus=(cpu,)).stdout)
    assert report["name"] == "meshd:io3"
    assert report["booted_on"] == sorted(os.sched_getaffinity(0))
    assert report["cpus"] == [cpu]
    assert set(SUPERVISOR_SIGNALS) <= set(report["ignored"])
    assert report["blocked"] == []
    assert report["inheritable"] == [False, False]
    assert report["role"] == "io"


def test_a_cpu_that_the_kernel_refuses_leaves_the_child_unpinned():
    report = json.loads(report_of(cpus=(1023,)).stdout)
    assert report["cpus"] == sorted(os.sched_getaffinity(0))


def test_a_child_whose_supervisor_is_gone_does_not_start():
    done = report_of(supervisor_pid=1)
    assert done.returncode != 0
    assert "the parent process ended during start-up" in done.stderr


@pytest.mark.parametrize("argv", [[], ["--manifest-fd"], ["--port", "1"]])
def test_a_start_by_hand_says_so(argv):
    with pytest.raises(StartupError, match="started by the meshd supervisor"):
        start_child(argv)


def test_children_die_with_their_parent(tmp_path: Path):
    code = (
        "import os, sys, time\n"
        "from meshd.control import die_with_parent\n"
        "parent = os.getpid()\n"
        "reader, writer = os.pipe()\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    die_with_parent(parent)\n"
        "    os.write(writer, b'.')\n"
        "    time.sleep(600)\n"
        "os.read(reader, 1)\n"
        "print(pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pidfd = os.pidfd_open(int(parent.stdout.readline()))
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert select.select([pidfd], [], [], 20)[0]
    os.close(pidfd)


@pytest.fixture
def pair():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    board = ProcessBoard.create(1)
    board.row(0).open(Role.IO, 0, 1, "")
    yield ours, ChildLink(theirs.detach(), board.row(0)), board.row(0)
    ours.close()


def test_ready_is_on_the_board_and_on_the_link(pair):
    ours, link, row = pair
    link.ready()
    assert row.state is State.READY
    assert receive_messages(ours) == ([{"t": "ready"}], False)


def test_all_waiting_messages_arrive_in_order_and_an_empty_link_does_not_block(pair):
    ours, link, _ = pair
    assert link.recv() == [] and not link.is_closed
    send_message(ours, {"t": "drain", "grace_s": 1.5})
    send_message(ours, {"t": "quit"})
    assert link.recv() == [{"t": "drain", "grace_s": 1.5}, {"t": "quit"}]


def test_a_gone_supervisor_shows_after_the_last_message(pair):
    ours, link, _ = pair
    send_message(ours, {"t": "quit"})
    ours.close()
    assert link.recv() == [{"t": "quit"}]
    assert link.is_closed
    link.send({"t": "ready"})  # and sending to it is no error


def test_a_full_link_drops_messages_rather_than_block(pair):
    ours, link, _ = pair
    for _ in range(10_000):
        send_message(ours, {"t": "reopen_logs"})
    assert 0 < len(link.recv()) < 10_000


@pytest.mark.parametrize(
    ("said", "takes_over"), [("take_over", True), ("quit", False), ("drain", False), ("retire", False)]
)
def test_a_successor_says_loaded_beats_and_waits_for_the_word(pair, said, takes_over):
    ours, link, row = pair
    row.heartbeat_ns = 0
    send_message(ours, {"t": "reopen_logs"})  # its log was opened just now
    send_message(ours, {"t": said})
    assert link.wait_to_take_over() is takes_over
    assert receive_messages(ours) == ([{"t": "loaded"}], False)
    assert row.heartbeat_ns > 0
    assert row.state is State.STARTING


def test_a_successor_whose_supervisor_is_gone_does_not_take_over(pair):
    ours, link, _ = pair
    ours.close()
    assert link.wait_to_take_over() is False
