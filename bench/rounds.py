"""One round: load through one front end, with everything needed to believe or reject its numbers.

A round is *invalid* when anything failed, or when the backend did not see what the load generator claims:
then its numbers are kept in the output and used nowhere. Who was the *bottleneck* is told from how busy each
part was: where it was not the front end, the rate is not the front end's limit. CPU per request is good all
the same, since it counts only what the front end used. Where strangers took the rest, a note says so.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from bench.backend import ANSWER_BYTES, Backend, Seen
from bench.cpu_sets import Cpus
from bench.launch import Running
from bench.load import Load, hold_streams, send_requests
from bench.tree import busy_s, cpu_of, memory_kib
from bench.workload import Workload

DIRECT: Final = "direct"  # the load generator against the backend with nothing between
BOUND_ABOVE: Final = 0.90
STRANGERS_ABOVE: Final = 0.05
CROWDED_ABOVE: Final = 0.25  # then the rate says more about the others
MIN_DELIVERED: Final = 0.98
MAX_LATE: Final = 0.01


@dataclass(frozen=True, slots=True)
class Round:
    """``core``: share of its cores that the front end used; ``strangers``: share that others took of them.

    ``load_core``, ``backend_core``: shares of their own cores. With long prompts among short ones, ``per_s``
    and the latencies are those of the short requests, ``long_*`` those of the long ones, and ``cpu_us`` is
    for a request of either kind. ``rss_kib`` and ``pss_kib``: of the whole tree, right after the round.
    """

    front_end: str
    workload: str
    done: int
    per_s: float
    cpu_us: float
    cpu_us_by_process: Mapping[str, float]
    mean_us: float
    p50_us: float
    p99_us: float
    max_us: float
    core: float
    strangers: float
    load_core: float
    backend_core: float
    upstream_share: float
    bottleneck: str
    faults: tuple[str, ...]
    notes: tuple[str, ...]
    long_per_s: float = 0.0
    long_p99_us: float = 0.0
    rss_kib: int = 0
    pss_kib: int = 0

    @property
    def is_valid(self) -> bool:
        return not self.faults


def round_from(found: Mapping[str, Any]) -> Round:
    """A round as `dataclasses.asdict` and JSON kept it."""
    return Round(**{**found, "faults": tuple(found["faults"]), "notes": tuple(found["notes"])})


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
            cpus,
            port,
            streams=workload.streams,
            events_per_stream=workload.events_per_stream,
            seconds=workload.seconds,
            on_start=lambda: readings.append(read()),
            on_end=lambda: readings.append(read()),
        )
        before, after, loads = *readings, [load]
    else:
        before = read()
        loads, load_cpu_s = send_requests(cpus, port, workload.sendings, workload.seconds)
        after = read()
    rss_kib, pss_kib = memory_kib(front_end.pid) if front_end else (0, 0)
    if front_end:
        front_end.calm()
    seen = backend.settled().since(seen_before)
    done = account(
        front_end.name if front_end else DIRECT,
        workload,
        loads,
        load_cpu_s,
        seen,
        before,
        after,
        cpus=cpus,
        rewrites_bodies=bool(front_end and front_end.rewrites_bodies),
    )
    return replace(done, rss_kib=rss_kib, pss_kib=pss_kib)


def account(
    name: str,
    workload: Workload,
    loads: Sequence[Load],
    load_cpu_s: float,
    seen: Seen,
    before: Reading,
    after: Reading,
    *,
    cpus: Cpus,
    rewrites_bodies: bool = False,
) -> Round:
    """Turn raw readings into one round; pure."""
    wall_s = after.wall_s - before.wall_s
    # a process that ended in between has moved its time to its parent: its own part is then negative
    names = {**after.front_end_s, **before.front_end_s}
    parts_s = {part: after.front_end_s.get(part, 0.0) - before.front_end_s.get(part, 0.0) for part in names}
    used_s = sum(parts_s.values())
    front_s = wall_s * len(cpus.front)
    strangers = max(0.0, (after.core_s - before.core_s - used_s) / front_s)
    backend_s = after.backend_s - before.backend_s
    load_s = load_cpu_s if cpus.are_backend_and_load_apart else load_cpu_s + backend_s
    shares = Shares(
        core=used_s / front_s,
        hottest=max(parts_s.values(), default=0.0) / wall_s,
        strangers=strangers,
        load=load_s / wall_s / len(cpus.load),
        backend=backend_s / wall_s / len(cpus.backend),
    )
    done = sum(load.done for load in loads)
    first = loads[0]
    return Round(
        front_end=name,
        workload=workload.label,
        done=done,
        per_s=first.done / first.seconds,
        cpu_us=used_s / max(1, done) * 1e6,
        cpu_us_by_process={part: spent / max(1, done) * 1e6 for part, spent in parts_s.items()},
        mean_us=first.mean_us,
        p50_us=first.p50_us,
        p99_us=first.p99_us,
        max_us=first.max_us,
        core=shares.core,
        strangers=strangers,
        load_core=shares.load,
        backend_core=shares.backend,
        upstream_share=min(seen.requests) / max(1, sum(seen.requests)),
        bottleneck=bottleneck_of(name, shares, cpus.are_backend_and_load_apart),
        faults=tuple(faults_of(workload, loads, seen, rewrites_bodies)),
        notes=tuple(notes_of(name, workload, loads, seen, shares)),
        long_per_s=loads[1].done / loads[1].seconds if len(loads) > 1 else 0.0,
        long_p99_us=loads[1].p99_us if len(loads) > 1 else 0.0,
    )


@dataclass(frozen=True, slots=True)
class Shares:
    """How busy each part was, of its cores; ``hottest``: the front end's busiest process, of one core."""

    core: float
    hottest: float
    strangers: float
    load: float
    backend: float

    @property
    def is_front_full(self) -> bool:
        return self.core + self.strangers >= BOUND_ABOVE or self.hottest >= BOUND_ABOVE


