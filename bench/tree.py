"""Process trees as /proc shows them: members, CPU time, affinity, listeners and memory.

A tree is a root process, all its descendants, and whoever still is in the root's session (so that a child
whose parent has died is not lost). The CPU time of a tree is the sum over its live members of their own
time and of the time of the children they have reaped: a child that ends between two readings moves its
time from "own" to its parent's "reaped" and is neither lost nor counted twice. One clock tick (10 ms) is
the resolution: over a window of seconds that is below half a percent.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")
LISTEN: Final = "0A"  # the state column of /proc/net/tcp


@dataclass(frozen=True, slots=True)
class Process:
    """One line of /proc/PID/stat."""

    pid: int
    parent: int
    session: int
    name: str
    is_zombie: bool
    cpu_s: float  # utime + stime, plus those of the children it has reaped


def parse_stat(line: str) -> Process:
    """Read a line of /proc/PID/stat (proc(5)); the name may itself hold spaces and parentheses."""
    opening, closing = line.index("("), line.rindex(")")
    fields = line[closing + 2 :].split()
    ticks = sum(int(field) for field in fields[11:15])
    return Process(
        pid=int(line[:opening]),
        parent=int(fields[1]),
        session=int(fields[3]),
        name=line[opening + 1 : closing],
        is_zombie=fields[0] == "Z",
        cpu_s=ticks / TICKS_PER_S,
    )


def all_processes() -> list[Process]:
    """Every process of the machine that lives long enough to be read."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                found.append(parse_stat(Path("/proc", entry, "stat").read_text()))
            except (FileNotFoundError, ProcessLookupError):
                continue
    return found


def members_of(root: int, processes: Iterable[Process]) -> list[Process]:
    """The tree of ``root``, the root first; empty when it is gone."""
    children: dict[int, list[Process]] = defaultdict(list)
    by_pid = {process.pid: process for process in processes}
    for process in by_pid.values():
        children[process.parent].append(process)
    pending = [by_pid[root]] if root in by_pid else []
    pending += [process for process in by_pid.values() if process.session == root and process.pid != root]
    found: dict[int, Process] = {}
    while pending:
        process = pending.pop(0)
        if process.pid not in found:
            found[process.pid] = process
            pending += children[process.pid]
    return list(found.values())


def tree(root: int) -> list[Process]:
    """The tree of ``root`` as it is now."""
    return members_of(root, all_processes())


def cpu_of(root: int) -> float:
    """CPU seconds that the tree of ``root`` has used so far."""
    return sum(cpu_by_name(root).values())


def cpu_by_name(root: int) -> dict[str, float]:
    """The same, apart by the names of the processes."""
    found: dict[str, float] = defaultdict(float)
    for process in tree(root):
        found[process.name] += process.cpu_s
    return dict(found)


def busy_s(cpus: Iterable[int]) -> float:
    """Seconds that the CPUs have spent on anything but idling, whoever asked for it (steal included)."""
    wanted, ticks = {f"cpu{cpu}" for cpu in cpus}, 0
    for line in Path("/proc/stat").read_text().splitlines():
        name, _, figures = line.partition(" ")
        if name in wanted:
            user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, figures.split()[:8])
            ticks += user + nice + system + irq + softirq + steal
    return ticks / TICKS_PER_S


def strays(root: int, cpus: Iterable[int]) -> list[str]:
    """Threads of the tree that may run on any CPU but ``cpus``; empty is what a measurement needs."""
    allowed = set(cpus)
    found = []
    for process in tree(root):
        try:
            threads = os.listdir(f"/proc/{process.pid}/task")
            found += [
                f"{process.name} (pid {process.pid}, thread {thread})"
                for thread in threads
                if not os.sched_getaffinity(int(thread)) <= allowed
            ]
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def listening_pids(port: int, pids: Iterable[int]) -> set[int]:
    """Those of ``pids`` that hold a TCP socket listening on ``port``."""
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
                inodes.add(f"socket:[{fields[9]}]")
    return {pid for pid in pids if inodes & _links(pid)}


def smaps_kib(pid: int) -> dict[str, int]:
    """The sums of /proc/PID/smaps_rollup in KiB: ``Pss``, ``Private_Dirty``, ``Private_Clean`` and so on."""
    return parse_smaps(Path(f"/proc/{pid}/smaps_rollup").read_text())


def memory_kib(root: int) -> tuple[int, int]:
    """(sum of Rss, sum of Pss) of a tree in KiB; a page that several map counts once in Pss."""
    rss = pss = 0
    for process in tree(root):
        try:
            sums = smaps_kib(process.pid)
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        rss, pss = rss + sums.get("Rss", 0), pss + sums.get("Pss", 0)
    return rss, pss


def parse_smaps(text: str) -> dict[str, int]:
    """Read smaps_rollup; its first line is an address range and carries no sum."""
    rows = (line.split() for line in text.splitlines()[1:])
    return {row[0].rstrip(":"): int(row[1]) for row in rows if len(row) == 3 and row[2] == "kB"}


def _links(pid: int) -> set[str]:
    try:
        names = os.listdir(f"/proc/{pid}/fd")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return set()
    found = set()
    for name in names:
        try:
            found.add(os.readlink(f"/proc/{pid}/fd/{name}"))
        except FileNotFoundError:
            continue
    return found
