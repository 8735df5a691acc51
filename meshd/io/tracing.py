"""Spans of requests, for `--enable-trace`.

A request is traced by what its `Record` has anyway, and by one `RequestTrace` with the exchanges it had with
upstreams. Nothing is made of them before the request has ended: then the ledger hands the records here, and
what comes out are plain tuples for whoever exports them (span_export.py).

    server span            first byte of the head … end of the response
     ├ admission, body, prepare, relay
     └ one client span for each exchange with an upstream: the parent of the upstream's own spans
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, Protocol
from urllib.parse import urlsplit

from meshd.io.traceparent import SAMPLED, TraceContext, TraceIds, read_traceparent, trace_fields

if TYPE_CHECKING:
    from meshd.io.account import Record
    from meshd.io.http1 import RequestHead, ResponseHead

Attributes = dict[str, str | int | float | bool]

_METHODS: Final = frozenset(("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"))
_OPERATIONS: Final = {
    "chat": "chat",
    "messages": "chat",
    "responses": "chat",
    "completions": "text_completion",
    "generate": "text_completion",
    "embeddings": "embeddings",
}
_MAX_PATH_CHARS: Final = 256
_MAX_MODEL_CHARS: Final = 128


class Span(NamedTuple):
    """One span; ids as in W3C Trace Context, times in seconds of the clock of the records."""

    name: str
    kind: Literal["server", "client", "internal"]
    trace_id: int
    span_id: int
    parent_id: int  # 0: none
    is_remote_parent: bool
    start_s: float
    end_s: float
    attributes: Attributes
    error: str = ""


class SpanSink(Protocol):
    def put(self, spans: list[Span]) -> None:
        """Take the spans of one request, or drop and count them; never waits."""
        ...


class EndedLeg(Protocol):
    """What a trace takes from a ``Leg``."""

    @property
    def is_reused(self) -> bool: ...
    @property
    def response(self) -> ResponseHead | None: ...


class LegTrace:
    """One exchange with an upstream, for as long as it is known."""

    __slots__ = ("ended_at", "error", "is_reused", "span_id", "started_at", "status", "upstream")

    def __init__(self, span_id: int, upstream: str, started_at: float) -> None:
        self.span_id = span_id
        self.upstream = upstream
        self.started_at = started_at
        self.ended_at = 0.0
        self.status = 0
        self.error = ""
        self.is_reused = False

    def end(self, now: float, leg: EndedLeg) -> None:
        """Its head has come, or will not."""
        self.ended_at = now
        self.is_reused = leg.is_reused
        if leg.response is not None:
            self.status = leg.response.status

    def __repr__(self) -> str:
        return f"LegTrace({self.upstream} {self.status} {self.error})"


class RequestTrace:
    """The trace of one request that is sampled."""

    __slots__ = ("context", "legs", "span_id")

    def __init__(self, context: TraceContext, span_id: int) -> None:
        self.context = context
        self.span_id = span_id
        self.legs: list[LegTrace] = []

    def failed(self, kind: str) -> None:
        """The last exchange failed; ``kind``: a value of the label `error_type`."""
        if self.legs:
            self.legs[-1].error = kind

    def __repr__(self) -> str:
        return f"RequestTrace({self.context.trace_id:032x} {self.legs})"


NO_TRACE: Final[tuple[LegTrace | None, bytes]] = (None, b"")
"""What stands for the trace of an exchange when there is none: the client's own fields go on."""


