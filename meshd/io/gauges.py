"""What metrics learn by a look, some times a second: levels, ages, and what was lost since the last one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from meshd.io.services import Services
from meshd.routing.prefix_index import PrefixIndex

if TYPE_CHECKING:
    from meshd.io.span_export import SpanExporter

AGES_SECS: Final = 1.0  # how often the ages of running requests are counted: O(requests)


class Gauges:
    """``spans``: None without tracing."""

    def __init__(self, services: Services, index: PrefixIndex, spans: SpanExporter | None) -> None:
        self._services = services
        self._index = index
        self._spans = spans
        self._evictions = 0
        self._log_drops = 0
        self._span_drops = 0
        self._has_span_trouble = False
        self._ages_due = 0.0

    def __repr__(self) -> str:
        return f"Gauges(evictions={self._evictions}, log={self._log_drops}, spans={self._span_drops})"

    def look(self, now: float) -> None:
        """Set the gauges and add to the counters; ``now`` is of the services' clock."""
        services = self._services
        director, metrics, log = services.director, services.metrics, services.log
        metrics.tickets_held.set(director.held_tickets)
        metrics.requests_waiting.set(director.waiting_requests)
        metrics.body_reserved.set(director.reserved_bytes)
        if now >= self._ages_due:
            self._ages_due = now + AGES_SECS
            metrics.requests_in_flight([now - exchange.record.started_at for exchange in services.exchanges])
        if self._index.evictions != self._evictions:
            metrics.index_evictions.inc(self._index.evictions - self._evictions)
            self._evictions = self._index.evictions
        if log.dropped > self._log_drops:
            metrics.log_drops.inc(log.dropped - self._log_drops)
            self._log_drops = log.dropped
        if self._spans is not None:
            self._look_at_spans(self._spans)

    def _look_at_spans(self, spans: SpanExporter) -> None:
        """Count what was dropped; say when the collector stops taking spans, and when it takes them again."""
        if spans.dropped > self._span_drops:
            self._services.metrics.trace_drops.inc(spans.dropped - self._span_drops)
            self._span_drops = spans.dropped
        if bool(spans.trouble) != self._has_span_trouble:
            self._has_span_trouble = bool(spans.trouble)
            if self._has_span_trouble:
                self._services.log.warning("spans_not_taken", cause=spans.trouble)
            else:
                self._services.log.info("spans_taken_again")
