"""How a child process is born, found on the board, and spoken to by the supervisor.

A child is started as ``python -m meshd.birth <module> --manifest-fd N``; the manifest is JSON on an inherited
memfd and names every other inherited descriptor. The child calls :func:`start_child` first, attaches the
board, opens its :class:`ChildLink`, builds itself, and says :meth:`ChildLink.ready`.
"""

from meshd.control.board import BOARD_KIND, HEARTBEAT_LIMIT_NS, BoardRow, ProcessBoard, Role, State
from meshd.control.child import (
    SUPERVISOR_SIGNALS,
    ChildLink,
    die_with_parent,
    ignore_supervisor_signals,
    name_process,
    name_process_as,
    pin,
    receive_messages,
    send_message,
    start_child,
)
from meshd.control.manifest import Manifest, Topology

__all__ = [
    "BOARD_KIND",
    "HEARTBEAT_LIMIT_NS",
    "SUPERVISOR_SIGNALS",
    "BoardRow",
    "ChildLink",
    "Manifest",
    "ProcessBoard",
    "Role",
    "State",
    "Topology",
    "die_with_parent",
    "ignore_supervisor_signals",
    "name_process",
    "name_process_as",
    "pin",
    "receive_messages",
    "send_message",
    "start_child",
]
