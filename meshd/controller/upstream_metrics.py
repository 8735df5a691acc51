"""The metrics of upstreams that belong to no single process, and how long they are shown.

An upstream that has left shows −1 for health and breaker and 0 for its other gauges; after a while all its
series are hidden, counters too. Their cells stay: should it come back, they go on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final

from meshd.metrics.family import OTHER, Source
from meshd.metrics.table import MetricTable, Totals
from meshd.routing.conditions import STATES, Conditions
from meshd.routing.load import LoadTable
from meshd.routing.registry import Upstream
from meshd.routing.upstream import UNKNOWN_MODEL

Values = dict[str, dict[tuple[str, ...], float]]

_LABEL: Final = "worker"
_GONE: Final = -1.0


class UpstreamMetrics:
    """``upstreams``: the present set. ``departed``: URLs of those that left a while ago or less."""

    def __init__(
        self,
        upstreams: Callable[[], Iterable[Upstream]],
        departed: Callable[[], Mapping[str, int]],
        loads: LoadTable,
        conditions: Conditions,
        table: MetricTable,
    ) -> None:
        self._upstreams = upstreams
        self._departed = departed
        self._loads = loads
        self._conditions = conditions
        self._table = table

    def values(self) -> Values:
        """Return the gauges; a model is counted once for each upstream that serves it."""
        values: Values = {name: {} for name in _GAUGES}
        sizes = values["mesh_worker_pool_size"] = {}
        for upstream in self._upstreams():
            failures, successes = self._conditions.runs_of(upstream.number)
            state = STATES.index(self._conditions.breaker_of(upstream.number))
            load = self._loads.load(upstream.number)
            facts = (float(upstream.is_healthy), load, state, failures, successes)
            self._put(values, upstream.url, facts)
            for model in upstream.models or (UNKNOWN_MODEL,):
                key = (upstream.worker_type, "http", self._table.bounded("model", model))
                sizes[key] = sizes.get(key, 0) + 1
        shown = {url for (url,) in values["mesh_worker_health"]}
        for url in self._departed():
            if url not in shown:
                self._put(values, url, (_GONE, 0, _GONE, 0, 0))
        return values

    def hide_departed(self, totals: Totals) -> None:
        """Take the series of upstreams that left long ago out of the sums."""
        shown = {upstream.url for upstream in self._upstreams()} | self._departed().keys() | {OTHER}
        for family in self._table.catalog.of_source(Source.ROW):
            if _LABEL in family.label_names:
                place = family.label_names.index(_LABEL)
                series = totals.series[family.name]
                for key in [key for key in series if key[place] not in shown]:
                    del series[key]

    def _put(self, values: Values, url: str, facts: tuple[float, ...]) -> None:
        """Enter one upstream. Those beyond the limit of the label are one: the worst of each, their load."""
        key = (self._table.bounded(_LABEL, url),)
        for (name, join), fact in zip(_GAUGES.items(), facts, strict=True):
            series = values[name]
            series[key] = join((series[key], fact)) if key in series else fact

    def __repr__(self) -> str:
        return f"UpstreamMetrics({len(self._departed())} departed)"


_GAUGES: Final[Mapping[str, Callable[[tuple[float, float]], float]]] = {
    "mesh_worker_health": min,
    "mesh_worker_requests_active": sum,
    "mesh_worker_cb_state": max,
    "mesh_worker_cb_consecutive_failures": max,
    "mesh_worker_cb_consecutive_successes": max,
}
