"""``meshd ps``: the processes of every running instance that this user may see.

An instance has no name in a file system. It is found by its board: a descriptor whose link in ``/proc`` reads
``memfd:meshd:board``, in the process that the board itself calls its supervisor. The board is read through
that link; nothing is written and no process is asked.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from meshd.control import BOARD_KIND, BoardRow, ProcessBoard, Role
from meshd.cpus import format_cpu_list
from meshd.errors import StartupError

_PROC: Final = Path("/proc")
_LINK_PREFIX: Final = f"/memfd:meshd:{BOARD_KIND} "  # the kernel appends "(deleted)"
_COLUMNS: Final = ("role", "index", "pid", "cpus", "rss", "pss", "state", "restarts", "uptime")


@dataclass(frozen=True)
class ProcessInfo:
    """One process. ``instance``: pid of its supervisor. Memory: 0 where the kernel does not tell us."""

    instance: int
    role: str
    index: int
    pid: int
    cpus: str
    rss_bytes: int
    pss_bytes: int
    state: str
    restarts: int
    uptime_s: float


def main(argv: Sequence[str]) -> int:
    """Print all instances; exit code 1 when none runs."""
    parser = argparse.ArgumentParser(prog="meshd ps", description="Show the processes of running instances.")
    parser.add_argument("--json", action="store_true", help="one JSON array of all processes")
    options = parser.parse_args(list(argv))
    boards = list(find_boards())
    if not boards:
        sys.stderr.write("meshd ps: no running meshd of this user was found\n")
        return 1
    _write(json_text(boards) if options.json else "\n".join(instance_text(board) for board in boards))
    return 0


def json_text(boards: Iterable[ProcessBoard]) -> str:
    """Return one array, on one line, of the processes of all instances."""
    return json.dumps([asdict(process) for board in boards for process in processes_of(board)]) + "\n"


def instance_text(board: ProcessBoard) -> str:
    """Return a line that tells the instances of one host apart, and the table."""
    return f"meshd on port {board.listen_port}, pid {board.supervisor_pid}\n{table(processes_of(board))}"


def _write(text: str) -> None:
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has seen enough, as head does; the interpreter must not flush again
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def find_boards(proc: Path = _PROC) -> Iterator[ProcessBoard]:
    """Yield a copy of the board of each running supervisor, by ascending pid."""
    pids = sorted(int(entry.name) for entry in proc.iterdir() if entry.name.isdecimal())
    for pid in pids:
        board = _board_of(proc / str(pid) / "fd", pid)
        if board is not None:
            yield board


def _board_of(directory: Path, pid: int) -> ProcessBoard | None:
    try:
        links = list(directory.iterdir())
    except OSError:  # gone, or another user's
        return None
    for link in links:
        try:
            if os.readlink(link).startswith(_LINK_PREFIX):
                board = _copy(link)
                if board.supervisor_pid == pid:
                    return board
        except (OSError, StartupError):  # gone meanwhile, or of another version of meshd
            continue
    return None


def _copy(link: Path) -> ProcessBoard:
    """Copy a board into a segment of our own: checked as any board, and impossible to write by mistake."""
    fd = os.memfd_create("meshd:ps")
    try:
        os.write(fd, link.read_bytes())
        return ProcessBoard.attach(fd)
    finally:
        os.close(fd)


def processes_of(board: ProcessBoard) -> list[ProcessInfo]:
    """List who sits on the board: the supervisor, then by role and index; empty seats are left out.

    Not so a seat whose process has died too often and waits for its next start: it has no pid (0), and its
    state is "backoff".
    """
    rows = [row for row in board.rows() if row.pid or row.restart_at_ns]
    order = list(Role)
    rows.sort(key=lambda row: (order.index(row.role) if row.role else 0, row.index))
    now_ns = time.monotonic_ns()
    return [_process(board.supervisor_pid, row, now_ns) for row in rows]


def _process(instance: int, row: BoardRow, now_ns: int) -> ProcessInfo:
    rss, pss = _memory(row.pid)
    return ProcessInfo(
        instance=instance,
        role=str(row.role),
        index=row.index,
        pid=row.pid,
        cpus=_cpus(row),
        rss_bytes=rss,
        pss_bytes=pss,
        state=row.state.name.lower() if row.pid else "backoff",
        restarts=row.restarts,
        uptime_s=round((now_ns - row.started_ns) / 1e9, 1) if row.pid else 0.0,
    )


def _cpus(row: BoardRow) -> str:
    """Where the process may run in fact; the board tells where it was meant to."""
    if row.pid:
        with contextlib.suppress(OSError):
            return format_cpu_list(os.sched_getaffinity(row.pid))
    return row.cpus


def _memory(pid: int) -> tuple[int, int]:
    """Return (resident, proportional) bytes; shared pages count once over all processes in the latter."""
    found = {"Rss": 0, "Pss": 0}
    try:
        lines = (_PROC / str(pid) / "smaps_rollup").read_text().splitlines()
    except OSError:
        return 0, 0
    for line in lines:
        name, _, rest = line.partition(":")
        if name in found:
            found[name] = int(rest.split()[0]) * 1024
    return found["Rss"], found["Pss"]


def table(processes: Sequence[ProcessInfo]) -> str:
    """Lay the processes out in columns, with the sum of PSS: what the instance costs the host."""
    lines = [_COLUMNS, *(_cells(process) for process in processes)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(_COLUMNS))]
    text = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]
    total = _mib(sum(process.pss_bytes for process in processes))
    return "\n".join([*text, f"{len(processes)} processes, {total} in all (PSS)", ""])


def _cells(process: ProcessInfo) -> tuple[str, ...]:
    return (
        process.role,
        str(process.index),
        str(process.pid),
        process.cpus,
        _mib(process.rss_bytes),
        _mib(process.pss_bytes),
        process.state,
        str(process.restarts),
        _duration(process.uptime_s),
    )


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / (1 << 20):.1f} MiB"


def _duration(seconds: float) -> str:
    whole = int(seconds)
    days, hours, minutes = whole // 86400, whole // 3600 % 24, whole // 60 % 60
    if days:
        return f"{days}d{hours:02d}h"
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{whole % 60:02d}s"
