"""Rows of metric cells: what a writer stores and what its successor finds."""

from __future__ import annotations

from random import Random

import pytest

from meshd.errors import StartupError
from meshd.memory import Segment
from meshd.metrics import layout
from meshd.metrics.catalog import build_catalog
from meshd.metrics.cells import MetricRow, segment_size
from meshd.metrics.table import MetricTable


def make_segment(rows: int = 2) -> Segment:
    return Segment.create("metrics", segment_size(rows))


def test_counters_of_all_rows_are_summed() -> None:
    segment, catalog = make_segment(), build_catalog()
    for row in range(2):
        MetricRow(segment, row, catalog).counter("mesh_http_accept_errors_total").inc(3 + row)
    totals = MetricTable(segment, 2, catalog).sum_rows(live_rows=())
    assert totals.value("mesh_http_accept_errors_total") == 7


def test_gauges_count_only_in_rows_of_living_processes() -> None:
    segment, catalog = make_segment(), build_catalog()
    for row in range(2):
        MetricRow(segment, row, catalog).gauge("mesh_admission_held").set(5)
    assert MetricTable(segment, 2, catalog).sum_rows(live_rows={1}).value("mesh_admission_held") == 5


def test_gauge_moves_both_ways() -> None:
    segment, catalog = make_segment(1), build_catalog()
    gauge = MetricRow(segment, 0, catalog).gauge("mesh_admission_held")
    gauge.add(2)
    gauge.add(-3)
    assert MetricTable(segment, 1, catalog).sum_rows({0}).value("mesh_admission_held") == -1


def test_histogram_counts_a_value_on_a_bound_in_the_bucket_of_that_bound() -> None:
    segment, catalog = make_segment(1), build_catalog([0.1, 1.0])
    histogram = MetricRow(segment, 0, catalog).buffered_histogram(
        "mesh_http_request_duration_seconds", path="/x", method="GET"
    )
    for value in (0.1, 0.5, 1.0, 7.0):
        histogram.observe(value)
    histogram.flush()
    words = (
        MetricTable(segment, 1, catalog)
        .sum_rows(())
        .series["mesh_http_request_duration_seconds"][("/x", "GET")]
    )
    assert words == [1, 2, 1, pytest.approx(8.6)]


@pytest.mark.parametrize("count", [1, 2, 500])
def test_histogram_counts_each_value_in_its_bucket_whatever_was_flushed_before(count: int) -> None:
    bounds = [number / 16 for number in range(1, 17)]
    segment, catalog = make_segment(1), build_catalog(bounds)
    name, rng = "mesh_http_request_duration_seconds", Random(count)
    row = MetricRow(segment, 0, catalog)
    histogram = row.buffered_histogram(name, path="/x", method="GET")
    values = [rng.choice([rng.random() * 1.1, rng.choice(bounds)]) for _ in range(count)]
    for _ in range(2):
        for value in values:
            histogram.observe(value)
        row.flush()
    expected = [0] * 17
    for value in values:
        expected[next((place for place, bound in enumerate(bounds) if value <= bound), 16)] += 2
    words = MetricTable(segment, 1, catalog).sum_rows(()).series[name][("/x", "GET")]
    assert words == [*expected, pytest.approx(2 * sum(values))]


def test_buffered_counter_is_written_by_the_next_flush_and_once() -> None:
    segment, catalog = make_segment(1), build_catalog()
    row, table = MetricRow(segment, 0, catalog), MetricTable(segment, 1, catalog)
    counters = [row.buffered_counter("mesh_http_requests_total", path="/x", method="GET") for _ in range(2)]
    at_once = row.counter("mesh_http_requests_total", path="/x", method="GET")
    for counter in counters:
        counter.inc(0)
        counter.inc()
    at_once.inc()
    assert table.sum_rows(()).value("mesh_http_requests_total", "/x", "GET") == 1
    for expected in (3, 3):
        row.flush()
        assert table.sum_rows(()).value("mesh_http_requests_total", "/x", "GET") == expected
    counters[0].inc(5)
    row.flush()
    assert table.sum_rows(()).value("mesh_http_requests_total", "/x", "GET") == 8


def test_next_owner_continues_counters_and_histograms_and_zeroes_gauges() -> None:
    segment, catalog = make_segment(1), build_catalog()
    for _ in range(2):
        row = MetricRow(segment, 0, catalog)
        row.counter("mesh_http_requests_total", path="/generate", method="POST").inc()
        row.buffered_histogram("mesh_admission_wait_seconds").observe(0.5)
        row.flush()
        connection = {"worker_type": "regular", "connection_mode": "http"}
        row.gauge("mesh_worker_connections_active", **connection).add(1)
        row.gauge("mesh_admission_waiting").add(1)
    totals = MetricTable(segment, 1, catalog).sum_rows({0})
    assert totals.value("mesh_http_requests_total", "/generate", "POST") == 2
    assert sum(totals.series["mesh_admission_wait_seconds"][()][:-1]) == 2
    assert totals.value("mesh_worker_connections_active", "regular", "http") == 1
    assert totals.value("mesh_admission_waiting") == 1


