"""What is counted and logged of requests when they have ended.

An exchange fills its `Record` and hands it to the `Ledger`, which settles all records of a tick together:
nothing of this stands between a client and its next request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from meshd.io.measure import IoMetrics, ObservedMetrics, RoutedMetrics, error_type
from meshd.io.usage import Usage, UsageReader

if TYPE_CHECKING:
    from meshd.io.http1 import RequestHead
    from meshd.io.relay import Relay
    from meshd.io.tracing import RequestTrace, Tracing
    from meshd.io.upstream import UpstreamFailure
    from meshd.log import Log
    from meshd.metrics.cells import BufferedHistogram
    from meshd.prepare.job import Job
    from meshd.routing.placement import Placement

_STREAM_FAILURES: Final = {
    "upstream_connection_failed": "cut",
    "upstream_timeout": "idle",
    "upstream_protocol_error": "protocol",
    "admission_closed": "shutdown",
}
_SETTLE_AT_BYTES: Final = 8 << 20  # response bodies kept for their usage until the next tick


class Record:
    """The facts of one request: filled by its exchange, settled once. Times are seconds of one clock.

    The defaults stand on the class: setting all of them for each request cost 2 µs.
    """

    ticket_at = 0.0
    body_at = 0.0
    prepared_at = 0.0
    placed_at = 0.0
    head_at = 0.0
    finished_at = 0.0
    waited_s = 0.0  # within the placement: for the end of a cool-down, or for any upstream at all
    job_run_s = 0.0
    request_id = ""
    label = "other"  # path template
    endpoint = ""  # endpoint label; empty for routes
    model = ""
    model_label = "unknown"  # the bounded name of the model
    is_stream = False
    status = 0
    error_code = ""
    outcome = ""
    upstream = ""
    reason = ""
    leg_outcome = ""  # of the last attempt, as its breaker takes it
    attempts = 0
    placement: Placement | None = None  # the last one, for `--route-headers`
    bytes_in = 0
    bytes_out = 0
    is_reused = False
    is_client_gone = False
    is_messages = False
    is_routine = False  # a health route: of interest when debugging only
    skipped_observation = ""
    usage: Usage | None = None
    duration: BufferedHistogram | None = None  # of mesh_http_request_duration_seconds
    routed: RoutedMetrics | None = None  # of its model and endpoint
    client = ""
    head: RequestHead | None = None
    relay: Relay | None = None
    job: Job | None = None
    trace: RequestTrace | None = None  # of a request that is traced, once it went to an upstream

    def __init__(self, started_at: float) -> None:
        self.started_at = started_at

    def __repr__(self) -> str:
        return f"Record({self.request_id} {self.label} {self.status} {self.outcome})"


class Ledger:
    """Ended requests of one I/O process that are not counted yet; `settle` runs several times a second."""

    def __init__(self, metrics: IoMetrics, log: Log, io_process: int, tracing: Tracing | None = None) -> None:
        self._metrics = metrics
        self._log = log
        self._io_process = io_process
        self._tracing = tracing
        self._records: list[Record] = []
        self._body_bytes = 0
        self._usages = UsageReader(is_messages=False)
        self._messages_usages = UsageReader(is_messages=True)

    def __repr__(self) -> str:
        return f"Ledger({len(self._records)} records, {self._body_bytes} body bytes)"

    def add(self, record: Record) -> None:
        """Take the record of a request that has ended; it is not touched by its exchange any more."""
        self._records.append(record)
        relay = record.relay
        if relay is not None and relay.usage_body:
            self._body_bytes += len(relay.usage_body)
            if self._body_bytes > _SETTLE_AT_BYTES:
                self.settle()

    def settle(self) -> None:
        """Count and log every record, once."""
        records, self._records = self._records, []
        self._body_bytes = 0
        if not records:
            return
        for record in records:
            self._count(record)
        wants_routine = self._log.wants_access(is_routine=True)
        if wants_routine or self._log.wants_access():
            for record in records:
                if wants_routine or not record.is_routine:
                    fields = access_fields(record, self._io_process)
                    self._log.access(fields, is_routine=record.is_routine)
        if self._tracing is not None:
            self._tracing.ended(records)

    def _count(self, record: Record) -> None:
        metrics = self._metrics
        total_s = record.finished_at - record.started_at
        if record.duration is not None:
            record.duration.observe(total_s)
        if record.is_client_gone:
            record.outcome = "canceled"
            metrics.disconnects.inc()
        elif record.status >= 400 and record.outcome in ("completed", "failed"):
            record.outcome = error_type(record.status, record.error_code)
        if not record.endpoint:  # routes are no router's business
            return
        self._count_stages(record)
        if record.routed is not None:
            record.routed.duration.observe(total_s)
        if record.outcome != "completed":
            metrics.router_error(record.model_label, record.endpoint, record.outcome)
        if record.upstream:
            metrics.leg_ended(record.upstream, record.leg_outcome)
        relay = record.relay
        if relay is not None:
            skipped = relay.skipped_observation or record.skipped_observation
            if skipped:
                metrics.observation_skipped(skipped)
            if relay.failure is not None:
                metrics.stream_failure(record.endpoint, _stream_failure(relay.failure))
                metrics.attempt_failed("body")
            if 200 <= record.status < 300 and record.routed is not None:
                self._count_output(record, relay, record.routed.observed)

    def _count_stages(self, record: Record) -> None:
        metrics = self._metrics
        if record.ticket_at:
            metrics.stage_admission.observe(record.ticket_at - record.started_at)
        if record.body_at:
            metrics.stage_body.observe(record.body_at - record.ticket_at)
        if record.prepared_at:
            metrics.stage_prepare.observe(record.prepared_at - record.body_at)
        if record.placed_at:
            placement_s = record.placed_at - record.prepared_at
            metrics.stage_placement.observe(placement_s)
            if record.head_at:
                metrics.stage_upstream_head.observe(record.head_at - record.placed_at)
                metrics.stage_relay.observe(record.finished_at - record.head_at)
                metrics.overhead.observe(record.job_run_s + placement_s - record.waited_s)

    def _count_output(self, record: Record, relay: Relay, observed: ObservedMetrics) -> None:
        generation_s = (relay.ended_at or record.finished_at) - record.started_at
        if record.outcome in ("completed", "backend_error"):
            observed.generation.observe(generation_s)
        usage = relay.usage
        if relay.usage_body:
            reader = self._messages_usages if record.is_messages else self._usages
            usage = reader.read(relay.usage_body)
        record.usage = usage
        output = 0
        if usage is not None and usage.is_known:
            output = usage.output_tokens
            observed.input_tokens.inc(usage.input_tokens)
            observed.output_tokens.inc(output)
        if relay.first_token_at:
            ttft_s = relay.first_token_at - record.started_at
            observed.ttft.observe(ttft_s)
            if output > 1 and record.outcome == "completed":
                observed.tpot.observe((generation_s - ttft_s) / (output - 1))


def _stream_failure(failure: UpstreamFailure) -> str:
    if failure.cause == "no end of stream":
        return "no_end"
    return _STREAM_FAILURES.get(failure.code, "cut")


def access_fields(record: Record, io_process: int) -> dict[str, Any]:
    """Return the fields of the one access line of a request; empty ones are left out."""
    head, relay = record.head, record.relay
    assert head is not None
    fields: dict[str, Any] = {
        "request_id": record.request_id,
        "client": record.client,
        "io_process": io_process,
        "method": head.method,
        "path": head.path,
        "http": "1.1" if head.is_http11 else "1.0",
        "status": record.status or 499,
        "outcome": record.outcome,
        "bytes_in": record.bytes_in,
        "bytes_out": record.bytes_out if relay is None else relay.bytes_out,
    }
    code = record.error_code or (relay.failure.code if relay is not None and relay.failure else "")
    if code:
        fields["error_code"] = code
    if record.endpoint:
        fields["endpoint"] = record.endpoint
        fields["model"] = record.model
        fields["stream"] = record.is_stream
        fields["backend_type"] = "regular"
    if record.upstream:
        fields["upstream"] = record.upstream
        fields["attempts"] = record.attempts
        fields["reason"] = record.reason
        fields["reused"] = record.is_reused
    if record.usage is not None and record.usage.is_known:
        fields["input_tokens"] = record.usage.input_tokens
        fields["output_tokens"] = record.usage.output_tokens
    _add_times(fields, record)
    return fields


def _add_times(fields: dict[str, Any], record: Record) -> None:
    stages = (
        ("admission_ms", record.started_at, record.ticket_at),
        ("body_ms", record.ticket_at, record.body_at),
        ("upstream_head_ms", record.placed_at, record.head_at),
        ("ttft_ms", record.started_at, record.relay.first_token_at if record.relay is not None else 0.0),
        ("total_ms", record.started_at, record.finished_at),
    )
    for name, start, end in stages:
        if start and end:
            fields[name] = round((end - start) * 1e3, 3)
    job = record.job
    if job is not None and job.claimed_ns:
        fields["prepare_queue_ms"] = round((job.claimed_ns - job.submitted_ns) / 1e6, 3)
        fields["prepare_run_ms"] = round((job.finished_ns - job.claimed_ns) / 1e6, 3)
    if record.placed_at:
        overhead_s = record.job_run_s + record.placed_at - record.prepared_at - record.waited_s
        fields["overhead_ms"] = round(overhead_s * 1e3, 3)
