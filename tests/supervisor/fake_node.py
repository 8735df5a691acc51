"""A supervisor over fake children, as a program: ``fake_node.py JSON``; see ``conftest.FakeNode``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from meshd.config import Settings
from meshd.control import ProcessBoard, Role, Topology
from meshd.cpus import CpuPlan
from meshd.log import Log
from meshd.supervisor.children import ChildSpec
from meshd.supervisor.node import Node
from meshd.supervisor.notify import Notifier
from meshd.supervisor.process import choose_patience, supervise
from meshd.supervisor.reload import ConfigurationReload

FAKE_CHILD = str(Path(__file__).with_name("fake_child.py"))


def main(wish: dict[str, Any]) -> int:
    settings = Settings(**wish["settings"])
    topology = Topology.of(wish["io_processes"], 1)
    board = ProcessBoard.attach(wish["board_fd"])

    def spec(role: Role, index: int, seat: int) -> ChildSpec:
        program = (FAKE_CHILD, wish["modes"][role], wish["record"])
        return ChildSpec(role=role, index=index, seat=seat, program=program, fds={"board": wish["board_fd"]})

    node = Node(
        settings=settings,
        topology=topology,
        plan=CpuPlan((), (), (), (), topology.groups),
        memory=SimpleNamespace(board=board, ring_all=lambda: None),  # type: ignore[arg-type]
        sockets=None,  # type: ignore[arg-type]
        specs=(
            spec(Role.CONTROLLER, 0, topology.board_controller),
            spec(Role.LEADER, 0, topology.board_leader(0)),
            *(spec(Role.IO, seat, topology.board_io(seat)) for seat in range(wish["io_processes"])),
        ),
        warnings=(),
    )
    log = Log("supervisor", "debug")
    notifier = Notifier(wish["notify_socket"], wish["watchdog_usec"])
    sources = dict.fromkeys(wish["settings"], "flag")
    return supervise(
        node, log, notifier, ConfigurationReload(settings, None, log), choose_patience(settings, sources)
    )


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
