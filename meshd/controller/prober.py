"""Probe every origin of the registry, register those that answer, and keep their health.

One task an origin, so that a silent one delays no other; what runs at one time is bounded. All ranks of an
origin share its probe. ``run`` follows the set: a task begins with a registration and ends with it, and
begins anew when the settings of its probes change.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from meshd.config.settings import Settings
from meshd.controller.health import HealthJudge, ProbeRules
from meshd.controller.http_client import FetchError, UpstreamClient
from meshd.controller.registering import Registrations, lacks_facts
from meshd.controller.registration import discover
from meshd.controller.registry_keeper import RegistryKeeper
from meshd.log import Log
from meshd.metrics.cells import Counter
from meshd.routing.registry import Upstream

MAX_PROBES: Final = 128
MAX_REGISTRATIONS: Final = 200
MAX_BODY_BYTES: Final = 1 << 20
FACTS_WAIT_S: Final = 0.5
"""How long an upstream that is not probed may take to tell its models before it is used without them. Not 0:
one that answers serves no request for a model that it does not have."""


@dataclass(frozen=True, slots=True)
class ProbeSettings:
    """``is_disabled``: the upstream is healthy at once and never probed."""

    path: str
    timeout_s: float
    rules: ProbeRules
    is_disabled: bool = False
    startup_log_s: float = 30.0

    @classmethod
    def of(cls, settings: Settings) -> ProbeSettings:
        return cls(
            settings.health_check_endpoint,
            settings.health_check_timeout_secs,
            ProbeRules(
                settings.health_check_interval_secs,
                settings.health_failure_threshold,
                settings.health_success_threshold,
                settings.worker_startup_timeout_secs,
            ),
            settings.disable_health_check,
            settings.worker_startup_check_interval,
        )

    def with_own(self, own: Mapping[str, float]) -> ProbeSettings:
        """Return the settings of an upstream that was registered with the health members ``own``.

        A timeout that it did not bring itself is cut to its interval.
        """
        rules = replace(
            self.rules,
            interval_s=own.get("health_check_interval_secs", self.rules.interval_s),
            failure_threshold=int(own.get("health_failure_threshold", self.rules.failure_threshold)),
            success_threshold=int(own.get("health_success_threshold", self.rules.success_threshold)),
        )
        timeout_s = own.get("health_check_timeout_secs", self.timeout_s)
        is_disabled = bool(own.get("disable_health_check", self.is_disabled))
        return replace(self, timeout_s=min(timeout_s, rules.interval_s), rules=rules, is_disabled=is_disabled)


@dataclass(frozen=True, slots=True)
class ProbeCounters:
    successes: Counter
    failures: Counter


@dataclass(slots=True)
class _Watch:
    """One registration being watched. ``successes``: of real traffic, when it was last probed."""

    base_url: str
    registration: str
    own: Mapping[str, float]
    settings: ProbeSettings
    judge: HealthJudge
    successes: int = 0
    problem: str = ""
    has_begun: bool = False
    task: asyncio.Task[None] | None = field(default=None, repr=False)


class Prober:
    """Watches origins until cancelled. ``sleep``, the clocks and ``rng`` are injected for tests.

    ``successes``: how many requests of clients the upstream with a number has answered with 2xx so far.
    """

    def __init__(
        self,
        keeper: RegistryKeeper,
        registrations: Registrations,
        client: UpstreamClient,
        settings: ProbeSettings,
        counters: ProbeCounters,
        log: Log,
        *,
        successes: Callable[[int], int] = lambda _number: 0,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        rng: random.Random | None = None,
    ) -> None:
        self._keeper = keeper
        self._registrations = registrations
        self._client = client
        self._settings = settings
        self._counters = counters
        self._log = log
        self._successes = successes
        self._sleep = sleep
        self._clock = clock
        self._wall_clock = wall_clock
        self._rng = rng or random.Random()
        self._probing = asyncio.Semaphore(MAX_PROBES)
        self._registering = asyncio.Semaphore(MAX_REGISTRATIONS)
        self._watches: dict[str, _Watch] = {}
        self._changed = asyncio.Event()
        keeper.publisher.subscribe(self._changed.set)

    async def run(self) -> None:
        """Watch what is in the set; an unexpected failure of one watch ends all, and so the process."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                self._changed.clear()
                self._follow(tasks)
                await self._changed.wait()

    async def watch(self, upstream: Upstream) -> None:
        """Register and probe the origin of ``upstream`` until it has left the registry or drains."""
        await self._run(self._new_watch(upstream))

    def _follow(self, tasks: asyncio.TaskGroup) -> None:
        present = {u.registration: u for u in reversed(self._keeper.upstreams) if u.state != "draining"}
        for registration, watch in list(self._watches.items()):
            upstream = present.get(registration)
            if upstream is None or upstream.probing != watch.own:
                assert watch.task is not None
                watch.task.cancel()
                del self._watches[registration]
        for registration, upstream in present.items():
            if registration not in self._watches:
                watch = self._watches[registration] = self._new_watch(upstream)
                watch.task = tasks.create_task(self._run(watch))

    def _new_watch(self, upstream: Upstream) -> _Watch:
        settings = self._settings.with_own(upstream.probing)
        is_active = upstream.state == "active"
        judge = HealthJudge(
            settings.rules, is_healthy=is_active and upstream.is_healthy, has_answered=is_active
        )
        return _Watch(upstream.base_url, upstream.registration, upstream.probing, settings, judge)

    async def _run(self, watch: _Watch) -> None:
        if watch.settings.is_disabled:
            await self._take_as_healthy(watch)
            return
        if watch.judge.is_healthy:  # after a restart of the controller: spread what was spread before
            watch.successes = self._traffic(watch)
            await self._sleep(watch.settings.rules.interval_s * self._rng.random())
        await self._probe_on(watch)

    async def _take_as_healthy(self, watch: _Watch) -> None:
        while (upstream := self._first(watch)) is not None:
            is_new = upstream.state == "starting"
            if not is_new and not upstream.is_healthy:
                self._registrations.set_health(watch.base_url, True)
            if not is_new and not lacks_facts(upstream):  # else a former controller ended too early
                return
            registering = asyncio.create_task(self._register(watch, upstream))
            try:
                if is_new:
                    await asyncio.wait((registering,), timeout=0 if upstream.models else FACTS_WAIT_S)
                    if not registering.done():
                        self._registrations.activate_without_facts(watch.base_url)
                await registering
            finally:
                registering.cancel()
            upstream = self._first(watch)
            if upstream is None or upstream.state == "active":
                return
            await self._sleep(watch.settings.rules.interval_s)  # it has to have ranks and tells none

    async def _probe_on(self, watch: _Watch) -> None:
        first = self._first(watch)
        waited_before_s = max(0.0, self._wall_clock() - first.registered_at) if first else 0.0
        start_s = self._clock()
        next_log_s = watch.settings.startup_log_s
        has_failed = False
        while (upstream := self._first(watch)) is not None:
            problem = await self._probe(watch, upstream)
            judge, waited_s = watch.judge, self._clock() - start_s + waited_before_s
            is_changed = judge.record(not problem, self._has_traffic(watch))
            if problem and problem != watch.problem:
                self._tell(watch.base_url, problem)
            watch.problem = problem
            if upstream.state == "starting" and judge.has_answered:
                await self._register(watch, upstream)
            elif is_changed:
                self._registrations.set_health(watch.base_url, judge.is_healthy)
            elif not judge.has_answered and not has_failed:
                has_failed = waited_s >= watch.settings.rules.startup_limit_s
                if has_failed:
                    self._give_up(watch, problem)
                elif waited_s >= next_log_s:
                    next_log_s = waited_s + watch.settings.startup_log_s
                    self._log.info("upstream_starting", upstream=watch.base_url, waited_s=round(waited_s, 3))
            await self._sleep(judge.next_delay_s(waited_s, self._rng))

    async def _probe(self, watch: _Watch, upstream: Upstream) -> str:
        """Probe once; return what is wrong, empty if nothing."""
        path = self._settings.path
        is_starting = upstream.state == "starting"
        async with self._registering if is_starting else self._probing:
            if is_starting and not watch.has_begun:
                watch.has_begun = True
                self._registrations.begin(watch.base_url)
            try:
                answer = await self._client.get(upstream, path, watch.settings.timeout_s, MAX_BODY_BYTES)
                problem = "" if answer.is_success else f"{path} answered {answer.status}"
            except FetchError as exc:
                problem = str(exc)
        if problem:
            self._counters.failures.inc()
            self._log.debug("probe_failed", upstream=upstream.base_url, problem=problem)
        else:
            self._counters.successes.inc()
        return problem

    def _has_traffic(self, watch: _Watch) -> bool:
        """Whether a request of a client succeeded since this was last asked."""
        before, watch.successes = watch.successes, self._traffic(watch)
        return watch.successes > before

    def _traffic(self, watch: _Watch) -> int:
        return sum(self._successes(upstream.number) for upstream in self._keeper.of_origin(watch.base_url))

    def _tell(self, base_url: str, problem: str) -> None:
        """Tell of a new problem: once, while the probes that meet it may come each second."""
        self._registrations.note_problem(base_url, problem)
        self._log.warning("upstream_unreachable", upstream=base_url, problem=problem)

    async def _register(self, watch: _Watch, upstream: Upstream) -> None:
        async with self._registering:
            self._registrations.begin(watch.base_url)
            discovered = await discover(self._client, upstream)
        if self._first(watch) is not None:
            self._registrations.activate(watch.base_url, discovered)

    def _give_up(self, watch: _Watch, problem: str) -> None:
        limit_s = watch.settings.rules.startup_limit_s
        message = f"no successful probe within {limit_s:g} s: {problem}"
        self._registrations.fail(watch.base_url, message)
        self._log.warning("upstream_not_started", upstream=watch.base_url, problem=message)

    def _first(self, watch: _Watch) -> Upstream | None:
        """Return the upstream that stands for an origin, None if it is not to be probed any more."""
        present = self._keeper.present(watch.base_url)
        return present[0] if present and present[0].registration == watch.registration else None

    def __repr__(self) -> str:
        return f"Prober({[watch.base_url for watch in self._watches.values()]})"
