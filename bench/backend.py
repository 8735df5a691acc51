"""The C backend: compiled when its source is newer, run on the load's core, asked for what it has seen."""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final
from urllib.request import urlopen

from bench import BenchError
from bench.machine import pinned

SOURCES: Final = Path(__file__).parent
OUT: Final = SOURCES / "out"
START_S: Final = 10.0
ANSWER_BYTES: Final = 305  # of every completion's body, without the head
SETTLE_S: Final = 0.1
SETTLE_READS: Final = 50


@dataclass(frozen=True, slots=True)
class Seen:
    """Counters of the backends since their start. ``requests``: one number a listener."""

    requests: tuple[int, ...]
    body_bytes: int
    bad_requests: int
    other_requests: int
    events_sent: int
    events_skipped: int
    events_late: int

    def since(self, before: Seen) -> Seen:
        """What was added after ``before``."""
        return Seen(
            requests=tuple(now - then for now, then in zip(self.requests, before.requests, strict=True)),
            body_bytes=self.body_bytes - before.body_bytes,
            bad_requests=self.bad_requests - before.bad_requests,
            other_requests=self.other_requests - before.other_requests,
            events_sent=self.events_sent - before.events_sent,
            events_skipped=self.events_skipped - before.events_skipped,
            events_late=self.events_late - before.events_late,
        )


def compiled(name: str) -> Path:
    """The program made from ``bench/NAME.c``, compiled if it is older than its source."""
    source, program = SOURCES / f"{name}.c", OUT / name
    if program.exists() and program.stat().st_mtime >= source.stat().st_mtime:
        return program
    OUT.mkdir(exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=OUT, prefix=name, delete=False) as fresh:
        target = Path(fresh.name)
    command = ["cc", "-O2", "-std=gnu11", "-Wall", "-Wextra", "-o", str(target), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        target.unlink()
        raise BenchError(f"{source.name} does not compile:\n{done.stderr}")
    target.replace(program)
    return program


class Backend:
    """Running backends, one process on each CPU; a context manager.

    ``ports``: two listeners a process. ``pids``: for CPU accounting.
    """

    def __init__(self, cpus: Sequence[int], events_per_s: int = 100) -> None:
        program = str(compiled("backend"))
        self._processes = [
            subprocess.Popen(
                pinned((cpu,), [program, str(events_per_s)]),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for cpu in cpus
        ]
        self.pids = tuple(process.pid for process in self._processes)
        self.ports = tuple(port for process in self._processes for port in _ports_of(process))

    @property
    def urls(self) -> tuple[str, ...]:
        return tuple(f"http://127.0.0.1:{port}" for port in self.ports)

    def seen(self) -> Seen:
        """Read the counters, past any front end."""
        found = []
        for url in self.urls[::2]:  # two listeners a process, one set of counters
            with urlopen(f"{url}/stats", timeout=START_S) as answer:
                found.append(json.load(answer))
        return Seen(
            requests=tuple(count for one in found for count in one["requests"]),
            body_bytes=sum(sum(one["body_bytes"]) for one in found),
            bad_requests=sum(one["bad_requests"] for one in found),
            other_requests=sum(one["other_requests"] for one in found),
            events_sent=sum(one["events_sent"] for one in found),
            events_skipped=sum(one["events_skipped"] for one in found),
            events_late=sum(one["events_late"] for one in found),
        )

    def settled(self) -> Seen:
        """The counters once they stand still: requests left under way belong to the round that sent them."""
        last = self.seen()
        for _ in range(SETTLE_READS):
            time.sleep(SETTLE_S)
            now = self.seen()
            if now == last:
                break
            last = now
        return last

    def __enter__(self) -> Backend:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # end of its standard input is a backend's signal to end
        for process in self._processes:
            process.communicate(timeout=START_S)


def _ports_of(process: subprocess.Popen[str]) -> tuple[int, int]:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise BenchError(f"the backend ended at once with code {process.wait(START_S)}")
    first, second = json.loads(line)["ports"]
    return first, second
