"""What the tests of discovery share: a keeper that remembers, metrics that are read back, a log in a list."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from meshd.controller.announcement import Announcement
from meshd.controller.discovery.source import Reconciler, SourceMetrics
from meshd.log import Log
from meshd.memory import Segment
from meshd.metrics.catalog import build_catalog
from meshd.metrics.cells import MetricRow, segment_size
from meshd.metrics.table import MetricTable


class ListLog(Log):
    """Keeps its lines instead of writing them."""

    def __init__(self) -> None:
        super().__init__("test", "error", stream_fd=-1)
        self.lines: list[tuple[str, dict[str, Any]]] = []

    def info(self, event: str, **fields: Any) -> None:
        self.lines.append((event, fields))

    def warning(self, event: str, **fields: Any) -> None:
        self.lines.append((event, fields))

    def events(self) -> list[str]:
        return [event for event, _ in self.lines]

    def problems(self) -> list[str]:
        return [fields["problem"] for _, fields in self.lines if "problem" in fields]


@dataclass
class FakeKeeper:
    """Remembers what a real one would register; ``calls``: everything that was asked, in order."""

    upstreams: dict[tuple[str, str], Announcement] = field(default_factory=dict)
    calls: list[tuple[str, str, str]] = field(default_factory=list)

    def announce(self, source: str, key: str, announcement: Announcement) -> None:
        self.calls.append(("announce", source, key))
        self.upstreams[source, key] = announcement

    def withdraw(self, source: str, key: str) -> None:
        self.calls.append(("withdraw", source, key))
        del self.upstreams[source, key]

    def keys_of(self, source: str) -> list[str]:
        return [key for owner, key in self.upstreams if owner == source]

    def urls(self, source: str) -> list[str]:
        return sorted(each.base_url for (owner, _), each in self.upstreams.items() if owner == source)


class Bench:
    """One keeper, one row of metrics and one log, shared by the sources of a test."""

    def __init__(self) -> None:
        self.keeper = FakeKeeper()
        self.log = ListLog()
        catalog = build_catalog()
        segment = Segment.create("metrics", segment_size(1))
        self.row = MetricRow(segment, 0, catalog)
        self._table = MetricTable(segment, 1, catalog)

    def reconciler(self, source: str, scopes: Sequence[str] = ("",)) -> Reconciler:
        metrics = SourceMetrics(
            self.row.gauge("mesh_discovery_workers_discovered", source=source),
            self.row.counter("mesh_discovery_registrations_total", source=source),
            self.row.counter("mesh_discovery_deregistrations_total", source=source),
        )
        return Reconciler(source, scopes, self.keeper, metrics)

    def counts(self, source: str) -> tuple[float, float, float]:
        """Return what is discovered, registered and deregistered."""
        totals = self._table.sum_rows({0})
        return (
            totals.value("mesh_discovery_workers_discovered", source),
            totals.value("mesh_discovery_registrations_total", source),
            totals.value("mesh_discovery_deregistrations_total", source),
        )
