"""A supervisor over fake children, as a program: ``fake_node.py JSON``; see ``conftest.FakeNode``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from meshd.config import Settings
from meshd.config.sources import Action, LoadResult
from meshd.control import ProcessBoard, Role, Topology
from meshd.cpus import CpuPlan
from meshd.errors import StartupError
from meshd.log import Log
from meshd.supervisor.child import ChildSpec
from meshd.supervisor.node import Node, Sockets
from meshd.supervisor.notify import Notifier
from meshd.supervisor.patience import choose_patience
from meshd.supervisor.process import supervise
from meshd.supervisor.reload import ConfigurationReload

FAKE_CHILD = str(Path(__file__).with_name("fake_child.py"))


def main(wish: dict[str, Any]) -> int:
    settings = Settings(**wish["settings"])
    topology = Topology.of(wish["io_processes"], 1)
    board = ProcessBoard.attach(wish["board_fd"])

    def spec(role: Role, index: int, seat: int, post: int = -1) -> ChildSpec:
        program = (FAKE_CHILD, wish["modes"][role], wish["record"])
        fds = {"board": wish["board_fd"]}
        return ChildSpec(role=role, index=index, seat=seat, program=program, fds=fds, post=post)

    def io_spec(seat: int) -> ChildSpec:
        return spec(Role.IO, seat, topology.board_io(seat), seat % topology.io_processes)

    def read() -> LoadResult:
        try:
            found = json.loads(Path(wish["configuration"]).read_text())
        except ValueError as error:
            raise StartupError(f"the file is broken: {error}", 2) from error
        return LoadResult(Settings(**(wish["settings"] | found)), sources, Action.RUN)

    sources = dict.fromkeys(wish["settings"], "flag")

    node = Node(
        settings=settings,
        topology=topology,
        plan=CpuPlan((), (), (), (), topology.groups),
        memory=SimpleNamespace(board=board, ring_all=lambda: None),  # type: ignore[arg-type]
        sockets=Sockets([], None, None, []),  # type: ignore[arg-type]
        specs=(
            spec(Role.CONTROLLER, 0, topology.board_controller),
            spec(Role.LEADER, 0, topology.board_leader(0)),
            *(io_spec(seat) for seat in range(topology.io_processes)),
        ),
        spares=(
            spec(Role.CONTROLLER, 0, topology.board_controller + 1),
            spec(Role.LEADER, 0, topology.board_leader(0, 1)),
            *(io_spec(seat) for seat in range(topology.io_processes, topology.io_seats)),
        ),
        warnings=(),
    )
    log = Log("supervisor", "debug")
    notifier = Notifier(wish["notify_socket"], wish["watchdog_usec"])
    return supervise(
        node, log, notifier, ConfigurationReload(settings, read, log), choose_patience(settings, sources)
    )


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
