"""Nodes of fake children under a real supervisor process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from meshd.control import BoardRow, ProcessBoard, Role, State, Topology
from tests.fakes.offspring import end_with_tests

PATIENCE_S = 20.0
MODES = {Role.CONTROLLER: "serve", Role.LEADER: "leader", Role.IO: "serve"}


def wait_until(condition: Callable[[], object], what: str) -> None:
    """Look again until it holds; other processes change what is looked at."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"never happened: {what}"
        time.sleep(0.005)


def is_running(pid: int) -> bool:
    """A zombie does not run."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


class FakeNode:
    """A handle on a running ``fake_node.py``; the board is shared with the test."""

    wait_until = staticmethod(wait_until)
    is_running = staticmethod(is_running)

    def __init__(
        self,
        directory: Path,
        modes: dict[Role, str] | None = None,
        *,
        io_processes: int = 1,
        notify_socket: str | None = None,
        watchdog_usec: int = 0,
        **settings: Any,
    ) -> None:
        self.topology = Topology.of(io_processes, 1)
        self.board = ProcessBoard.create(self.topology.board_seats)
        self.record = directory / "record"
        self.stderr = directory / "stderr"
        self.configuration = directory / "configuration"  # a JSON object of settings, read again at SIGHUP
        self.configuration.write_text("{}")
        wish = {
            "modes": MODES | (modes or {}),
            "io_processes": io_processes,
            "record": str(self.record),
            "configuration": str(self.configuration),
            "board_fd": self.board.segment.fd,
            "settings": {"shutdown_delay_secs": 0.0, "shutdown_grace_period_secs": 30.0} | settings,
            "notify_socket": notify_socket,
            "watchdog_usec": watchdog_usec,
        }
        program = Path(__file__).with_name("fake_node.py")
        with self.stderr.open("wb") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, str(program), json.dumps(wish)],
                stderr=stderr,
                stdin=subprocess.DEVNULL,
                pass_fds=[self.board.segment.fd],
                preexec_fn=end_with_tests(),
            )

    @property
    def io(self) -> BoardRow:
        return self.board.row(self.topology.board_io(0))

    @property
    def controller(self) -> BoardRow:
        return self.board.row(self.topology.board_controller)

    @property
    def leader(self) -> BoardRow:
        return self.board.row(self.topology.board_leader(0))

    @property
    def worker(self) -> BoardRow:
        return self.board.row(self.topology.board_prepare(0))

    @property
    def supervisor(self) -> BoardRow:
        return self.board.row(self.topology.board_supervisor)

    def pids(self) -> list[int]:
        return [row.pid for row in self.board.rows() if row.pid]

    def row_of(self, role: Role) -> list[BoardRow]:
        """The seats of a role that hold a process now."""
        return [row for row in self.board.rows() if row.role is role and row.pid]

    def set_mode(self, role: Role, mode: str) -> None:
        """Let processes of a role that start from now on behave otherwise."""
        self.record.with_name(f"mode_{role}").write_text(mode)

    def events(self) -> list[str]:
        return self.record.read_text().splitlines() if self.record.exists() else []

    def wait_ready(self) -> None:
        wait_until(
            lambda: self.supervisor.state is State.READY or self.process.poll() is not None, "node ready"
        )
        assert self.process.poll() is None, self.stderr.read_text()

    def kill_and_wait_for_successor(self, row: BoardRow) -> int:
        """Kill the process of a seat; return the pid of the next one that is ready there."""
        former = row.pid
        os.kill(former, signal.SIGKILL)
        wait_until(lambda: row.state is State.READY and row.pid not in (0, former), f"successor in {row}")
        return row.pid

    def wait(self) -> int:
        return self.process.wait(PATIENCE_S)


@pytest.fixture
def make_node(tmp_path: Path) -> Iterator[Callable[..., FakeNode]]:
    nodes: list[FakeNode] = []

    def make(modes: dict[Role, str] | None = None, **options: Any) -> FakeNode:
        nodes.append(FakeNode(tmp_path, modes, **options))
        return nodes[-1]

    yield make
    for node in nodes:
        if node.process.poll() is None:
            node.process.kill()
            node.process.wait()
