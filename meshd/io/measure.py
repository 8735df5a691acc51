"""What an I/O process counts: handles on its metric cells, resolved once and kept.

Open labels (model, path, code) are resolved on first use; the metric row bounds how many there can be.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from typing import Final, TypeVar

from meshd.metrics.catalog import INFLIGHT_AGES, METHOD
from meshd.metrics.cells import BufferedCounter, BufferedHistogram, MetricRow
from meshd.metrics.family import OTHER

MAX_KEPT: Final = 4096
STATUSES: Final = 600  # by a list, a counter is found in a tenth of the time of a dict

K = TypeVar("K")
V = TypeVar("V")

_ROUTER = {"router_type": "http"}
_TARGET = {"router_type": "http", "backend_type": "regular"}
_ATTEMPT = {"worker_type": "regular", "connection_mode": "http"}
_METHODS: Final = frozenset(METHOD.values or ())


def error_type(status: int, code: str) -> str:
    """Return the `error_type` of a final status (metrics.md §2)."""
    if status == 404:
        return "no_workers"
    if status in (408, 504):
        return "timeout"
    if status == 429:
        return "rate_limited"
    if status < 500 or (status == 501 and code):
        return "validation_error"
    if status == 500 and code:
        return "internal_error"
    return "backend_error"


class IoMetrics:
    """All counters of one I/O process, under the names of metrics.md."""

    def __init__(self, row: MetricRow) -> None:
        self._row = row
        self.connections = row.gauge("mesh_http_connections_active")
        self.accept_errors = row.counter("mesh_http_accept_errors_total")
        self.malformed = row.counter("mesh_http_malformed_requests_total")
        self.disconnects = row.counter("mesh_http_client_disconnects_total")
        self.tickets_granted = row.buffered_counter("mesh_http_rate_limit_total", result="allowed")
        self.tickets_refused = row.counter("mesh_http_rate_limit_total", result="rejected")
        self.admission_wait = row.buffered_histogram("mesh_admission_wait_seconds")
        self.tickets_held = row.gauge("mesh_admission_held")
        self.requests_waiting = row.gauge("mesh_admission_waiting")
        self.body_reserved = row.gauge("mesh_body_memory_reserved_bytes")
        self.admission_canceled = row.counter("mesh_admission_canceled_total")
        self.overhead = row.buffered_histogram("mesh_router_overhead_seconds", **_ROUTER)
        self.upstream_connections = row.gauge("mesh_worker_connections_active", **_ATTEMPT)
        self.reuse_retries = row.counter("mesh_worker_reuse_retries_total")
        self.budget_exhausted = row.counter("mesh_retry_budget_exhausted_total")
        self.outcome_drops = row.counter("mesh_internal_drops_total", queue="outcome")
        self.loop_lag = row.buffered_histogram("mesh_event_loop_lag_seconds")
        self.trace_drops = row.counter("mesh_internal_drops_total", queue="trace")
        self.log_drops = row.counter("mesh_internal_drops_total", queue="log")
        self.stage_admission, self.stage_body, self.stage_prepare = (
            row.buffered_histogram("mesh_router_stage_duration_seconds", stage=name, **_ROUTER)
            for name in ("admission", "body", "prepare")
        )
        self.stage_placement, self.stage_upstream_head, self.stage_relay = (
            row.buffered_histogram("mesh_router_stage_duration_seconds", stage=name, **_ROUTER)
            for name in ("placement", "upstream_head", "relay")
        )
        self._inflight_ages = [
            (float(age), row.gauge("mesh_http_inflight_request_age_count", le=age))
            for age in INFLIGHT_AGES.split()
        ]
        self.flush = row.flush
        self._requests: dict[str, dict[str, RequestMetrics]] = {}  # by path and method
        self._relayed: list[BufferedCounter | None] = [None] * STATUSES
        self._answers: dict[tuple[int, str], BufferedCounter] = {}
        self._upstream_responses: list[BufferedCounter | None] = [None] * STATUSES
        self._routed: dict[str, dict[str, RoutedMetrics]] = {}  # by endpoint and model
        self._leg_outcomes: dict[str, dict[str, BufferedCounter]] = {}  # by upstream and outcome
        self._backoffs: dict[int, BufferedHistogram] = {}
        self._decisions: dict[tuple[str, str], BufferedCounter] = {}
        self.index_evictions = row.counter("mesh_prefix_index_evictions_total")
        self._selections: dict[tuple[str, str], BufferedCounter] = {}

    # ------------------------------------------------------------------------------- HTTP and router

    def requests(self, path: str, method: str) -> RequestMetrics:
        """Return what counts the requests for one path with one method."""
        by_method = self._requests.get(path)
        if by_method is None:
            by_method = self._requests[path] = {}
        handles = by_method.get(method)
        if handles is None:
            if method not in _METHODS:
                method = OTHER  # a stranger may choose any name, and must not be remembered for it
            handles = by_method.get(method) or RequestMetrics(self._row, path, method)
            by_method[method] = handles
        return handles

    def response(self, status: int, code: str) -> None:
        """Count the head of an answer; ``code``: empty for one of an upstream."""
        counter = self._answers.get((status, code)) if code else self._relayed[status]
        if counter is None:
            counter = self._row.buffered_counter(
                "mesh_http_responses_total", status_code=str(status), error_code=code
            )
            if code:
                self._answers[(status, code)] = counter
            else:
                self._relayed[status] = counter
        counter.inc()

    def upstream_response(self, status: int) -> None:
        counter = self._upstream_responses[status]
        if counter is None:
            counter = self._upstream_responses[status] = self._row.buffered_counter(
                "mesh_router_upstream_responses_total", status_code=str(status), error_code="", **_ROUTER
            )
        counter.inc()

    def requests_in_flight(self, ages_s: Iterable[float]) -> None:
        """Refresh how many requests are how old. O(n log n): called once a second."""
        ages = sorted(ages_s)
        for limit_s, gauge in self._inflight_ages:
            gauge.set(bisect_right(ages, limit_s))

    def routed(self, model: str, endpoint: str, is_streaming: bool) -> RoutedMetrics:
        """Count a request whose view was delivered; what is returned takes what is learnt of it later."""
        by_model = self._routed.get(endpoint)
        if by_model is None:
            by_model = self._routed[endpoint] = {}
        metrics = by_model.get(model)
        if metrics is None:
            metrics = RoutedMetrics(self._row, model, endpoint)
            _keep(by_model, model, metrics)
        metrics.count(is_streaming)
        return metrics

    def router_error(self, model: str, endpoint: str, kind: str) -> None:
        self._row.counter(
            "mesh_router_request_errors_total",
            connection_mode="http",
            model=model,
            endpoint=endpoint,
            error_type=kind,
            **_TARGET,
        ).inc()

    def observation_skipped(self, reason: str) -> None:
        self._row.counter("mesh_observation_skipped_total", reason=reason).inc()

    def stream_failure(self, endpoint: str, reason: str) -> None:
        self._row.counter("mesh_stream_failures_total", endpoint=endpoint, reason=reason).inc()

    def admission_rejected(self, reason: str) -> None:
        self.tickets_refused.inc()
        self._row.counter("mesh_admission_rejections_total", reason=reason).inc()

    def attempt_failed(self, kind: str) -> None:
        self._row.counter("mesh_worker_errors_total", error_type=kind, **_ATTEMPT).inc()

    def leg_ended(self, upstream: str, outcome: str) -> None:
        """Count an exchange with an upstream; one without an outcome is neutral."""
        by_outcome = self._leg_outcomes.get(upstream)
        if by_outcome is None:
            by_outcome = {}
            _keep(self._leg_outcomes, upstream, by_outcome)
        counter = by_outcome.get(outcome)
        if counter is None:
            counter = by_outcome[outcome] = self._row.buffered_counter(
                "mesh_worker_cb_outcomes_total", worker=upstream, outcome=outcome or "neutral"
            )
        counter.inc()

    def backpressure(self, upstream: str, kind: str) -> None:
        self._row.counter("mesh_worker_backpressure_total", worker=upstream, kind=kind).inc()

    def retried(self, endpoint: str) -> None:
        self._row.counter("mesh_worker_retries_total", worker_type="regular", endpoint=endpoint).inc()

    def retries_exhausted(self, endpoint: str) -> None:
        self._row.counter(
            "mesh_worker_retries_exhausted_total", worker_type="regular", endpoint=endpoint
        ).inc()

    def backed_off(self, retry: int, delay_s: float) -> None:
        number = min(retry, 10)
        histogram = self._backoffs.get(number)
        if histogram is None:
            histogram = self._backoffs[number] = self._row.buffered_histogram(
                "mesh_worker_retry_backoff_seconds", attempt=str(number) if number < 10 else "10+"
            )
        histogram.observe(delay_s)

    # ------------------------------------------------------------------------- what the placer counts

    def selections(self, model: str, policy: str) -> BufferedCounter:
        """Return the counter of placements of a model by a policy."""
        counter = self._selections.get((model, policy))
        if counter is None:
            counter = self._row.buffered_counter(
                "mesh_worker_selection_total", model=model or "unknown", policy=policy, **_ATTEMPT
            )
            _keep(self._selections, (model, policy), counter)
        return counter

    def decided(self, policy: str, reason: str) -> None:
        """Count a decision of a policy whose branches are counted."""
        counter = self._decisions.get((policy, reason))
        if counter is None:
            if policy == "cache_aware":
                decision = reason.removeprefix("cache_")
                counter = self._row.buffered_counter("mesh_cache_aware_decisions_total", decision=decision)
            else:
                counter = self._row.buffered_counter("mesh_prefix_hash_policy_branch_total", branch=reason)
            self._decisions[policy, reason] = counter
        counter.inc()

    def fallback(self, policy: str, reason: str) -> None:
        self._row.counter("mesh_policy_fallbacks_total", policy=policy, reason=reason).inc()


def _keep(handles: dict[K, V], key: K, handle: V) -> None:
    """Keep a handle; models and upstreams come and go for years, so all are let go of now and then."""
    if len(handles) >= MAX_KEPT:
        handles.clear()
    handles[key] = handle


class RequestMetrics:
    """What is counted of the requests for one path with one method."""

    __slots__ = ("duration", "heads")

    def __init__(self, row: MetricRow, path: str, method: str) -> None:
        self.heads = row.counter("mesh_http_requests_total", path=path, method=method)
        self.duration = row.buffered_histogram("mesh_http_request_duration_seconds", path=path, method=method)


class RoutedMetrics:
    """What is counted of the requests for one model on one endpoint; series appear when there is a value."""

    __slots__ = ("_labels", "_observed", "_row", "_streams", "_whole", "duration")

    def __init__(self, row: MetricRow, model: str, endpoint: str) -> None:
        self._row = row
        self._labels = {"model": model, "endpoint": endpoint, **_TARGET}
        self._streams: BufferedCounter | None = None
        self._whole: BufferedCounter | None = None  # answers that are not streamed
        self._observed: ObservedMetrics | None = None
        self.duration = row.buffered_histogram(
            "mesh_router_request_duration_seconds", connection_mode="http", **self._labels
        )

    def count(self, is_streaming: bool) -> None:
        """Count one that was routed."""
        counter = self._streams if is_streaming else self._whole
        if counter is None:
            counter = self._row.buffered_counter(
                "mesh_router_requests_total",
                connection_mode="http",
                streaming="true" if is_streaming else "false",
                **self._labels,
            )
            if is_streaming:
                self._streams = counter
            else:
                self._whole = counter
        counter.inc()

    @property
    def observed(self) -> ObservedMetrics:
        """What is learnt from their responses."""
        observed = self._observed
        if observed is None:
            observed = self._observed = ObservedMetrics(self._row, self._labels)
        return observed


class ObservedMetrics:
    """What is learnt from the responses of one model on one endpoint."""

    __slots__ = ("generation", "input_tokens", "output_tokens", "tpot", "ttft")

    def __init__(self, row: MetricRow, labels: dict[str, str]) -> None:
        self.ttft = row.buffered_histogram("mesh_router_ttft_seconds", **labels)
        self.tpot = row.buffered_histogram("mesh_router_tpot_seconds", **labels)
        self.generation = row.buffered_histogram("mesh_router_generation_duration_seconds", **labels)
        self.input_tokens = row.buffered_counter("mesh_router_tokens_total", token_type="input", **labels)
        self.output_tokens = row.buffered_counter("mesh_router_tokens_total", token_type="output", **labels)


class PrepareCounters:
    """What the prepare client of one I/O process counts."""

    def __init__(self, row: MetricRow) -> None:
        self._row = row
        self._retries = row.counter("mesh_prepare_retries_total")
        self.job_submitted = row.counter("mesh_prepare_jobs_total").inc
        self.queue_seconds = row.buffered_histogram("mesh_prepare_queue_seconds").observe
        self.run_seconds = row.buffered_histogram("mesh_prepare_run_seconds").observe
        self.queued = row.gauge("mesh_prepare_queued_jobs").set
        self.dispatched = row.gauge("mesh_prepare_dispatched_jobs").set

    def error(self, reason: str) -> None:
        self._row.counter("mesh_prepare_errors_total", reason=reason).inc()

    def rejection(self, code: str) -> None:
        self._row.counter("mesh_prepare_rejections_total", reason=code).inc()

    def retry(self) -> None:
        self._retries.inc()
