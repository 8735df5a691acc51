"""The C backend: compiled when its source is newer, run on the load's core, asked for what it has seen."""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
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
    """Counters of the backend since its start. ``requests``: one number a listener."""

    requests: tuple[int, int]
    body_bytes: int
    bad_requests: int
    events_sent: int
    events_skipped: int
    events_late: int

    def since(self, before: Seen) -> Seen:
        """What was added after ``before``."""
        return Seen(
            requests=(self.requests[0] - before.requests[0], self.requests[1] - before.requests[1]),
            body_bytes=self.body_bytes - before.body_bytes,
            bad_requests=self.bad_requests - before.bad_requests,
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
    """A running backend; a context manager. ``ports``: its two listeners. ``pid``: for CPU accounting."""

    def __init__(self, cpu: int, events_per_s: int = 100) -> None:
        command = pinned(cpu, [str(compiled("backend")), str(events_per_s)])
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.pid = self._process.pid
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise BenchError(f"the backend ended at once with code {self._process.wait(START_S)}")
        first, second = json.loads(line)["ports"]
        self.ports: tuple[int, int] = (first, second)

    @property
    def urls(self) -> tuple[str, str]:
        first, second = self.ports
        return f"http://127.0.0.1:{first}", f"http://127.0.0.1:{second}"

    def seen(self) -> Seen:
        """Read the counters, past any front end."""
        with urlopen(f"{self.urls[0]}/stats", timeout=START_S) as answer:
            found = json.load(answer)
        return Seen(
            requests=tuple(found["requests"]),
            body_bytes=sum(found["body_bytes"]),
            bad_requests=found["bad_requests"],
            events_sent=found["events_sent"],
            events_skipped=found["events_skipped"],
            events_late=found["events_late"],
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
        # end of its standard input is the backend's signal to end
        self._process.communicate(timeout=START_S)
