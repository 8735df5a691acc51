"""What is shown of upstreams, and how long."""

from __future__ import annotations

import pytest

from meshd.controller.upstream_metrics import UpstreamMetrics
from meshd.memory import Segment
from meshd.metrics.catalog import build_catalog
from meshd.metrics.cells import MetricRow, segment_size
from meshd.metrics.table import MetricTable
from meshd.routing.condition_cells import FAILURES, LINE_WORDS, SUCCESSES
from meshd.routing.conditions import HALF_OPEN, Conditions
from meshd.routing.conditions import segment_bytes as conditions_bytes
from meshd.routing.load import LoadTable, segment_bytes
from meshd.routing.registry import Upstream

UPSTREAMS = [
    Upstream(0, "a", "http://a:1", models=("m1", "m2"), is_healthy=True, state="active"),
    Upstream(1, "b", "http://b:1", models=("m1",)),
    Upstream(2, "c", "http://c:1"),
]
PER_WORKER = (
    "mesh_worker_health",
    "mesh_worker_requests_active",
    "mesh_worker_cb_state",
    "mesh_worker_cb_consecutive_failures",
    "mesh_worker_cb_consecutive_successes",
)


class Node:
    def __init__(self) -> None:
        catalog = build_catalog()
        self.cells = Segment.create("metrics", segment_size(1))
        self.row = MetricRow(self.cells, 0, catalog)
        self.table = MetricTable(self.cells, 1, catalog)
        segment = Segment.create("load", segment_bytes(1))
        self.own_load = LoadTable(segment, 0, 1)
        self.conditions = Conditions(Segment.create("conditions", conditions_bytes(1)), None, 1)
        self.upstreams = list(UPSTREAMS)
        self.departed: dict[str, int] = {}
        self.metrics = UpstreamMetrics(
            lambda: self.upstreams,
            lambda: self.departed,
            LoadTable(segment, None, 1),
            self.conditions,
            self.table,
        )


def test_upstreams_show_health_load_and_their_number_by_model() -> None:
    node = Node()
    node.own_load.add(1)
    values = node.metrics.values()
    assert values["mesh_worker_health"] == {("http://a:1",): 1, ("http://b:1",): 0, ("http://c:1",): 0}
    assert values["mesh_worker_requests_active"] == {
        ("http://a:1",): 0,
        ("http://b:1",): 1,
        ("http://c:1",): 0,
    }
    assert values["mesh_worker_pool_size"] == {
        ("regular", "http", "m1"): 2,
        ("regular", "http", "m2"): 1,
        ("regular", "http", "unknown"): 1,
    }


def test_upstreams_show_their_breaker() -> None:
    node = Node()
    words = node.conditions.cells.breaker_words
    words[LINE_WORDS], words[LINE_WORDS + FAILURES], words[LINE_WORDS + SUCCESSES] = HALF_OPEN, 10, 2
    values = node.metrics.values()
    assert values["mesh_worker_cb_state"] == {("http://a:1",): 0, ("http://b:1",): 2, ("http://c:1",): 0}
    assert values["mesh_worker_cb_consecutive_failures"]["http://b:1",] == 10
    assert values["mesh_worker_cb_consecutive_successes"]["http://b:1",] == 2


def test_removed_upstream_shows_minus_one_for_health_and_breaker_and_zero_for_the_rest() -> None:
    """metrics.md behaviour 10, its first half."""
    node = Node()
    node.own_load.add(0)
    node.upstreams, node.departed = node.upstreams[1:], {"http://a:1": 1790000000}
    values = node.metrics.values()
    assert [values[name]["http://a:1",] for name in PER_WORKER] == [-1, 0, -1, 0, 0]
    assert ("regular", "http", "m2") not in values["mesh_worker_pool_size"]


def test_upstream_that_came_back_shows_what_it_is() -> None:
    node = Node()
    node.departed = {"http://a:1": 1790000000}
    assert node.metrics.values()["mesh_worker_health"]["http://a:1",] == 1


def test_series_of_an_upstream_that_left_long_ago_are_gone_counters_too() -> None:
    """metrics.md behaviour 10, its second half."""
    node = Node()
    outcomes = "mesh_worker_cb_outcomes_total"
    for url in ("http://a:1", "http://gone:1", "http://just-left:1"):
        node.row.counter(outcomes, worker=url, outcome="success").inc()
    node.departed = {"http://just-left:1": 1790000000}
    totals = node.table.sum_rows({0})
    node.metrics.hide_departed(totals)
    assert set(totals.series[outcomes]) == {("http://a:1", "success"), ("http://just-left:1", "success")}
    values = node.metrics.values()
    assert all(("http://gone:1",) not in values[name] for name in PER_WORKER)


@pytest.mark.parametrize("name", ["mesh_worker_health", "mesh_worker_pool_size"])
def test_names_since_start_are_bounded(name: str) -> None:
    node = Node()
    shown: set[str] = set()
    for turn in range(3):
        node.upstreams = [
            Upstream(n, f"{turn}-{n}", f"http://u{turn}-{n}:1", models=(f"m{turn}-{n}",)) for n in range(600)
        ]
        shown |= {key[-1] for key in node.metrics.values()[name]}
    assert len(shown) == (1024 if name == "mesh_worker_health" else 256) + 1
    assert "other" in shown


def test_upstreams_beyond_the_bound_share_the_worst_health_and_all_their_load() -> None:
    node = Node()
    facts = {"models": ("m",), "state": "active"}
    node.upstreams = [
        Upstream(n, str(n), f"http://u{n}:1", is_healthy=n != 1023, **facts)  # type: ignore[arg-type]
        for n in range(1024)
    ]
    node.metrics.values()
    node.upstreams = [
        Upstream(n, str(n), f"http://v{n}:1", is_healthy=n != 7, **facts)  # type: ignore[arg-type]
        for n in range(10)
    ]
    for number in (3, 7):
        node.own_load.add(number)
    values = node.metrics.values()
    assert values["mesh_worker_health"] == {("other",): 0}
    assert values["mesh_worker_requests_active"] == {("other",): 2}
