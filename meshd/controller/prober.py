"""Probe every origin of the registry, register those that answer, and keep their health.

One task an origin, so that a silent one delays no other; probes at one time are bounded. All ranks of an
origin share its probe.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from meshd.controller.health import STARTUP_LIMIT_S, HealthJudge, ProbeRules
from meshd.controller.http_client import FetchError, UpstreamClient
from meshd.controller.registration import discover
from meshd.controller.registry_keeper import RegistryKeeper
from meshd.log import Log
from meshd.metrics.cells import Counter
from meshd.routing.registry import Upstream

MAX_PROBES: Final = 128
MAX_BODY_BYTES: Final = 1 << 20
STARTING_LOG_INTERVAL_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class ProbeSettings:
    """``is_disabled``: every upstream is healthy at once and never probed."""

    path: str
    timeout_s: float
    rules: ProbeRules
    is_disabled: bool = False


@dataclass(frozen=True, slots=True)
class ProbeCounters:
    successes: Counter
    failures: Counter


class Prober:
    """Watches origins until cancelled. ``sleep``, ``clock`` and ``rng`` are injected for tests."""

    def __init__(
        self,
        keeper: RegistryKeeper,
        client: UpstreamClient,
        settings: ProbeSettings,
        counters: ProbeCounters,
        log: Log,
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        self._keeper = keeper
        self._client = client
        self._settings = settings
        self._counters = counters
        self._log = log
        self._sleep = sleep
        self._clock = clock
        self._rng = rng or random.Random()
        self._running = asyncio.Semaphore(MAX_PROBES)

    async def run(self) -> None:
        """Watch all origins there are now; an unexpected failure of one ends all, and so the process."""
        async with asyncio.TaskGroup() as tasks:
            for base_url in self._keeper.origins():
                tasks.create_task(self.watch(base_url))

    async def watch(self, base_url: str) -> None:
        """Register and probe one origin until it has left the registry or drains."""
        registered = self._first(base_url)
        if registered is None:
            return
        is_active = registered.state == "active"
        if self._settings.is_disabled:
            if not is_active:
                await self._register(registered)
            return
        judge = HealthJudge(
            self._settings.rules, is_healthy=is_active and registered.is_healthy, has_answered=is_active
        )
        if judge.is_healthy:  # after a restart of the controller: spread what was spread before
            await self._sleep(self._settings.rules.interval_s * self._rng.random())
        else:
            self._keeper.begin(base_url)
        await self._probe_on(base_url, judge)

    async def _probe_on(self, base_url: str, judge: HealthJudge) -> None:
        start_s = self._clock()
        next_log_s = STARTING_LOG_INTERVAL_S
        has_failed = False
        problem = ""
        while (upstream := self._first(base_url)) is not None:
            former, problem = problem, await self._probe(upstream)
            is_changed = judge.record(not problem)
            waited_s = self._clock() - start_s
            if problem and problem != former:
                self._tell(base_url, problem)
            if upstream.state == "starting" and judge.has_answered:
                await self._register(upstream)
            elif is_changed:
                self._keeper.set_health(base_url, judge.is_healthy)
            elif not judge.has_answered and waited_s >= next_log_s and not has_failed:
                next_log_s += STARTING_LOG_INTERVAL_S
                self._log.info("upstream_starting", upstream=base_url, waited_s=waited_s)
                has_failed = waited_s >= STARTUP_LIMIT_S
                if has_failed:
                    self._give_up(base_url, problem)
            await self._sleep(judge.next_delay_s(waited_s, self._rng))

    async def _probe(self, upstream: Upstream) -> str:
        """Probe once; return what is wrong, empty if nothing."""
        path = self._settings.path
        async with self._running:
            try:
                answer = await self._client.get(upstream, path, self._settings.timeout_s, MAX_BODY_BYTES)
                problem = "" if answer.is_success else f"{path} answered {answer.status}"
            except FetchError as exc:
                problem = str(exc)
        if problem:
            self._counters.failures.inc()
            self._log.debug("probe_failed", upstream=upstream.base_url, problem=problem)
        else:
            self._counters.successes.inc()
        return problem

    def _tell(self, base_url: str, problem: str) -> None:
        """Tell of a new problem: once, while the probes that meet it may come each second."""
        self._keeper.note_problem(base_url, problem)
        self._log.warning("upstream_unreachable", upstream=base_url, problem=problem)

    async def _register(self, upstream: Upstream) -> None:
        self._keeper.begin(upstream.base_url)
        async with self._running:
            discovered = await discover(self._client, upstream)
        if self._first(upstream.base_url) is not None:
            self._keeper.activate(upstream.base_url, discovered)

    def _give_up(self, base_url: str, problem: str) -> None:
        message = f"no successful probe within {STARTUP_LIMIT_S:g} s: {problem}"
        self._keeper.fail(base_url, message)
        self._log.warning("upstream_not_started", upstream=base_url, problem=message)

    def _first(self, base_url: str) -> Upstream | None:
        """Return the upstream that stands for an origin, None if it is not to be probed any more."""
        present = [u for u in self._keeper.of_origin(base_url) if u.state != "draining"]
        return present[0] if present else None
