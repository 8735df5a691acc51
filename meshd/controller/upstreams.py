"""The controller's part that is about upstreams, put together: the set, its sources, probes and routes."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection

from meshd.config.settings import Settings
from meshd.controller.admin import AdminRoute
from meshd.controller.announcement import announcements
from meshd.controller.fleet import Fleet
from meshd.controller.http_client import UpstreamClient
from meshd.controller.prober import ProbeCounters, Prober, ProbeSettings
from meshd.controller.registering import Registrations
from meshd.controller.registry_keeper import RegistryKeeper
from meshd.controller.sources import Sources
from meshd.controller.upstream_metrics import UpstreamMetrics
from meshd.controller.worker_changes import WorkerChanges
from meshd.controller.worker_info import WorkerInfo
from meshd.log import Log
from meshd.metrics.table import MetricTable
from meshd.routing.conditions import Conditions
from meshd.routing.load import LoadTable
from meshd.routing.registry import RegistryBoard


class UpstreamControl:
    """``keeper``: the set; ``sources``: what discovery announces to and withdraws from.

    ``forget``: drops what the prefix index holds of upstreams, by number. ``is_clean``: whether nothing is
    remembered of a number's former owner.

    Give it ``start`` before its routes are served, run ``run`` as a task, and call ``sweep`` often.
    """

    def __init__(
        self,
        settings: Settings,
        board: RegistryBoard,
        loads: LoadTable,
        conditions: Conditions,
        client: UpstreamClient,
        counters: ProbeCounters,
        log: Log,
        *,
        schedule: Callable[[float, Callable[[], None]], object],
        ring_bells: Callable[[], None],
        forget: Callable[[Collection[int]], None] = lambda _numbers: None,
        is_clean: Callable[[int], bool] = lambda _number: True,
    ) -> None:
        self._settings = settings
        self._client = client
        self._forget = forget
        self._log = log
        self._loads = loads
        self._conditions = conditions
        self.keeper = RegistryKeeper(
            board,
            log,
            is_idle=loads.is_idle,
            is_clean=is_clean,
            schedule=schedule,
            ring_bells=ring_bells,
        )
        self.sources = Sources(self.keeper, log)
        registrations = Registrations(
            self.keeper,
            log,
            is_dp_aware=settings.dp_aware,
            passthrough_paths=settings.passthrough_paths,
        )
        self._prober = Prober(
            self.keeper,
            registrations,
            client,
            ProbeSettings.of(settings),
            counters,
            log,
            successes=conditions.successes,
            rng=random.Random(),
        )

    def start(self) -> None:
        """Go on with the published set, or publish the first one."""
        self.sources.start(announcements(self._settings))

    def sweep(self) -> None:
        """Let drained upstreams go, and those in that waited for them."""
        self.keeper.sweep()
        self.sources.sweep()

    def routes(self) -> list[AdminRoute]:
        info = WorkerInfo(self.keeper, self._loads, self._conditions, self._settings.disable_health_check)
        changes = WorkerChanges(self.keeper, self._settings, self._log)
        fleet = Fleet(self.keeper, self._loads, self._client, self._forget)
        return [*info.routes(), *changes.routes(), *fleet.routes()]

    def metrics(self, table: MetricTable) -> UpstreamMetrics:
        keeper = self.keeper
        return UpstreamMetrics(
            lambda: keeper.upstreams,
            lambda: keeper.departures.departed,
            self._loads,
            self._conditions,
            table,
        )

    def close(self) -> None:
        """Publish what a moment later would have been."""
        self.keeper.publisher.finish()

    async def run(self) -> None:
        """Probe until cancelled."""
        await self._prober.run()

    def __repr__(self) -> str:
        return f"UpstreamControl({self.keeper!r})"
