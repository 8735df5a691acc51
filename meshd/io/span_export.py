"""Send spans to a collector over OTLP (gRPC), from a thread of the I/O process.

The only file that knows OpenTelemetry; it is imported with `--enable-trace` alone. Spans of a request are put
in a bounded queue. The thread takes them out once a second, makes OpenTelemetry's spans of them and sends
them in batches. What finds no room, and what no collector took, is dropped and counted: neither a slow nor a
missing collector is ever waited for.

The thread shares the interpreter with the event loop. In small turns (``SWITCH_SECS``) it delays the loop by
less than the 5 ms that the interpreter would give it.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Final, Protocol

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

from meshd import __version__
from meshd.io.tracing import Span

MAX_REQUESTS: Final = 8192  # whose spans wait
BATCH_SPANS: Final = 256
INTERVAL_SECS: Final = 1.0
SWITCH_SECS: Final = 0.0005
CLOSE_SECS: Final = 1.0
_KINDS: Final = {"server": SpanKind.SERVER, "client": SpanKind.CLIENT, "internal": SpanKind.INTERNAL}
_SAMPLED: Final = TraceFlags(TraceFlags.SAMPLED)


class Exporter(Protocol):
    def export(self, spans: Sequence[ReadableSpan], /) -> SpanExportResult: ...

    def shutdown(self) -> None: ...


class LastComplaint(logging.Handler):
    """Keeps the last thing that the library said, and keeps it off stderr, where lines have a form."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text = record.getMessage()


class SpanExporter:
    """Takes spans from the event loop's thread; `start` begins to send, `close` ends it."""

    def __init__(self, exporter: Exporter, resource: Resource, complaint: LastComplaint) -> None:
        self._exporter = exporter
        self._resource = resource
        self._complaint = complaint
        self._scope = InstrumentationScope("meshd", __version__)
        self._queue: deque[list[Span]] = deque()
        self._refused = 0  # written by the loop's thread
        self._lost = 0  # written by the exporting thread
        self._sent = 0
        self._is_failing = False
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="spans", daemon=True)

    def __repr__(self) -> str:
        return f"SpanExporter(waiting={len(self._queue)} sent={self._sent} dropped={self.dropped})"

    @property
    def dropped(self) -> int:
        """Spans lost since the start."""
        return self._refused + self._lost

    @property
    def trouble(self) -> str:
        """What keeps spans from being taken; empty while they are."""
        return (self._complaint.text or "not taken") if self._is_failing else ""

    def put(self, spans: list[Span]) -> None:
        if len(self._queue) >= MAX_REQUESTS or self._ending.is_set():
            self._refused += len(spans)
        else:
            self._queue.append(spans)

    def start(self) -> None:
        sys.setswitchinterval(SWITCH_SECS)
        self._thread.start()

    def close(self) -> None:
        """Send what waits, for a second at most."""
        self._ending.set()
        self._thread.join(CLOSE_SECS)
        self._exporter.shutdown()  # ends a call that goes on

    # ------------------------------------------------------------------------------------- the thread

    def _run(self) -> None:
        while not self._ending.wait(INTERVAL_SECS):
            self.send_waiting()
        self.send_waiting()

    def send_waiting(self) -> None:
        """Send all that waits now, batch by batch."""
        queue = self._queue
        batch: list[ReadableSpan] = []
        offset_ns = time.time_ns() - time.monotonic_ns()
        for _ in range(len(queue)):
            batch += [self._readable(span, offset_ns) for span in queue.popleft()]
            if len(batch) >= BATCH_SPANS:
                self._send(batch)
                batch = []
        if batch:
            self._send(batch)

    def _send(self, batch: list[ReadableSpan]) -> None:
        try:
            is_taken = self._exporter.export(batch) is SpanExportResult.SUCCESS
        except Exception as error:  # of a library: the thread must outlive whatever it raises
            self._complaint.text = repr(error)
            is_taken = False
        self._is_failing = not is_taken
        if is_taken:
            self._sent += len(batch)
        else:
            self._lost += len(batch)

    def _readable(self, span: Span, offset_ns: int) -> ReadableSpan:
        parent = None
        if span.parent_id:
            parent = SpanContext(span.trace_id, span.parent_id, span.is_remote_parent, _SAMPLED)
        return ReadableSpan(
            span.name,
            SpanContext(span.trace_id, span.span_id, False, _SAMPLED),
            parent,
            self._resource,
            span.attributes,
            kind=_KINDS[span.kind],
            status=Status(StatusCode.ERROR) if span.error else Status(),
            start_time=int(span.start_s * 1e9) + offset_ns,
            end_time=int(span.end_s * 1e9) + offset_ns,
            instrumentation_scope=self._scope,
        )


def open_exporter(endpoint: str, process: str) -> SpanExporter:
    """Return an exporter to ``endpoint``, ``host:port`` or a URL; only https is encrypted.

    Nothing is connected before there is something to send. What the OpenTelemetry library reads from its own
    variables (headers, certificates, attributes of the resource) holds besides.
    """
    complaint = LastComplaint()
    library = logging.getLogger("opentelemetry")
    library.addHandler(complaint)
    library.propagate = False
    url = endpoint if "://" in endpoint else f"http://{endpoint}"
    ours = Resource({"service.name": "meshd", "service.version": __version__, "service.instance.id": process})
    return SpanExporter(
        OTLPSpanExporter(endpoint=url), ours.merge(OTELResourceDetector().detect()), complaint
    )
