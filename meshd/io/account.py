"""What is counted and logged of one request, once, when it has ended."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from meshd.io.measure import IoMetrics, error_type
from meshd.io.sse import Usage

if TYPE_CHECKING:
    from meshd.io.relay import Relay
    from meshd.log import Log
    from meshd.metrics.cells import BufferedHistogram


class Record:
    """The facts of one request: filled by its exchange, read once at the end. Times are loop seconds."""

    __slots__ = (
        "attempts",
        "body_at",
        "bytes_in",
        "bytes_out",
        "duration",
        "endpoint",
        "error_code",
        "head_at",
        "is_client_gone",
        "is_reused",
        "is_routine",
        "is_stream",
        "job_run_s",
        "label",
        "model",
        "model_label",
        "outcome",
        "placed_at",
        "prepared_at",
        "reason",
        "request_id",
        "routed",
        "started_at",
        "status",
        "ticket_at",
        "upstream",
    )

    def __init__(self, started_at: float) -> None:
        self.started_at = started_at
        self.ticket_at = self.body_at = self.prepared_at = self.placed_at = self.head_at = 0.0
        self.job_run_s = 0.0
        self.request_id = ""
        self.label = "other"  # path template
        self.endpoint = ""  # endpoint label; empty for routes
        self.model = ""
        self.model_label = "unknown"  # the bounded name of the model
        self.is_stream = False
        self.status = 0
        self.error_code = ""
        self.outcome = ""
        self.upstream = ""
        self.reason = ""
        self.attempts = 0
        self.is_reused = False
        self.is_routine = False  # a health route: of interest when debugging only
        self.bytes_in = self.bytes_out = 0
        self.is_client_gone = False
        self.duration: BufferedHistogram | None = None  # of mesh_http_request_duration_seconds
        self.routed: BufferedHistogram | None = None  # of mesh_router_request_duration_seconds

    def __repr__(self) -> str:
        return f"Record({self.request_id} {self.label} {self.status} {self.outcome})"


def count(metrics: IoMetrics, record: Record, relay: Relay | None, now: float) -> None:
    """Count the end of one request."""
    total_s = now - record.started_at
    if record.duration is not None:
        record.duration.observe(total_s)
    if record.is_client_gone:
        record.outcome = "canceled"
        metrics.disconnects.inc()
    elif record.status >= 400 and record.outcome in ("completed", "failed"):
        record.outcome = error_type(record.status, record.error_code)
    if not record.endpoint:
        return
    if record.routed is not None:
        record.routed.observe(total_s)
    if record.outcome != "completed":
        metrics.router_error(record.model_label, record.endpoint, record.outcome)
    if relay is not None:
        metrics.stage_relay(now - record.head_at)
        metrics.overhead.observe(_overhead_s(record))
        _count_output(metrics, record, relay, now)


def _count_output(metrics: IoMetrics, record: Record, relay: Relay, now: float) -> None:
    usage: Usage = relay.usage
    if relay.skipped_observation:
        metrics.observation_skipped(relay.skipped_observation)
    if not 200 <= record.status < 300:
        return
    observed = metrics.observed(record.model_label, record.endpoint)
    generation_s = (relay.ended_at or now) - record.started_at
    if record.outcome in ("completed", "backend_error"):
        observed.generation.observe(generation_s)
    if usage.is_known:
        observed.input_tokens.inc(usage.input_tokens)
        observed.output_tokens.inc(usage.output_tokens)
    if relay.first_token_at:
        ttft_s = relay.first_token_at - record.started_at
        observed.ttft.observe(ttft_s)
        if usage.output_tokens > 1 and record.outcome == "completed":
            observed.tpot.observe((generation_s - ttft_s) / (usage.output_tokens - 1))


def _overhead_s(record: Record) -> float:
    """Time meshd itself added: the job's own run, placement and writing; no waits."""
    return record.job_run_s + max(0.0, record.placed_at - record.prepared_at)


def write_access_line(
    log: Log,
    record: Record,
    relay: Relay | None,
    now: float,
    *,
    client: str,
    io_process: int,
    method: str,
    path: str,
    is_http11: bool,
) -> None:
    """Write the one access line of a request (metrics.md §7); empty fields are left out."""
    fields: dict[str, Any] = {
        "request_id": record.request_id,
        "client": client,
        "io_process": io_process,
        "method": method,
        "path": path,
        "http": "1.1" if is_http11 else "1.0",
        "status": record.status or 499,
        "outcome": record.outcome,
        "bytes_in": record.bytes_in,
        "bytes_out": relay.bytes_out if relay is not None else record.bytes_out,
    }
    if record.error_code:
        fields["error_code"] = record.error_code
    if record.endpoint:
        fields["endpoint"] = record.endpoint
        fields["model"] = record.model
        fields["stream"] = record.is_stream
    if record.upstream:
        fields["upstream"] = record.upstream
        fields["attempts"] = record.attempts
        fields["reason"] = record.reason
        fields["reused"] = record.is_reused
    if relay is not None and relay.usage.is_known:
        fields["input_tokens"] = relay.usage.input_tokens
        fields["output_tokens"] = relay.usage.output_tokens
    _add_times(fields, record, relay, now)
    log.access(fields, is_routine=record.is_routine)


def _add_times(fields: dict[str, Any], record: Record, relay: Relay | None, now: float) -> None:
    stages = (
        ("admission_ms", record.started_at, record.ticket_at),
        ("body_ms", record.ticket_at, record.body_at),
        ("prepare_ms", record.body_at, record.prepared_at),
        ("upstream_head_ms", record.placed_at, record.head_at),
    )
    for name, start, end in stages:
        if start and end:
            fields[name] = round((end - start) * 1e3, 3)
    if record.job_run_s:
        fields["prepare_run_ms"] = round(record.job_run_s * 1e3, 3)
    if relay is not None and relay.first_token_at:
        fields["ttft_ms"] = round((relay.first_token_at - record.started_at) * 1e3, 3)
    fields["total_ms"] = round((now - record.started_at) * 1e3, 3)
    if record.placed_at:
        fields["overhead_ms"] = round(_overhead_s(record) * 1e3, 3)
