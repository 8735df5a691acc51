"""Memory of an idle meshd that has a tokenizer, before its first request, as the kernel accounts for it.

Two figures have a limit: the PSS of the I/O process (its private pages, and its share of pages that several
processes map), and the private memory (Private_Dirty + Private_Clean) of each prepare worker beyond the
first, which is what one more worker really costs. `meshd ps --json` says who is who; only processes of the
tree started here count, so other instances on the machine do not matter.

Nothing is sent to the instance: readiness is a listener and the expected processes, not a request.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from bench import BenchError, tree
from bench.chosen import choose_tokenizer, keep, say
from bench.front_end import Site
from bench.front_ends import FRONT_ENDS
from bench.launch import end_tree
from bench.machine import free_port

MAX_IO_PSS_KIB: Final = 40 * 1024
MAX_NEXT_PREPARE_KIB: Final = 25 * 1024
READY_S: Final = 180.0
SETTLE_S: Final = 2.0  # imports and first timers are over; the figures no longer move


@dataclass(frozen=True, slots=True)
class Memory:
    """One process of meshd. ``role``: as `meshd ps` names it."""

    role: str
    index: int
    pid: int
    pss_kib: int
    private_kib: int
    rss_kib: int = 0

    @property
    def limit(self) -> tuple[str, int, int] | None:
        """(which figure, its value, its limit in KiB), for the processes that have one."""
        if self.role == "io":
            return "PSS", self.pss_kib, MAX_IO_PSS_KIB
        if self.role == "prepare" and self.index > 0:
            return "private", self.private_kib, MAX_NEXT_PREPARE_KIB
        return None

    @property
    def is_over(self) -> bool:
        return self.limit is not None and self.limit[1] > self.limit[2]


@dataclass(frozen=True, slots=True)
class Copies:
    """How often the tokenizer lies in memory.

    ``held``: by the number of leaders, each of which loads it once. ``shared_kib``: what prepare processes
    share among themselves (their PSS less what is private to the workers) beyond what they share without a
    tokenizer. ``one_kib``: one copy, by how much more a leader holds with a tokenizer than without.
    ``private_kib``: all workers' own pages together.
    """

    workers: int
    held: int
    shared_kib: int
    private_kib: int
    one_kib: int

    @property
    def measured(self) -> float:
        return self.shared_kib / self.one_kib if self.one_kib else 0.0


def copies_of(memories: Sequence[Memory], bare: Sequence[Memory]) -> Copies:
    """Count copies. ``bare``: the same node without a tokenizer; its leaders' memory is no copy's."""
    workers = [one for one in memories if one.role == "prepare"]
    leaders = [one for one in memories if one.role == "leader"]
    private_kib = sum(one.private_kib for one in workers)
    without_kib = _shared(bare)
    one_kib = _leader_kib(memories) - _leader_kib(bare)
    return Copies(len(workers), len(leaders), _shared(memories) - without_kib, private_kib, one_kib)


def _shared(memories: Sequence[Memory]) -> int:
    group = [one for one in memories if one.role in ("prepare", "leader")]
    return sum(one.pss_kib for one in group) - sum(one.private_kib for one in group if one.role == "prepare")


def _leader_kib(memories: Sequence[Memory]) -> int:
    """What a leader holds in all, shared with its workers or not."""
    return max((one.rss_kib for one in memories if one.role == "leader"), default=0)


def run_memory(args: argparse.Namespace) -> int:
    """The command: exit code 1 when a process is over its limit."""
    more = tuple(shlex.split(args.meshd_args))
    found = measure_memory(choose_tokenizer(args.tokenizer), args.prepare_workers, more)
    bare = measure_memory(None, args.prepare_workers, more)
    copies = copies_of(found, bare)
    path = keep("memory", {"processes": [asdict(one) for one in found], "copies": asdict(copies)})
    say(f"{table(found)}\n\n{told(copies)}\n\nraw figures: {path}")
    return 1 if any(one.is_over for one in found) else 0


def told(copies: Copies) -> str:
    """The copies in a sentence."""
    return (
        f"{copies.workers} prepare workers hold {copies.held} copies of the tokenizer, one a leader "
        f"(measured: {copies.shared_kib / 1024:.0f} MiB shared, {copies.measured:.1f} times the "
        f"{copies.one_kib / 1024:.0f} MiB that it adds to a leader), "
        f"and {copies.private_kib / 1024:.0f} MiB of their own"
    )


def measure_memory(tokenizer: Path | None, prepare_workers: int, meshd_args: tuple[str, ...]) -> list[Memory]:
    """Start meshd, with the tokenizer or without; when all is up and idle, read what each process holds."""
    with tempfile.TemporaryDirectory(prefix="meshd-bench-") as name:
        log_path = Path(name, "log")
        port = free_port()
        more = ("--prepare-workers", str(prepare_workers), *meshd_args)
        # the upstreams are never asked for anything: health checks are off
        upstreams = ("http://127.0.0.1:9", "http://127.0.0.2:9")
        policy = "prefix_hash" if tokenizer else "round_robin"
        site = Site(Path(name), port, free_port(), upstreams, policy, tokenizer, more)
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                FRONT_ENDS["meshd"].command(site), stdout=log, stderr=log, start_new_session=True
            )
        try:
            rows = _wait_for_processes(process, port, prepare_workers, log_path)
            time.sleep(SETTLE_S)
            return [_measured(row) for row in rows]
        finally:
            end_tree(process)


def parse_ps(text: str, pids: set[int]) -> list[dict[str, Any]]:
    """Rows of ``meshd ps --json`` (one JSON array a line and instance) that belong to ``pids``."""
    return [row for line in text.splitlines() for row in json.loads(line) if row["pid"] in pids]


def table(memories: Sequence[Memory]) -> str:
    """Markdown, one line a process."""
    lines = ["| process | PSS MiB | private MiB | limit |", "|---|---|---|---|"]
    for one in memories:
        verdict = ""
        if one.limit:
            figure, _, most = one.limit
            verdict = f"{figure} ≤ {most // 1024} MiB: {'OVER' if one.is_over else 'kept'}"
        figures = f"{one.pss_kib / 1024:.1f} | {one.private_kib / 1024:.1f}"
        lines.append(f"| {one.role} {one.index} | {figures} | {verdict} |")
    return "\n".join(lines)


def _wait_for_processes(
    process: subprocess.Popen[bytes], port: int, prepare_workers: int, log_path: Path
) -> list[dict[str, Any]]:
    deadline_s = time.monotonic() + READY_S
    while time.monotonic() < deadline_s and process.poll() is None:
        pids = {member.pid for member in tree.tree(process.pid)}
        if tree.listening_pids(port, pids):
            rows = parse_ps(_ps(), pids)
            roles = [row["role"] for row in rows if row["state"] == "ready"]
            if "io" in roles and roles.count("prepare") == prepare_workers:
                return rows
        time.sleep(0.2)
    raise BenchError(f"meshd did not come up:\n{log_path.read_text(errors='replace')[-4000:]}")


def _ps() -> str:
    command = [sys.executable, "-m", "meshd", "ps", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout  # empty, with code 1, while no instance has got as far as its board


def _measured(row: dict[str, Any]) -> Memory:
    sums = tree.smaps_kib(row["pid"])
    private = sums["Private_Dirty"] + sums["Private_Clean"]
    return Memory(str(row["role"]), int(row["index"]), int(row["pid"]), sums["Pss"], private, sums["Rss"])
