"""The load generators: wrk for requests, `load.c` for streams, and what their output means.

Long prompts among short ones are two wrk at once, so that each kind has latencies of its own.
"""

from __future__ import annotations

import json
import resource
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from bench import BenchError
from bench.backend import SOURCES, compiled
from bench.cpu_sets import Cpus
from bench.machine import pinned

TIMEOUT_S: Final = 10  # wrk counts a request without an answer after this as an error
SLACK_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Load:
    """What one run of a load generator saw. ``done``: successful requests, or events of streams.

    Latencies are of whole requests (closed loop: a client sends the next request when it has the answer),
    or of single events from the backend's send to the client's read.
    """

    seconds: float
    done: int
    received_bytes: int
    errors: tuple[str, ...]
    mean_us: float
    p50_us: float
    p99_us: float
    max_us: float


def parse_wrk(output: str) -> Load:
    """Read the JSON line that `completions.lua` printed last.

    A request with a status above 399 is in wrk's count of requests and is taken out again.
    """
    found = _last_json(output, "wrk")
    kinds = ("connect", "read", "write", "status", "timeout")
    return Load(
        seconds=found["seconds"],
        done=found["requests"] - found["status"],
        received_bytes=found["bytes"],
        errors=tuple(f"{found[kind]} {kind} errors" for kind in kinds if found[kind]),
        mean_us=found["mean_us"],
        p50_us=found["p50_us"],
        p99_us=found["p99_us"],
        max_us=found["max_us"],
    )


def parse_streams(output: str) -> Load:
    """Read the JSON line of `load.c`."""
    found = _last_json(output, "load")
    errors = (
        (f"{found['errors']} streams failed, the first: {found['first_error']}",) if found["errors"] else ()
    )
    return Load(
        seconds=found["seconds"],
        done=found["events"],
        received_bytes=found["bytes"],
        errors=errors,
        mean_us=found["mean_us"],
        p50_us=found["p50_us"],
        p99_us=found["p99_us"],
        max_us=found["max_us"],
    )


@dataclass(frozen=True, slots=True)
class Sending:
    """One wrk: so many clients, each with bodies of this size."""

    clients: int
    body_bytes: int
    is_distinct: bool = True


def send_requests(
    cpus: Cpus, port: int, sendings: Sequence[Sending], seconds: float
) -> tuple[list[Load], float]:
    """Run one wrk for each of ``sendings``, all at once, to their end; what each saw, and their CPU time."""
    before_s = _reaped_cpu_s()
    running = [
        subprocess.Popen(
            pinned(cpus.load, _wrk(len(cpus.load), port, sending, seconds)),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for sending in sendings
    ]
    outputs = [process.communicate(timeout=seconds + SLACK_S)[0] for process in running]
    for process, output in zip(running, outputs, strict=True):
        if process.returncode:
            raise BenchError(f"wrk failed with code {process.returncode}:\n{output}")
    return [parse_wrk(output) for output in outputs], _reaped_cpu_s() - before_s


def _wrk(cores: int, port: int, sending: Sending, seconds: float) -> list[str]:
    threads = min(cores, sending.clients)
    command = ["wrk", f"-t{threads}", f"-c{sending.clients}", f"-d{max(1, round(seconds))}s"]
    command += [f"--timeout={TIMEOUT_S}s", "-s", str(SOURCES / "completions.lua")]
    command += [f"http://127.0.0.1:{port}", "--"]
    return [*command, str(sending.body_bytes), "distinct" if sending.is_distinct else "fixed"]


def hold_streams(
    cpus: Cpus,
    port: int,
    *,
    streams: int,
    events_per_stream: int,
    seconds: float,
    on_start: Callable[[], None],
    on_end: Callable[[], None],
) -> tuple[Load, float]:
    """Run `load.c`; what it saw and its CPU seconds.

    ``on_start`` is called when every stream runs and the count begins, ``on_end`` when it ends and all
    connections are still open: between the two lies the window to take CPU times for.
    """
    command = [str(compiled("load")), str(port), str(streams), str(events_per_stream), str(seconds)]
    with subprocess.Popen(
        pinned(cpus.load, command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        started = process.stdout.readline().split()
        on_start()
        line = process.stdout.readline()
        on_end()
        process.communicate(timeout=SLACK_S)
    if not line:
        raise BenchError(f"the stream load ended early with code {process.returncode}")
    load = parse_streams(line)
    if int(started[1]) < streams:
        raise BenchError(f"only {started[1]} of {streams} streams began; {' '.join(load.errors)}")
    return load, float(json.loads(line)["cpu_s"])


def _last_json(output: str, program: str) -> dict[str, Any]:
    for line in reversed(output.splitlines()):
        if line.startswith("{"):
            found: dict[str, Any] = json.loads(line)
            return found
    raise BenchError(f"{program} printed no result:\n{output}")


def _reaped_cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
