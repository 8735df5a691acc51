"""Sums over rows while their owners come, go and write."""

from __future__ import annotations

import multiprocessing

from meshd.memory import Segment
from meshd.metrics.catalog import build_catalog
from meshd.metrics.cells import MetricRow, segment_size
from meshd.metrics.table import MetricTable


def test_row_that_nobody_ever_owned_adds_nothing_and_is_not_touched() -> None:
    catalog = build_catalog()
    segment = Segment.create("metrics", segment_size(8))
    totals = MetricTable(segment, 8, catalog).sum_rows(range(8))
    assert totals.value("mesh_admission_held") == 0
    assert totals.series["mesh_http_requests_total"] == {}


def test_series_that_appear_later_are_seen_by_a_table_that_has_already_read() -> None:
    catalog = build_catalog()
    segment = Segment.create("metrics", segment_size(1))
    row, table = MetricRow(segment, 0, catalog), MetricTable(segment, 1, catalog)
    for count, path in enumerate(("/a", "/b", "/c"), start=1):
        row.counter("mesh_http_requests_total", path=path, method="GET").inc()
        assert len(table.sum_rows(()).series["mesh_http_requests_total"]) == count


def _write(segment: Segment, rounds: int) -> None:
    row = MetricRow(segment, 0, build_catalog())
    for n in range(rounds):
        row.counter("mesh_http_requests_total", path=f"/{n % 100}", method="GET").inc()


def test_reader_beside_a_writing_process_sees_whole_names_and_counts_that_only_grow() -> None:
    catalog, rounds = build_catalog(), 20_000
    segment = Segment.create("metrics", segment_size(1))
    table = MetricTable(segment, 1, catalog)
    writer = multiprocessing.get_context("fork").Process(target=_write, args=(segment, rounds))
    writer.start()
    names = {(f"/{n}", "GET") for n in range(100)}
    seen = 0.0
    while writer.is_alive():
        series = table.sum_rows(()).series["mesh_http_requests_total"]
        count = sum(words[0] for words in series.values())
        assert set(series) <= names
        assert count >= seen
        seen = count
    writer.join()
    series = table.sum_rows(()).series["mesh_http_requests_total"]
    assert set(series) == names
    assert sum(words[0] for words in series.values()) == rounds