def bottleneck_of(name: str, shares: Shares, are_apart: bool) -> str:
    """Who had nothing left to give. ``are_apart``: backend and load generator have CPUs of their own."""
    if name != DIRECT and shares.is_front_full:
        return "others on its cores" if shares.strangers > CROWDED_ABOVE else "front end"
    if not are_apart:
        return "load generator and backend" if shares.load >= BOUND_ABOVE else "none"
    if shares.load >= BOUND_ABOVE:
        return "load generator"
    return "backend" if shares.backend >= BOUND_ABOVE else "none"


def faults_of(workload: Workload, loads: Sequence[Load], seen: Seen, rewrites_bodies: bool) -> list[str]:
    """Why the round must not be used."""
    found = [error for load in loads for error in load.errors]
    if any(load.done == 0 for load in loads):  # beside no long request the short ones prove nothing
        found.append("nothing was done")
    if seen.bad_requests:
        found.append(f"{seen.bad_requests} requests that the backend could not read")
    if workload.streams:
        return found
    done, arrived = sum(load.done for load in loads), sum(seen.requests)
    # when the load ends, each client may have one request under way
    if not done <= arrived <= done + 2 * (workload.clients + workload.long_clients):
        found.append(f"{done} answers, but {arrived} requests reached the backend")
    received = sum(load.received_bytes for load in loads)
    if received < done * ANSWER_BYTES:
        found.append(f"{done} answers brought only {received} B")
    return found + _faults_of_bodies(workload, loads, seen, rewrites_bodies)


def _faults_of_bodies(
    workload: Workload, loads: Sequence[Load], seen: Seen, rewrites_bodies: bool
) -> list[str]:
    """Exact where it can be: one size, forwarded as it came. A rewritten body must not have shrunk."""
    arrived = sum(seen.requests)
    if not workload.long_clients and not rewrites_bodies:
        if seen.body_bytes != arrived * workload.body_bytes:
            return [f"{arrived} requests of {workload.body_bytes} B brought {seen.body_bytes} B"]
        return []
    sizes = [sending.body_bytes for sending in workload.sendings]
    least = sum(load.done * size for load, size in zip(loads, sizes, strict=True))
    if seen.body_bytes < least:
        return [f"{arrived} requests brought {seen.body_bytes} B, fewer than the {least} B sent"]
    return []


def notes_of(name: str, workload: Workload, loads: Sequence[Load], seen: Seen, shares: Shares) -> list[str]:
    """What a reader must know about a valid round."""
    found = []
    if name != DIRECT and not workload.streams and not shares.is_front_full:
        found.append(f"load generator bound: {shares.core:.0%} of the core used")
    if name != DIRECT and shares.strangers > STRANGERS_ABOVE:
        found.append(f"others took {shares.strangers:.0%} of the core")
    if seen.other_requests:
        found.append(f"{seen.other_requests} requests to the backend that no client asked for")
    if workload.streams:
        load = loads[0]
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
            backend_s=sum(cpu_of(pid) for pid in backend.pids),
            core_s=busy_s(cpus.front),
        )

    return read