def test_row_of_another_catalog_is_refused() -> None:
    segment = make_segment(1)
    MetricRow(segment, 0, build_catalog())
    with pytest.raises(StartupError):
        MetricRow(segment, 0, build_catalog([1.0, 2.0]))


def test_model_over_the_limit_becomes_other_and_known_ones_stay() -> None:
    segment, catalog = make_segment(1), build_catalog()
    row = MetricRow(segment, 0, catalog)
    target = {"worker_type": "regular", "connection_mode": "http", "policy": "random"}
    for n in range(300):
        row.counter("mesh_worker_selection_total", model=f"m{n}", **target).inc()
    row.counter("mesh_worker_selection_total", model="m7", **target).inc()
    series = MetricTable(segment, 1, catalog).sum_rows(()).series["mesh_worker_selection_total"]
    assert len(series) == 257
    assert series["regular", "http", "m7", "random"] == [2]
    assert series["regular", "http", "other", "random"] == [44]


def test_histograms_that_share_cells_are_one_object() -> None:
    """Else each made-up name would cost memory, and time at each flush."""
    segment, catalog = make_segment(1), build_catalog()
    row = MetricRow(segment, 0, catalog)
    name = "mesh_http_request_duration_seconds"
    found = {id(row.buffered_histogram(name, path="/health", method=f"M{n}")) for n in range(1000)}
    assert len(found) == 1


def test_limit_of_a_label_holds_over_rows_together() -> None:
    segment, catalog = make_segment(2), build_catalog()
    target = {"worker_type": "regular", "connection_mode": "http", "policy": "random"}
    for number in range(2):
        row = MetricRow(segment, number, catalog)
        for n in range(200):
            row.counter("mesh_worker_selection_total", model=f"{number}-{n}", **target).inc()
    series = MetricTable(segment, 2, catalog).sum_rows(()).series["mesh_worker_selection_total"]
    assert len(series) == 257
    assert sum(words[0] for words in series.values()) == 400


def test_full_row_folds_new_open_values_into_other_and_counts_each() -> None:
    segment, catalog = make_segment(1), build_catalog()
    row = MetricRow(segment, 0, catalog)
    methods = ("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "other")
    made = 0
    for n in range(128):
        for method in methods:
            path = f"/{n}" + "x" * 500
            row.counter("mesh_http_requests_total", path=path, method=method).inc()
            made += 1
    series = MetricTable(segment, 1, catalog).sum_rows(()).series["mesh_http_requests_total"]
    assert sum(words[0] for words in series.values()) == made
    assert any(values[0] == "other" for values in series)
    assert len(series) < made


def test_method_outside_its_list_becomes_other_and_an_upstream_code_empty() -> None:
    segment, catalog = make_segment(1), build_catalog()
    row = MetricRow(segment, 0, catalog)
    row.counter("mesh_http_requests_total", path="/x", method="BREW").inc()
    row.counter("mesh_http_responses_total", status_code="503", error_code="upstream_text").inc()
    totals = MetricTable(segment, 1, catalog).sum_rows(())
    assert totals.value("mesh_http_requests_total", "/x", "other") == 1
    assert totals.value("mesh_http_responses_total", "503", "") == 1


def test_value_outside_a_closed_list_without_other_is_a_programming_error() -> None:
    row = MetricRow(make_segment(1), 0, build_catalog())
    with pytest.raises(ValueError, match="result"):
        row.counter("mesh_http_rate_limit_total", result="perhaps")
    with pytest.raises(ValueError, match="gauge"):
        row.counter("mesh_admission_held")


def test_record_that_was_not_published_is_not_read_and_gets_overwritten() -> None:
    segment, catalog = make_segment(1), build_catalog()
    MetricRow(segment, 0, catalog)
    names = layout.row_start(0) + layout.NAMES_OFFSET
    segment.bytes[names : names + 16] = b"\xff" * 16
    table = MetricTable(segment, 1, catalog)
    assert table.sum_rows(()).series["mesh_http_requests_total"] == {}
    MetricRow(segment, 0, catalog).counter("mesh_http_requests_total", path="/x", method="GET").inc()
    assert table.sum_rows(()).series["mesh_http_requests_total"] == {("/x", "GET"): [1]}


def test_float_counter_never_goes_back() -> None:
    segment, catalog = make_segment(1), build_catalog()
    counter = MetricRow(segment, 0, catalog).float_counter("mesh_process_cpu_seconds_total", kind="io")
    counter.raise_to(2.5)
    counter.raise_to(1.0)
    assert counter.total == 2.5


def test_label_value_that_is_no_valid_unicode_is_kept_readable() -> None:
    segment, catalog = make_segment(1), build_catalog()
    row = MetricRow(segment, 0, catalog)
    row.counter("mesh_http_requests_total", path="/\udcff", method="GET").inc()
    assert MetricTable(segment, 1, catalog).sum_rows(()).value("mesh_http_requests_total", "/?", "GET") == 1
