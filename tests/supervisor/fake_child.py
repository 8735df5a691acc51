"""A child that does what a test wants: ``fake_child.py MODE RECORD --manifest-fd N``.

Modes: serve (answers all that ends it), deaf (answers none of it), mute (never beats), crash (ends before
ready), leader (forks a prepare worker that leaves with it), renewing (the same, in the second seat),
late (the same as leader, when there is a file ``go``).
A file ``mode_ROLE`` beside RECORD wins over MODE. RECORD: a file that gets one line an event.
"""

from __future__ import annotations

import os
import select
import sys
import time
from pathlib import Path

from meshd.control import ChildLink, Manifest, ProcessBoard, Role, State, start_child


def main(mode: str, record: str, argv: list[str]) -> int:
    manifest = start_child(argv)
    board = ProcessBoard.attach(manifest.fds["board"])
    override = Path(record).with_name(f"mode_{manifest.role}")
    mode = override.read_text() if override.exists() else mode
    if mode == "crash":
        return 5
    link = ChildLink.open(manifest, board)
    if manifest.takes_over:
        note(record, f"{manifest.role} loaded")
        if not link.wait_to_take_over():
            return 0
        note(record, f"{manifest.role} take_over")
    while mode == "late" and not Path(record).with_name("go").exists():
        board.row(manifest.seat).beat()
        select.select([link], [], [], 0.02)
        if any(message["t"] in ("drain", "quit") for message in link.recv()) or link.is_closed:
            return 0
    if mode in ("leader", "renewing", "late"):
        first = manifest.topology.groups[manifest.index][0]
        fork_worker(manifest, board, first + (manifest.topology.prepare_workers if mode == "renewing" else 0))
    note(record, f"{manifest.role} ready")
    link.ready()
    while not link.is_closed:
        if mode != "mute":
            board.row(manifest.seat).beat()
        select.select([link], [], [], 0.1)
        for message in link.recv():
            note(record, f"{manifest.role} {message['t']}")
            if mode != "deaf" and message["t"] in ("drain", "quit", "hand_over", "retire"):
                return 0
    return 0


def fork_worker(manifest: Manifest, board: ProcessBoard, seat: int) -> None:
    row = board.row(manifest.topology.board_prepare(seat))
    while row.is_alive:  # a worker of the former leader
        time.sleep(0.005)
    leader = os.getpid()
    reader, writer = os.pipe()
    if (pid := os.fork()) == 0:
        os.read(reader, 1)  # until the leader has entered us
        row.state = State.READY
        while os.getppid() == leader:
            time.sleep(0.02)
        os._exit(0)
    row.open(Role.PREPARE, seat, pid, "", leader)
    os.write(writer, b".")


def note(record: str, line: str) -> None:
    fd = os.open(record, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(fd, f"{line}\n".encode())
    os.close(fd)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3:]))