class Tracing:
    """Makes the traces of one I/O process. ``is_tls``: whether clients come over TLS."""

    def __init__(
        self,
        sink: SpanSink,
        clock: Callable[[], float],
        *,
        is_tls: bool = False,
        ids: TraceIds | None = None,
    ) -> None:
        self._sink = sink
        self._clock = clock
        self._scheme = "https" if is_tls else "http"
        self._ids = TraceIds() if ids is None else ids

    def __repr__(self) -> str:
        return f"Tracing({self._sink!r})"

    def leg(self, record: Record, head: RequestHead, upstream: str) -> tuple[LegTrace | None, bytes]:
        """Begin an exchange with an upstream; return its header lines too."""
        trace = record.trace or self._begin(record, head)
        if trace is None:
            return NO_TRACE
        leg = LegTrace(self._ids.span_id(), upstream, self._clock())
        trace.legs.append(leg)
        return leg, trace_fields(trace.context, leg.span_id, head)

    def ended(self, records: Iterable[Record]) -> None:
        """Make the spans of requests that have ended; health routes have none."""
        for record in records:
            if record.is_routine or record.head is None:
                continue
            trace = record.trace or self._begin(record, record.head)
            if trace is not None:
                self._sink.put(self._spans(record, trace))

    def _begin(self, record: Record, head: RequestHead) -> RequestTrace | None:
        context = read_traceparent(head)
        if context is None:
            context = TraceContext(self._ids.trace_id(), 0, SAMPLED)
        elif not context.is_sampled:
            return None
        trace = record.trace = RequestTrace(context, self._ids.span_id())
        return trace

    # ------------------------------------------------------------------------------------------ spans

    def _spans(self, record: Record, trace: RequestTrace) -> list[Span]:
        spans = [self._server_span(record, trace), *self._stages(record, trace)]
        # Of several that answered, the last one at the upstream of the record is the one that was relayed.
        legs = reversed(trace.legs)
        relayed = next((leg for leg in legs if leg.status and leg.upstream == record.upstream), None)
        before: LegTrace | None = None
        for leg in trace.legs:
            is_resend = before is not None and 0.0 < before.ended_at <= leg.started_at
            spans.append(self._leg_span(record, trace, leg, is_resend, leg is relayed))
            before = leg
        return spans

    def _server_span(self, record: Record, trace: RequestTrace) -> Span:
        head = record.head
        assert head is not None
        method = head.method if head.method in _METHODS else "_OTHER"
        attributes: Attributes = {
            "http.request.method": method,
            "url.path": head.path[:_MAX_PATH_CHARS],
            "url.scheme": self._scheme,
            "network.protocol.version": "1.1" if head.is_http11 else "1.0",
            "mesh.request_id": record.request_id,
            "mesh.outcome": record.outcome,
        }
        route = "" if record.label == "other" else record.label
        if route:
            attributes["http.route"] = route
        address, _, port = record.client.rpartition(":")
        if address:
            attributes["client.address"] = address.strip("[]")
            attributes["client.port"] = int(port)
        if record.status:
            attributes["http.response.status_code"] = record.status
        error = ""
        if record.status >= 500 or record.outcome == "body_error":
            error = attributes["error.type"] = record.error_code or record.outcome or str(record.status)
        if record.endpoint:
            attributes["mesh.endpoint"] = record.endpoint
            attributes.update(_model(record))
        if record.attempts:
            attributes["mesh.attempts"] = record.attempts
            attributes["mesh.route_reason"] = record.reason
        if record.usage is not None and record.usage.is_known:
            attributes["gen_ai.usage.input_tokens"] = record.usage.input_tokens
            attributes["gen_ai.usage.output_tokens"] = record.usage.output_tokens
        name = f"{'HTTP' if method == '_OTHER' else method} {route}".rstrip()
        context = trace.context
        return Span(
            name, "server", context.trace_id, trace.span_id, context.parent_id, context.parent_id != 0,
            record.started_at, record.finished_at, attributes, error,
        )  # fmt: skip

    def _stages(self, record: Record, trace: RequestTrace) -> Iterable[Span]:
        for name, start, end in (
            ("admission", record.started_at, record.ticket_at),
            ("body", record.ticket_at, record.body_at),
            ("prepare", record.body_at, record.prepared_at),
            ("relay", record.head_at, record.finished_at),
        ):
            if start and end:
                yield Span(
                    name, "internal", trace.context.trace_id, self._ids.span_id(), trace.span_id, False,
                    start, end, {},
                )  # fmt: skip

    def _leg_span(
        self, record: Record, trace: RequestTrace, leg: LegTrace, is_resend: bool, is_relayed: bool
    ) -> Span:
        assert record.head is not None
        method = record.head.method if record.head.method in _METHODS else "_OTHER"
        url = urlsplit(leg.upstream)
        attributes: Attributes = {
            "http.request.method": method,
            "server.address": url.hostname or "",
            "server.port": url.port or (443 if url.scheme == "https" else 80),
            "url.scheme": url.scheme,
            "mesh.connection_reused": leg.is_reused,
            **_model(record),
        }
        if is_resend:
            attributes["http.request.resend_count"] = trace.legs.index(leg)
        end_s = leg.ended_at or record.finished_at  # not ended: the client left meanwhile
        error = leg.error
        if leg.status:
            attributes["http.response.status_code"] = leg.status
            error = error or (str(leg.status) if leg.status >= 400 else "")
            relay = record.relay
            if is_relayed and relay is not None:
                end_s = max(end_s, relay.ended_at or record.finished_at)
                if relay.failure is not None:
                    error = relay.failure.code
        if error:
            attributes["error.type"] = error
        name = "HTTP" if method == "_OTHER" else method
        return Span(
            name, "client", trace.context.trace_id, leg.span_id, trace.span_id, False,
            leg.started_at, end_s, attributes, error,
        )  # fmt: skip


def _model(record: Record) -> Attributes:
    attributes: Attributes = {}
    operation = _OPERATIONS.get(record.endpoint)
    if operation:
        attributes["gen_ai.operation.name"] = operation
    if record.model:
        attributes["gen_ai.request.model"] = record.model[:_MAX_MODEL_CHARS]
    return attributes
