"""A collector that takes OTLP over gRPC in this process and keeps the spans; it can refuse, or be silent."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Self

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

KINDS = {1: "internal", 2: "server", 3: "client"}


@dataclass(frozen=True)
class SeenSpan:
    """One span; ids in hex digits, as `traceparent` has them."""

    name: str
    kind: str
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    is_error: bool
    resource: dict[str, Any]


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """``answer``: "take", "refuse" each call, or "silent" until the end."""

    def __init__(self, answer: str = "take") -> None:
        self.answer = answer
        self.spans: list[SeenSpan] = []
        self._ended = threading.Event()
        self._server = grpc.server(ThreadPoolExecutor(8))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)
        self.endpoint = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._server.stop(0).wait(10)

    def Export(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802: a name of gRPC
        if self.answer == "silent":
            self._ended.wait(60)
        if self.answer == "refuse":
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "no spans today")
        self.spans += [
            seen(span, resource_spans.resource)
            for resource_spans in request.resource_spans
            for scope_spans in resource_spans.scope_spans
            for span in scope_spans.spans
        ]
        return trace_service_pb2.ExportTraceServiceResponse()

    def of(self, request_id: str) -> list[SeenSpan]:
        """Return the spans of one request, the server span first, the others by their start."""
        servers = [span for span in self.spans if span.attributes.get("mesh.request_id") == request_id]
        mine = {span.trace_id for span in servers}
        spans = [span for span in self.spans if span.trace_id in mine]
        return sorted(spans, key=lambda span: (span.kind != "server", span.start_ns))


def seen(span: Any, resource: Any) -> SeenSpan:
    return SeenSpan(
        span.name,
        KINDS[span.kind],
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        values(span.attributes),
        span.status.code == 2,
        values(resource.attributes),
    )


def values(pairs: Iterable[Any]) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}
