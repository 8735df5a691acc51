"""Keep the set of upstreams: register, change, publish. The one writer of the registry board.

Changes take effect here at once and are published together a few milliseconds later, so that a thousand
registrations are a few generations instead of a thousand; each publication rings the doorbells of the I/O
processes. Jobs (how a registration went) live in this process alone and are forgotten 5 minutes after
their end.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from meshd.config.settings import Settings
from meshd.controller.registration import Discovered, settled_labels, settled_models
from meshd.log import Log
from meshd.routing.load import free_number
from meshd.routing.registry import RegistryBoard, Upstream

PUBLISH_DELAY_S: Final = 0.01
JOB_KEPT_S: Final = 300.0

JobStatus = Literal["pending", "processing", "completed", "failed"]


@dataclass(frozen=True, slots=True)
class Job:
    """A registration. ``ended_s``: monotonic time of its end, None while it runs; ``timestamp``: Unix."""

    worker_url: str
    status: JobStatus
    timestamp: int
    message: str = ""
    ended_s: float | None = None


@dataclass(frozen=True, slots=True)
class Announcement:
    """An upstream to register. ``model_id``: configured model, empty to discover it."""

    base_url: str
    api_key: str | None = None
    model_id: str = ""
    labels: tuple[tuple[str, str], ...] = ()
    priority: int = 50
    cost: float = 1.0


def announcements(settings: Settings) -> list[Announcement]:
    """Return the upstreams of the settings: ``worker_urls``, then ``[[workers]]``, in their order."""
    default_key = settings.api_key or None
    plain = [Announcement(url, default_key) for url in settings.worker_urls]
    described = [
        Announcement(
            spec.url,
            spec.api_key or default_key,
            spec.model_id,
            tuple(spec.labels.items()),
            spec.priority,
            spec.cost,
        )
        for spec in settings.workers
    ]
    return [*plain, *described]


class RegistryKeeper:
    """The upstreams of this node, in registration order.

    ``is_idle``: whether no process holds load on a number. ``schedule``: runs a callable a little later,
    once (the event loop's ``call_later``). ``ring_bells``: tells the I/O processes of a new generation.
    ``is_dp_aware``: a server becomes one upstream for each of its data-parallel ranks when it is registered.
    """

    def __init__(
        self,
        board: RegistryBoard,
        log: Log,
        *,
        is_idle: Callable[[int], bool],
        schedule: Callable[[float, Callable[[], None]], object],
        ring_bells: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        is_dp_aware: bool = False,
    ) -> None:
        self._board = board
        self._log = log
        self._is_idle = is_idle
        self._schedule = schedule
        self._ring_bells = ring_bells
        self._clock = clock
        self._wall_clock = wall_clock
        self._is_dp_aware = is_dp_aware
        self._upstreams: list[Upstream] = []
        self._jobs: dict[str, Job] = {}
        self._last_number = -1
        self._is_scheduled = False

    @property
    def upstreams(self) -> Sequence[Upstream]:
        return tuple(self._upstreams)

    def start(self, wanted: Iterable[Announcement]) -> None:
        """Go on with the set a predecessor published; without one, register ``wanted`` and publish."""
        found = self._board.read()
        if found.generation:
            self._upstreams = list(found.upstreams)
            self._last_number = max((u.number for u in found.upstreams), default=-1)
            for upstream in found.upstreams:
                if upstream.state == "starting":
                    self._set_job(upstream, "pending")
            self._log.info("registry_resumed", generation=found.generation, upstreams=len(found.upstreams))
            return
        for announcement in wanted:
            self.register(announcement)
        self.flush()

    def register(self, announcement: Announcement) -> Upstream | None:
        """Add an upstream in state ``starting``; None if the set is full. The URL must be new."""
        taken = {upstream.number for upstream in self._upstreams}
        number = free_number(taken, self._is_idle, self._last_number)
        if number is None:
            self._log.error("registration_refused", upstream=announcement.base_url, reason="set is full")
            return None
        self._last_number = number
        upstream = Upstream(
            number=number,
            id=str(uuid.uuid4()),
            base_url=announcement.base_url,
            models=tuple(filter(None, [announcement.model_id])),
            labels=dict(announcement.labels),
            priority=announcement.priority,
            cost=announcement.cost,
            api_key=announcement.api_key,
        )
        self._upstreams.append(upstream)
        self._set_job(upstream, "pending")
        self._publish_soon()
        return upstream

    def origins(self) -> list[str]:
        """Return the base URLs that are to be probed: each once, draining ones excluded."""
        return list(dict.fromkeys(u.base_url for u in self._upstreams if u.state != "draining"))

    def of_origin(self, base_url: str) -> list[Upstream]:
        return [upstream for upstream in self._upstreams if upstream.base_url == base_url]

    def begin(self, base_url: str) -> None:
        """Note that the registration of an origin is being worked on."""
        for upstream in self.of_origin(base_url):
            self._set_job(upstream, "processing")

    def activate(self, base_url: str, discovered: Discovered) -> None:
        """Complete the registration of an origin: its facts, its ranks, state ``active``, healthy.

        An origin that has to have ranks and cannot has failed: it stays as it is, and is tried again.
        """
        if self._is_dp_aware:
            problem = self._split(base_url, discovered.dp_size)
            if problem:
                self.fail(base_url, problem)
                self._log.warning("registration_failed", upstream=base_url, reason=problem)
                return
        for upstream in self.of_origin(base_url):
            labels = settled_labels(discovered, upstream.labels)
            models = settled_models(discovered, upstream.models, labels)
            self._change(upstream, labels=labels, models=models, state="active", is_healthy=True)
            self._set_job(upstream, "completed", discovered.problem)
        ranks = self.of_origin(base_url)
        self._log.info(
            "upstream_active",
            upstream=base_url,
            models=",".join(ranks[0].models),
            ranks=ranks[0].dp_size,
            problem=discovered.problem or None,
        )

    def fail(self, base_url: str, message: str) -> None:
        """Note that a registration has not succeeded in time; the upstream stays and is probed on."""
        for upstream in self.of_origin(base_url):
            self._set_job(upstream, "failed", message)

    def note_problem(self, base_url: str, problem: str) -> None:
        """Tell in the jobs of an origin why its registration does not go on."""
        for upstream in self.of_origin(base_url):
            job = self._jobs.get(upstream.id)
            if job is not None and job.status == "processing":
                self._set_job(upstream, job.status, problem)

    def set_health(self, base_url: str, is_healthy: bool) -> None:
        for upstream in self.of_origin(base_url):
            self._change(upstream, is_healthy=is_healthy)
        level = self._log.info if is_healthy else self._log.warning
        level("upstream_healthy" if is_healthy else "upstream_unhealthy", upstream=base_url)

    def job(self, upstream: Upstream) -> Job | None:
        """Return how the registration of ``upstream`` goes or went, None if that is long ago."""
        job = self._jobs.get(upstream.id)
        if job is not None and job.ended_s is not None and self._clock() - job.ended_s >= JOB_KEPT_S:
            del self._jobs[upstream.id]
            return None
        return job

    def flush(self) -> None:
        """Publish now. A set that does not fit into its shared memory leaves the last one in force."""
        self._is_scheduled = False
        try:
            generation = self._board.publish(self._upstreams)
        except ValueError as exc:
            self._log.error("registry_not_published", reason=str(exc))
            return
        self._ring_bells()
        self._log.debug("registry_published", generation=generation, upstreams=len(self._upstreams))

    def __repr__(self) -> str:
        return f"RegistryKeeper({[(u.url, u.state, u.is_healthy) for u in self._upstreams]})"

    def _split(self, base_url: str, dp_size: int | None) -> str:
        """Put one upstream for each rank where the origin stands; return why that cannot be, or nothing."""
        origin = self.of_origin(base_url)[0]
        if origin.dp_rank is not None:
            return ""
        if dp_size is None:
            return "the server does not tell its dp_size"
        numbers = [origin.number]
        taken = {upstream.number for upstream in self._upstreams}
        while len(numbers) < dp_size:
            number = free_number(taken, self._is_idle, self._last_number)
            if number is None:
                return f"the set has no room for {dp_size} ranks"
            self._last_number = number
            taken.add(number)
            numbers.append(number)
        ranks = [
            replace(
                origin,
                number=number,
                id=str(uuid.uuid4()),
                dp_rank=rank,
                dp_size=dp_size,
                origin_id=origin.id,
            )
            for rank, number in enumerate(numbers)
        ]
        place = self._upstreams.index(origin)
        self._upstreams[place : place + 1] = ranks
        self._jobs.pop(origin.id, None)
        return ""

    def _change(self, upstream: Upstream, **changes: Any) -> None:
        changed = replace(upstream, **changes)
        if changed != upstream:
            self._upstreams[self._upstreams.index(upstream)] = changed
            self._publish_soon()

    def _publish_soon(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            self._schedule(PUBLISH_DELAY_S, self.flush)

    def _set_job(self, upstream: Upstream, status: JobStatus, message: str = "") -> None:
        ended_s = self._clock() if status in ("completed", "failed") else None
        self._jobs[upstream.id] = Job(upstream.url, status, int(self._wall_clock()), message, ended_s)
