"""Keep the set of upstreams: register, change, drain. The one writer of the registry board.

Changes take effect here at once and are published together a few milliseconds later (``publisher.py``). What
must outlive this process is published with them: the set itself, and a memo for the successor.

Who asks for changes: the API (``worker_changes.py``), settings and discovery (``sources.py``), and the
prober, by what it finds (``registering.py``).
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from enum import StrEnum
from typing import Any, Final

import orjson

from meshd.controller.announcement import Announcement
from meshd.controller.departures import Departures
from meshd.controller.jobs import Job, JobBook
from meshd.controller.publisher import Publisher
from meshd.controller.registration import filled_fields
from meshd.log import Log
from meshd.routing.load import free_number
from meshd.routing.registry import Registry, RegistryBoard, Upstream

API: Final = "api"
MAX_DESCRIPTION_BYTES: Final = 8192


class Refusal(StrEnum):
    """Why an upstream was not registered."""

    EXISTS = "the URL is registered already"
    FULL = "the set is full"
    TOO_LARGE = "its description has more than 8192 bytes"


class RegistryKeeper:
    """The upstreams of this node, in registration order.

    ``is_idle``: whether no process holds load on a number; then a draining upstream leaves. ``is_clean``:
    whether nothing else is remembered of a number's former owner; a new upstream waits for both.
    ``ring_bells``: tells the I/O processes of a new generation. ``memo``: plain JSON that a successor finds.
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
        is_clean: Callable[[int], bool] = lambda _number: True,
    ) -> None:
        self._log = log
        self._is_idle = is_idle
        self._wall_clock = wall_clock
        self._is_clean = is_clean
        self.publisher = Publisher(board, log, self._contents, schedule, ring_bells)
        self.jobs = JobBook(clock, wall_clock)
        self.departures = Departures(clock, wall_clock)
        self._upstreams: list[Upstream] = []
        self.memo: dict[str, Any] = {}
        self._last_number = -1

    # --------------------------------------------------------------------------------------- looking

    @property
    def upstreams(self) -> Sequence[Upstream]:
        return tuple(self._upstreams)

    def present(self, base_url: str) -> list[Upstream]:
        """Return the upstreams of an origin that do not drain."""
        return [upstream for upstream in self.of_origin(base_url) if upstream.state != "draining"]

    def find(self, upstream_id: str) -> list[Upstream]:
        """Return the upstream with this id, or all ranks of the server with it; empty: there is none."""
        own = [upstream for upstream in self._upstreams if upstream.id == upstream_id]
        return own or [upstream for upstream in self._upstreams if upstream.origin_id == upstream_id]

    def of_origin(self, base_url: str) -> list[Upstream]:
        return [upstream for upstream in self._upstreams if upstream.base_url == base_url]

    def origins(self) -> list[str]:
        """Return the base URLs that are to be probed: each once, draining ones excluded."""
        return list(dict.fromkeys(u.base_url for u in self._upstreams if u.state != "draining"))

    def job(self, upstream: Upstream) -> Job | None:
        """Return how the registration of ``upstream`` goes or went, None if that is long ago."""
        return self.jobs.get(upstream.id)

    # --------------------------------------------------------------------------------- in and out

    def resume(self) -> Registry:
        """Go on with the set that a predecessor published, and return it; generation 0: there was none."""
        found = self.publisher.read()
        if found.generation:
            self._upstreams = list(found.upstreams)
            self._last_number = max((u.number for u in found.upstreams), default=-1)
            self.memo = {name: value for name, value in found.memo.items() if name != "departed"}
            self.departures.resume(found.upstreams, found.memo.get("departed", {}), found.cut)
            for upstream in found.upstreams:
                if upstream.state == "starting":
                    self.jobs.note(upstream.id, upstream.url, "pending")
            self._log.info("registry_resumed", generation=found.generation, upstreams=len(found.upstreams))
        return found

    def register(self, announcement: Announcement, source: str = API, key: str = "") -> Upstream | Refusal:
        """Add an upstream in state ``starting``, or say why not."""
        url = announcement.base_url
        if any(url in (upstream.base_url, upstream.url) for upstream in self._upstreams):
            return Refusal.EXISTS
        number = self.new_number()
        if number is None:
            return Refusal.FULL
        if len(orjson.dumps(asdict(announcement))) > MAX_DESCRIPTION_BYTES:
            return Refusal.TOO_LARGE
        labels = dict(announcement.labels)
        filled = filled_fields(labels)
        upstream = Upstream(
            number=number,
            id=str(uuid.uuid4()),
            base_url=url,
            models=tuple(filter(None, [announcement.model_id])),
            worker_type=announcement.worker_type,
            labels=labels,
            priority=filled["priority"] if announcement.priority is None else announcement.priority,
            cost=filled["cost"] if announcement.cost is None else announcement.cost,
            api_key=announcement.api_key,
            source=source,
            source_key=key,
            runtime=announcement.runtime,
            bootstrap_port=announcement.bootstrap_port,
            probing=dict(announcement.probing),
            registered_at=int(self._wall_clock()),
        )
        self._upstreams.append(upstream)
        self.jobs.note(upstream.id, url, "pending")
        self._log.info("upstream_registered", upstream=url, source=source)
        self.publisher.soon()
        return upstream

    def split(self, origin: Upstream, ranks: Sequence[Upstream]) -> None:
        """Put the ranks of a server where it stands."""
        place = self._upstreams.index(origin)
        self._upstreams[place : place + 1] = ranks
        self.jobs.forget(origin.id)
        self.publisher.soon()

    def drain(self, upstreams: Iterable[Upstream]) -> None:
        """Place nothing on ``upstreams`` any more; each leaves the set when nothing is held on it."""
        for upstream in upstreams:
            if upstream.state != "draining":
                self.departures.begin(upstream)
                self.jobs.note(upstream.id, upstream.url, "processing", job_type="remove")
                self._log.info("upstream_draining", upstream=upstream.url, source=upstream.source)
                self.change(upstream, state="draining")

    def remove(self, upstreams: Iterable[Upstream], *, is_forced: bool = False) -> None:
        """Take ``upstreams`` out of the set now. ``is_forced``: what runs on them is cut."""
        gone = {upstream.id for upstream in upstreams}
        for upstream in [u for u in self._upstreams if u.id in gone]:
            self._upstreams.remove(upstream)
            self.departures.left(upstream, is_forced=is_forced)
            self.jobs.forget(upstream.id)
            self._log.info("upstream_removed", upstream=upstream.url, forced=is_forced)
            self.publisher.soon()

    def sweep(self) -> None:
        """Let those go that have drained; call it often."""
        drained = [u for u in self._upstreams if u.state == "draining" and self._is_idle(u.number)]
        self.remove(upstream for upstream in drained if self.departures.may_leave(upstream))

    # -------------------------------------------------------------------------------------- changing

    def change(self, upstream: Upstream, **changes: Any) -> None:
        """Replace fields of ``upstream``, wherever it stands by now; nothing if it has left."""
        for place, present in enumerate(self._upstreams):
            if present.id == upstream.id:
                changed = replace(present, **changes)
                if changed != present:
                    self._upstreams[place] = changed
                    self.publisher.soon()
                return

    def __repr__(self) -> str:
        return f"RegistryKeeper({[(u.url, u.state, u.is_healthy) for u in self._upstreams]})"

    def _contents(self) -> tuple[Sequence[Upstream], Sequence[str], dict[str, Any]]:
        memo = {**self.memo, "departed": self.departures.departed}
        return self._upstreams, self.departures.cut, memo

    def new_number(self, also_taken: Iterable[int] = ()) -> int | None:
        """Return a free column for one more upstream, None if there is none."""
        taken = {upstream.number for upstream in self._upstreams}.union(also_taken)
        number = free_number(taken, self._is_free, self._last_number)
        if number is not None:
            self._last_number = number
        return number

    def _is_free(self, number: int) -> bool:
        return self._is_idle(number) and self._is_clean(number)
