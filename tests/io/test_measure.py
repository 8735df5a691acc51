"""What an I/O process counts, as a scrape would read it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from meshd.io.measure import MAX_KEPT, IoMetrics, error_type
from meshd.memory import Segment
from meshd.metrics.catalog import build_catalog
from meshd.metrics.cells import MetricRow
from meshd.metrics.layout import segment_size
from meshd.metrics.table import MetricTable


@pytest.fixture
def counted() -> tuple[IoMetrics, Callable[..., float]]:
    """The metrics of one process, and a way to read a series: its family, then its label values."""
    catalog, segment = build_catalog(), Segment.create("metrics", segment_size(1))
    metrics = IoMetrics(MetricRow(segment, 0, catalog))
    table = MetricTable(segment, 1, catalog)

    def value(name: str, *values: str) -> float:
        metrics.flush()
        return table.sum_rows({0}).value(name, *values)

    return metrics, value


def test_requests_in_flight_are_counted_by_the_ages_they_do_not_exceed(counted) -> None:
    metrics, value = counted
    metrics.requests_in_flight([100_000.0, 0.5, 30.0, 31.0])
    found = [value("mesh_http_inflight_request_age_count", le) for le in ("30", "60", "86400", "+Inf")]
    assert found == [2, 3, 3, 4]
    metrics.requests_in_flight([])
    assert value("mesh_http_inflight_request_age_count", "+Inf") == 0


def test_every_fallback_of_a_policy_has_a_series(counted) -> None:
    metrics, value = counted
    for reason in ("no_tokens", "no_owner"):
        metrics.fallback("prefix_hash", reason)
        assert value("mesh_policy_fallbacks_total", "prefix_hash", reason) == 1


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (404, "", "no_workers"),
        (408, "request_timeout", "timeout"),
        (504, "", "timeout"),
        (429, "", "rate_limited"),
        (400, "", "validation_error"),
        (501, "unsupported_api", "validation_error"),
        (501, "", "backend_error"),
        (500, "internal_error", "internal_error"),
        (500, "", "backend_error"),
        (503, "no_workers", "backend_error"),
    ],
)
def test_error_type_follows_from_the_status_and_from_whose_error_it_is(status, code, kind) -> None:
    assert error_type(status, code) == kind


def test_method_that_a_stranger_made_up_is_not_remembered(counted) -> None:
    metrics, value = counted
    counted_alike = [metrics.requests("/health", f"M{number}") for number in range(1000)]
    for each in counted_alike:
        each.heads.inc()
    assert len({id(each.duration) for each in counted_alike}) == 1 and len(metrics._requests) == 1
    assert value("mesh_http_requests_total", "/health", "other") == 1000


def test_models_and_upstreams_that_come_and_go_are_not_all_remembered(counted) -> None:
    metrics, value = counted
    count = 2 * MAX_KEPT + 1
    for number in range(count):
        metrics.routed(f"m{number}", "chat", False).observed.ttft.observe(0.1)
        metrics.leg_ended(f"http://u{number}:1", "success")
        metrics.selections(f"m{number}", "random").inc()
    for handles in (metrics._routed["chat"], metrics._leg_outcomes, metrics._selections):
        assert len(handles) <= MAX_KEPT
    assert value("mesh_worker_cb_outcomes_total", "other", "success") > MAX_KEPT
    assert value("mesh_worker_cb_outcomes_total", "http://u7:1", "success") == 1
