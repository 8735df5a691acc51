"""The sources that the settings ask for, run side by side in the controller."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any

from meshd.config import Settings, WorkerSpec
from meshd.config.cluster import Cluster
from meshd.config.discovery import read_dns_name
from meshd.controller.announcement import Announcement
from meshd.controller.discovery import file, kubernetes
from meshd.controller.discovery.pods import Pod
from meshd.controller.discovery.source import Keeper, Reconciler, SourceMetrics
from meshd.log import Log
from meshd.metrics.cells import MetricRow

Run = Callable[[], Coroutine[Any, Any, None]]


class Discovery:
    """The sources, built by the settings. ``cluster``: where Kubernetes is."""

    def __init__(
        self,
        settings: Settings,
        cluster: Cluster,
        keeper: Keeper,
        row: MetricRow,
        log: Log,
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._settings = settings
        self._cluster = cluster
        self._keeper = keeper
        self._row = row
        self._log = log
        self._sleep = sleep
        self._reconcilers: list[Reconciler] = []
        self._sources = [*self._files(), *self._names(), *self._pods()]

    async def run(self) -> None:
        """Follow the sources; without any this ends at once.

        An unexpected failure of one ends all, and so the process.
        """
        for reconciler in self._reconcilers:
            reconciler.settle()  # drains what the former settings asked for and these do not
        async with asyncio.TaskGroup() as tasks:
            for run in self._sources:
                tasks.create_task(run())

    def _files(self) -> list[Run]:
        settings = self._settings
        scopes = file.SCOPES if settings.discovery_file else ()
        reconciler = self._reconciler("file", scopes)
        if not scopes:
            return []
        source = file.FileSource(
            settings.discovery_file,
            settings.discovery_check_interval_secs,
            reconciler,
            self._of_table,
            self._log,
            sleep=self._sleep,
        )
        return [source.run]

    def _names(self) -> list[Run]:
        names = [read_dns_name(text) for text in self._settings.discovery_dns]
        if not names:
            self._reconciler("dns", ())
            return []
        # Imported here, as below: the package that it needs is an extra.
        from meshd.controller.discovery import dns

        asked = dns.lookups(names)
        reconciler = self._reconciler("dns", [lookup.scope for lookup in asked])
        resolver = dns.SystemResolver()
        return [
            dns.DnsSource(lookup, resolver, reconciler, self._of_url, self._log, sleep=self._sleep).run
            for lookup in asked
        ]

    def _pods(self) -> list[Run]:
        settings = self._settings
        if not settings.service_discovery:
            self._reconciler("kubernetes", ())
            return []
        source = kubernetes.KubernetesSource(
            self._connect,
            ",".join(f"{key}={text}" for key, text in settings.selector),
            settings.service_discovery_port,
            self._reconciler("kubernetes", kubernetes.SCOPES),
            self._of_pod,
            self._log,
        )
        return [source.run]

    def _connect(self) -> kubernetes.Api:
        """Called in the thread of the source: the import alone takes half a second."""
        from meshd.controller.discovery.pod_api import PodApi

        settings = self._settings
        return PodApi(self._cluster, dict(settings.selector), settings.service_discovery_namespace)

    def _reconciler(self, source: str, scopes: Sequence[str]) -> Reconciler:
        metrics = SourceMetrics(
            self._row.gauge("mesh_discovery_workers_discovered", source=source),
            self._row.counter("mesh_discovery_registrations_total", source=source),
            self._row.counter("mesh_discovery_deregistrations_total", source=source),
        )
        reconciler = Reconciler(source, scopes, self._keeper, metrics)
        self._reconcilers.append(reconciler)
        return reconciler

    def _of_table(self, spec: WorkerSpec) -> Announcement:
        return Announcement.of(spec, self._settings.api_key or None, self._settings.backend)

    def _of_url(self, url: str) -> Announcement:
        return self._of_table(WorkerSpec(url))

    def _of_pod(self, pod: Pod) -> Announcement:
        return replace(self._of_url(pod.url), labels=pod.labels)
