"""One round: load through one front end, with everything needed to believe or reject its numbers.

A round is *invalid* when anything failed, or when the backend did not see what the load generator claims:
then its numbers are kept in the output and used nowhere. A round is *bound by the load* when less than 90 %
of the front end's core was used: then its rate is not the front end's limit. CPU per request is good all the
same, since it counts only what the front end used. Where strangers took the rest of the core, a note says so.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from bench.backend import ANSWER_BYTES, Backend, Seen
from bench.launch import Running
from bench.load import Load, hold_streams, send_requests
from bench.machine import Cpus
from bench.tree import busy_s, cpu_of

DIRECT: Final = "direct"  # the load generator against the backend with nothing between
BOUND_BELOW: Final = 0.90
STRANGERS_ABOVE: Final = 0.05
MIN_DELIVERED: Final = 0.98
MAX_LATE: Final = 0.01


@dataclass(frozen=True, slots=True)
class Workload:
    """``streams`` 0: requests of ``body_bytes``. Otherwise streams of ``events_per_s`` each."""

    clients: int
    seconds: float
    body_bytes: int = 1024
    is_distinct: bool = True
    streams: int = 0
    events_per_s: int = 100
    events_per_stream: int = 1000

    @property
    def label(self) -> str:
        if self.streams:
            return f"{self.streams} streams × {self.events_per_s} events/s"
        size = self.body_bytes
        shown = (
            f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB" if size >= 1024 else f"{size} B"
        )
        return f"{shown} × {self.clients} clients"


@dataclass(frozen=True, slots=True)
class Round:
    """``core``: share of its core that the front end used; ``strangers``: share that others took of it.
    ``load_core``: share of the other core that load generator and backend used together."""

    front_end: str
    workload: str
    done: int
    per_s: float
    cpu_us: float
    cpu_us_by_process: Mapping[str, float]
    p50_us: float
    p99_us: float
    max_us: float
    core: float
    strangers: float
    load_core: float
    upstream_share: float
    faults: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def is_valid(self) -> bool:
        return not self.faults


@dataclass(frozen=True, slots=True)
class Reading:
    """Clocks at one moment."""

    wall_s: float
    front_end_s: Mapping[str, float]  # by process name
    backend_s: float
    core_s: float


def run_round(front_end: Running | None, backend: Backend, cpus: Cpus, workload: Workload) -> Round:
    """Run the workload once through ``front_end`` (None: directly) and account for it."""
    port = front_end.port if front_end else backend.ports[0]
    seen_before = backend.settled()
    read = _reader(front_end, backend, cpus)
    if workload.streams:
        readings: list[Reading] = []
        load, load_cpu_s = hold_streams(
            cpus.rest,
            port,
            streams=workload.streams,
            events_per_stream=workload.events_per_stream,
            seconds=workload.seconds,
            on_start=lambda: readings.append(read()),
            on_end=lambda: readings.append(read()),
        )
        before, after = readings
    else:
        before = read()
        load, load_cpu_s = send_requests(
            cpus.rest,
            port,
            clients=workload.clients,
            seconds=workload.seconds,
            body_bytes=workload.body_bytes,
            is_distinct=workload.is_distinct,
        )
        after = read()
    seen = backend.settled().since(seen_before)
    name = front_end.name if front_end else DIRECT
    return account(name, workload, load, load_cpu_s, seen, before, after)


def account(
    name: str, workload: Workload, load: Load, load_cpu_s: float, seen: Seen, before: Reading, after: Reading
) -> Round:
    """Turn raw readings into one round; pure."""
    wall_s = after.wall_s - before.wall_s
    # a process that ended in between has moved its time to its parent: its own part is then negative
    names = {**after.front_end_s, **before.front_end_s}
    parts_s = {part: after.front_end_s.get(part, 0.0) - before.front_end_s.get(part, 0.0) for part in names}
    used_s = sum(parts_s.values())
    strangers = max(0.0, (after.core_s - before.core_s - used_s) / wall_s)
    core = used_s / wall_s
    return Round(
        front_end=name,
        workload=workload.label,
        done=load.done,
        per_s=load.done / load.seconds,
        cpu_us=used_s / max(1, load.done) * 1e6,
        cpu_us_by_process={part: spent / max(1, load.done) * 1e6 for part, spent in parts_s.items()},
        p50_us=load.p50_us,
        p99_us=load.p99_us,
        max_us=load.max_us,
        core=core,
        strangers=strangers,
        load_core=(load_cpu_s + after.backend_s - before.backend_s) / wall_s,
        upstream_share=min(seen.requests) / max(1, sum(seen.requests)),
        faults=tuple(faults_of(workload, load, seen)),
        notes=tuple(notes_of(name, workload, load, seen, core, strangers)),
    )


def faults_of(workload: Workload, load: Load, seen: Seen) -> list[str]:
    """Why the round must not be used."""
    found = list(load.errors)
    if load.done == 0:
        found.append("nothing was done")
    if seen.bad_requests:
        found.append(f"{seen.bad_requests} requests that the backend could not read")
    if workload.streams:
        return found
    arrived = sum(seen.requests)
    # when the load ends, each client may have one request under way
    if not load.done <= arrived <= load.done + 2 * workload.clients:
        found.append(f"{load.done} answers, but {arrived} requests reached the backend")
    if load.received_bytes < load.done * ANSWER_BYTES:
        found.append(f"{load.done} answers brought only {load.received_bytes} B")
    if seen.body_bytes != arrived * workload.body_bytes:
        found.append(f"{arrived} requests of {workload.body_bytes} B brought {seen.body_bytes} B")
    return found


def notes_of(
    name: str, workload: Workload, load: Load, seen: Seen, core: float, strangers: float
) -> list[str]:
    """What a reader must know about a valid round."""
    found = []
    if name != DIRECT and not workload.streams and core + strangers < BOUND_BELOW:
        found.append(f"load generator bound: {core:.0%} of the core used")
    if name != DIRECT and strangers > STRANGERS_ABOVE:
        found.append(f"others took {strangers:.0%} of the core")
    if workload.streams:
        share = load.done / (workload.streams * workload.events_per_s * load.seconds)
        if share < MIN_DELIVERED:
            found.append(f"saturated: {share:.0%} of the events delivered in time")
        if seen.events_late > MAX_LATE * max(1, seen.events_sent):
            found.append(
                f"the backend itself was late with {seen.events_late / seen.events_sent:.0%} of the events"
            )
        if seen.events_skipped:
            found.append(f"{seen.events_skipped} events held back by a blocked reader")
    return found


def _reader(front_end: Running | None, backend: Backend, cpus: Cpus) -> Callable[[], Reading]:
    def read() -> Reading:
        return Reading(
            wall_s=time.monotonic(),
            front_end_s=front_end.cpu_s() if front_end else {},
            backend_s=cpu_of(backend.pid),
            core_s=busy_s(cpus.front),
        )

    return read
