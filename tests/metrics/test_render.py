"""The text of a scrape, read back by a strict parser."""

from __future__ import annotations

import math

import pytest
from prometheus_client.parser import text_string_to_metric_families

from meshd.memory import Segment
from meshd.metrics.catalog import build_catalog
from meshd.metrics.cells import MetricRow, segment_size
from meshd.metrics.family import Kind
from meshd.metrics.render import render
from meshd.metrics.table import MetricTable


def scrape(segment: Segment, scraped: dict[str, dict[tuple[str, ...], float]] | None = None) -> str:
    catalog = build_catalog()
    return render(catalog, MetricTable(segment, 1, catalog).sum_rows({0}), scraped or {}).decode()


def samples(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_every_family_has_its_type_and_every_preset_series_is_there_with_zero() -> None:
    text = scrape(Segment.create("metrics", segment_size(1)))
    types = {family.name: family.type for family in text_string_to_metric_families(text)}
    found = samples(text)
    for family in build_catalog().families:
        wire = "counter" if family.kind is Kind.FLOAT_COUNTER else str(family.kind)
        assert types[family.name.removesuffix("_total") if wire == "counter" else family.name] == wire
        for values in family.preset_values():
            labels = tuple(sorted(zip(family.label_names, values, strict=True)))
            name = family.name + ("_count" if wire == "histogram" else "")
            assert found[name, labels] == 0


def test_histogram_buckets_are_cumulative_and_end_with_the_count() -> None:
    segment = Segment.create("metrics", segment_size(1))
    histogram = MetricRow(segment, 0, build_catalog()).buffered_histogram("mesh_admission_wait_seconds")
    for value in (0.0001, 0.3, 0.3, 99.0):
        histogram.observe(value)
    histogram.flush()
    found = samples(scrape(segment))
    buckets = sorted(
        (math.inf if labels[0][1] == "+Inf" else float(labels[0][1]), value)
        for (name, labels), value in found.items()
        if name == "mesh_admission_wait_seconds_bucket"
    )
    counts = [value for _, value in buckets]
    assert counts == sorted(counts)
    assert buckets[0] == (0.0001, 1)
    assert dict(buckets)[0.5] == 3
    assert buckets[-1] == (math.inf, 4)
    assert found["mesh_admission_wait_seconds_count", ()] == 4
    assert found["mesh_admission_wait_seconds_sum", ()] == pytest.approx(99.6001)


def test_label_values_are_escaped_so_that_they_read_back_equal() -> None:
    segment = Segment.create("metrics", segment_size(1))
    model = 'a"b\\c\nd,e}'
    MetricRow(segment, 0, build_catalog()).counter(
        "mesh_worker_selection_total",
        worker_type="regular",
        connection_mode="http",
        model=model,
        policy="random",
    ).inc()
    found = [labels for (name, labels) in samples(scrape(segment)) if name == "mesh_worker_selection_total"]
    assert [dict(labels)["model"] for labels in found] == [model]


def test_scraped_values_replace_the_zero_of_their_series() -> None:
    text = scrape(
        Segment.create("metrics", segment_size(1)),
        {"mesh_processes": {("io",): 4}, "mesh_worker_health": {("http://u",): 1}},
    )
    found = samples(text)
    assert found["mesh_processes", (("kind", "io"),)] == 4
    assert found["mesh_processes", (("kind", "leader"),)] == 0
    assert found["mesh_worker_health", (("worker", "http://u"),)] == 1


def test_scraped_family_outside_the_catalog_is_refused() -> None:
    with pytest.raises(ValueError, match="mesh_surprise"):
        scrape(Segment.create("metrics", segment_size(1)), {"mesh_surprise": {(): 1}})


def test_names_and_types_are_the_same_in_two_scrapes() -> None:
    segment = Segment.create("metrics", segment_size(1))
    first = scrape(segment)
    MetricRow(segment, 0, build_catalog()).counter("mesh_http_accept_errors_total").inc()
    second = scrape(segment)

    def heads(text: str) -> list[str]:
        return [line for line in text.splitlines() if line.startswith("#")]

    assert heads(first) == heads(second)
