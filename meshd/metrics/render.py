"""Turn sums into the Prometheus text format, through prometheus_client's collector interface."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector, CollectorRegistry

from meshd.metrics.family import Catalog, Family, Kind, Source
from meshd.metrics.table import EMPTY, Totals

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

Scraped = Mapping[str, Mapping[tuple[str, ...], float]]
"""Values of ``Source.SCRAPE`` families: by family name, then by label values."""


def render(catalog: Catalog, totals: Totals, scraped: Scraped) -> bytes:
    """Render every family of the catalog. Raises ValueError on a scraped family that it does not have."""
    known = {family.name for family in catalog.of_source(Source.SCRAPE)}
    if unknown := scraped.keys() - known:
        raise ValueError(f"scraped families outside the catalog: {sorted(unknown)}")
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Snapshot(catalog, totals, scraped))
    return generate_latest(registry)


class _Snapshot(Collector):
    def __init__(self, catalog: Catalog, totals: Totals, scraped: Scraped) -> None:
        self._catalog = catalog
        self._totals = totals
        self._scraped = scraped

    def collect(self) -> Iterator[Metric]:
        for family in self._catalog.families:
            yield _metric(family, self._series(family))

    def _series(self, family: Family) -> Mapping[tuple[str, ...], list[float]]:
        if family.source is Source.ROW:
            return self._totals.series.get(family.name, EMPTY)
        series: dict[tuple[str, ...], list[float]] = {values: [0] for values in family.preset_values()}
        for values, value in self._scraped.get(family.name, {}).items():
            series[values] = [value]
        return series


def _metric(family: Family, series: Mapping[tuple[str, ...], list[float]]) -> Metric:
    if family.kind is Kind.HISTOGRAM:
        return _histogram(family, series)
    kind = GaugeMetricFamily if family.kind is Kind.GAUGE else CounterMetricFamily
    metric: GaugeMetricFamily | CounterMetricFamily = kind(
        family.name, family.help, labels=family.label_names
    )
    for values, words in sorted(series.items()):
        metric.add_metric(values, words[0])
    return metric


def _histogram(family: Family, series: Mapping[tuple[str, ...], list[float]]) -> Metric:
    metric = HistogramMetricFamily(family.name, family.help, labels=family.label_names)
    bounds = [*(repr(bound) for bound in family.buckets), "+Inf"]
    for values, words in sorted(series.items()):
        counts = accumulate(words[:-1])
        metric.add_metric(values, list(zip(bounds, counts, strict=True)), words[-1])
    return metric
