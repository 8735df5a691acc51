"""A real meshd under a service manager that these tests play: readiness, watchdog, reload, end."""

from __future__ import annotations

import contextlib
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from meshd.control import Role
from tests.e2e.conftest import DEMO_TOKENIZER
from tests.fakes.node import Node, running, wait_until
from tests.fakes.offspring import end_with_tests

WATCHDOG_USEC = 1_000_000  # signs of life come twice as often: half a second is for a busy machine
UNIT = Path(__file__).parents[2] / "systemd" / "meshd.service"
FLAGS = ("--demo", "1", "--io-processes", "2", "--prepare-workers", "2", "--tokenizer-path", DEMO_TOKENIZER)


class Manager:
    """The manager's end of the notification socket; ``is_reading`` off: it is busy with other things."""

    def __init__(self, address: str, is_reading: bool = True) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(address)
        self.env = {"NOTIFY_SOCKET": address, "WATCHDOG_USEC": str(WATCHDOG_USEC)}
        self._messages: queue.Queue[tuple[float, dict[str, str]]] = queue.Queue()
        if is_reading:
            self.start_reading()

    def start_reading(self) -> None:
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        while text := self.socket.recv(65536).decode():
            fields = dict(line.split("=", 1) for line in text.splitlines())
            self._messages.put((time.monotonic(), fields))

    def next(self, *names: str) -> tuple[float, dict[str, str]]:
        """Return when the next message with one of these names came, and its fields."""
        while True:
            at, fields = self._messages.get(timeout=20)
            if fields.keys() & set(names):
                return at, fields

    def pending(self) -> list[dict[str, str]]:
        """Return all that has come so far."""
        found = []
        with contextlib.suppress(queue.Empty):
            while True:
                found.append(self._messages.get_nowait()[1])
        return found

    def close(self) -> None:
        self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    played = Manager(str(tmp_path / "notify"))
    yield played
    played.close()


def test_life_as_the_service_manager_sees_it(manager):
    with running(*FLAGS, env=manager.env) as node:
        _, ready = manager.next("READY")
        assert ready["READY"] == "1"
        assert node.url in ready["STATUS"]
        # Sent when every process is ready: all are on the board, and a request is served at once.
        assert {row["state"] for row in node.ps()} == {"ready"}
        assert len(node.ps()) == 8
        assert ask(node) == 200
        assert node.metric("mesh_ready") == 1

        times = [manager.next("WATCHDOG")[0] for _ in range(4)]
        gaps = [later - earlier for earlier, later in pairwise(times)]
        assert max(gaps) < WATCHDOG_USEC / 1e6, "the manager would have killed it"

        before = {row["pid"] for row in node.ps()} - {node.process.pid}
        node.process.send_signal(signal.SIGUSR2)  # ExecReload
        _, reloading = manager.next("RELOADING")
        assert reloading["RELOADING"] == "1"
        assert 0 < int(reloading["MONOTONIC_USEC"]) <= time.monotonic_ns() // 1000
        assert manager.next("READY")[1]["READY"] == "1"
        wait_until(lambda: remaining(node, before) == {"backend"}, "new ones serve, the old ones leave", 30)
        assert ask(node) == 200

        node.process.send_signal(signal.SIGTERM)
        assert manager.next("STOPPING")[1]["STOPPING"] == "1"
        assert node.process.wait(10) == 0


def remaining(node: Node, pids: set[int]) -> set[str]:
    return {row["role"] for row in node.ps() if row["pid"] in pids}


def ask(node: Node, model: str = "meshd-demo") -> int:
    return node.request("POST", "/v1/completions", {"model": model, "prompt": "a"})[0]


def test_no_readiness_before_every_process_is_ready(manager):
    """A leader that is stopped while it loads its tokenizer holds it back; the watchdog goes on."""
    node = StartingNode(manager)
    try:
        wait_until(lambda: node.leader() is not None, "no leader appears")
        leader = node.leader()
        assert leader is not None
        os.kill(leader, signal.SIGSTOP)
        for _ in range(3):
            manager.next("WATCHDOG")
        assert not any("READY" in message for message in manager.pending())
        os.kill(leader, signal.SIGCONT)
        assert manager.next("READY")[1]["READY"] == "1"
    finally:
        node.kill()


class StartingNode:
    """A meshd that is not waited for."""

    def __init__(self, manager: Manager) -> None:
        command = [sys.executable, "-m", "meshd", "launch", *FLAGS, "--port", "0", "--prometheus-port", "0"]
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **manager.env},
            preexec_fn=end_with_tests(),
        )

    def leader(self) -> int | None:
        """The pid of the leader as soon as its interpreter runs."""
        node = Node.__new__(Node)
        node.process = self.process
        for pid in node.descendants():
            with contextlib.suppress(OSError):
                if b"meshd.prepare.zygote" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    return pid
        return None

    def kill(self) -> None:
        node = Node.__new__(Node)
        node.process = self.process
        node.kill()


def test_hanging_supervisor_is_noticed_and_a_continued_one_beats_on(manager):
    """SIGSTOP: the signs of life end, which is what a watchdog acts on."""
    with running(*FLAGS, env=manager.env, is_settled=False) as node:
        manager.next("READY")
        manager.next("WATCHDOG")
        node.process.send_signal(signal.SIGSTOP)
        wait_until(lambda: is_stopped(node.process.pid), "not stopped")
        manager.pending()  # what was sent before
        time.sleep(2 * WATCHDOG_USEC / 1e6)  # the silence itself is what is looked at
        assert len(manager.pending()) <= 1  # one may have been under way
        node.process.send_signal(signal.SIGCONT)
        manager.next("WATCHDOG")
        assert ask(node) == 200


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def test_manager_that_does_not_read_holds_nobody_up_and_misses_no_state(tmp_path, backends):
    """The socket's queue is full of signs of life long before meshd is ready."""
    manager = Manager(str(tmp_path / "notify"), is_reading=False)
    manager.env["WATCHDOG_USEC"] = "20000"
    flags = ("--io-processes", "2", "--prepare-workers", "2", "--disable-health-check")
    with running(*flags, backends=backends, env=manager.env) as node:
        row = next(row for row in node.board().rows() if row.role is Role.PREPARE and row.pid)
        dead = row.pid
        os.kill(dead, signal.SIGKILL)
        wait_until(lambda: row.pid not in (0, dead), "not replaced")
        assert ask(node, "m1") == 200
        manager.start_reading()
        assert manager.next("READY")[1]["READY"] == "1"
    manager.close()


def test_unit_file_names_what_meshd_does():
    unit = dict(re.findall(r"^(\w+)=(.*)$", UNIT.read_text(), re.M))
    assert unit["Type"] == "notify"
    assert unit["NotifyAccess"] == "main"
    assert float(unit["WatchdogSec"]) > 0
    assert unit["ExecReload"] == "/bin/kill -USR2 $MAINPID"
    assert unit["KillMode"] == "mixed"
    assert unit["ExecStart"].split()[1:2] == ["--config"]
