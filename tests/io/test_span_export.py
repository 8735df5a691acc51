"""The exporter of spans: its bound, what it loses, and that nobody waits for it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

import pytest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.trace import SpanKind, StatusCode

from meshd.io.span_export import BATCH_SPANS, MAX_REQUESTS, LastComplaint, SpanExporter, open_exporter
from meshd.io.tracing import Span
from tests.fakes.collector import Collector


class Library:
    """Stands for the exporter of OpenTelemetry."""

    def __init__(self) -> None:
        self.batches: list[list[ReadableSpan]] = []
        self.result: SpanExportResult | Exception = SpanExportResult.SUCCESS
        self.held: threading.Event | None = None
        self.is_shut_down = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        if self.held is not None:
            self.held.wait(10)
        self.batches.append(list(spans))
        if isinstance(self.result, Exception):
            raise self.result
        return self.result

    def shutdown(self) -> None:
        self.is_shut_down = True
        if self.held is not None:
            self.held.set()


@pytest.fixture
def library() -> Library:
    return Library()


@pytest.fixture
def exporter(library: Library) -> SpanExporter:
    return SpanExporter(library, Resource({"service.name": "meshd"}), LastComplaint())


def span(number: int = 1, **changes: object) -> Span:
    made = Span("POST", "client", 7, number, 3, True, 10.0, 11.5, {"a": 1})
    return made._replace(**changes)


def test_span_is_what_the_library_calls_one(library, exporter):
    exporter.put([span(), span(2, error="reset", parent_id=0, kind="server")])
    exporter.send_waiting()
    ((first, second),) = library.batches
    assert (first.name, first.kind, first.context.trace_id, first.context.span_id) == (
        "POST", SpanKind.CLIENT, 7, 1,
    )  # fmt: skip
    assert first.parent is not None and first.parent.span_id == 3 and first.parent.is_remote
    assert first.attributes == {"a": 1} and first.resource.attributes["service.name"] == "meshd"
    assert first.end_time - first.start_time == 1_500_000_000
    assert first.status.status_code is StatusCode.UNSET
    assert second.parent is None and second.status.status_code is StatusCode.ERROR


def test_spans_go_out_in_batches_that_keep_requests_whole(library, exporter):
    for number in range(1, 201):
        exporter.put([span(number), span(number + 1000), span(number + 2000)])
    exporter.send_waiting()
    sizes = [len(batch) for batch in library.batches]
    assert sum(sizes) == 600 and max(sizes) < BATCH_SPANS + 3 and all(size % 3 == 0 for size in sizes)


def test_beyond_its_bound_spans_are_dropped_and_counted(library, exporter):
    for number in range(1, MAX_REQUESTS + 11):
        exporter.put([span(number), span(number)])
    assert exporter.dropped == 20
    assert repr(exporter) == f"SpanExporter(waiting={MAX_REQUESTS} sent=0 dropped=20)"


@pytest.mark.parametrize("result", [SpanExportResult.FAILURE, ValueError("odd")])
def test_spans_that_nobody_takes_are_counted_and_the_trouble_is_told_until_it_ends(library, exporter, result):
    library.result = result
    exporter.put([span()])
    exporter.send_waiting()
    assert exporter.dropped == 1 and exporter.trouble
    library.result = SpanExportResult.SUCCESS
    exporter.put([span()])
    exporter.send_waiting()
    assert exporter.dropped == 1 and exporter.trouble == ""


def test_closing_sends_what_waits_and_takes_no_more(library, exporter):
    exporter.start()
    exporter.put([span()])
    exporter.close()
    assert sum(map(len, library.batches)) == 1 and library.is_shut_down
    exporter.put([span()])
    assert exporter.dropped == 1


def test_closing_does_not_wait_for_a_collector_that_is_silent(library, exporter):
    library.held = threading.Event()
    exporter.start()
    exporter.put([span()])
    exporter.close()  # its shutdown ends the call
    exporter._thread.join(10)
    assert library.is_shut_down and not exporter._thread.is_alive()


def test_library_speaks_to_a_real_collector_and_never_to_stderr(capfd):
    with Collector() as collector:
        exporter = open_exporter(collector.endpoint, "io0.1")
        exporter.put([span(5)])
        exporter.send_waiting()  # by this thread: the other one has not begun
        (seen,) = collector.spans
        assert (seen.trace_id, seen.span_id, seen.parent_id) == (
            "0" * 31 + "7",
            "0" * 15 + "5",
            "0" * 15 + "3",
        )
        assert seen.resource["service.instance.id"] == "io0.1"
        collector.answer = "refuse"
        exporter.put([span(6)])
        exporter.send_waiting()
        assert exporter.dropped == 1 and "INVALID_ARGUMENT" in exporter.trouble
        exporter.start()
        exporter.close()
    assert capfd.readouterr().err == ""
    logging.getLogger("opentelemetry").handlers.clear()
