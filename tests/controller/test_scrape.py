"""The metrics port: gauges computed at a scrape, CPU totals, routes."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence

import orjson
import pytest
from prometheus_client.parser import text_string_to_metric_families

from meshd import __version__
from meshd.api.health import HealthFacts
from meshd.control import ProcessBoard, Role, State, Topology
from meshd.controller.http_server import Request, Response
from meshd.controller.pool_watch import PoolWatch
from meshd.controller.scrape import (
    KINDS,
    CpuLedger,
    MetricsRoutes,
    process_values,
)
from meshd.controller.upstream_metrics import UpstreamMetrics
from meshd.memory import Segment
from meshd.metrics.catalog import build_catalog
from meshd.metrics.cells import MetricRow, segment_size
from meshd.metrics.job_balance import JobBalance
from meshd.metrics.table import MetricTable
from meshd.prepare.layout import create_rings
from meshd.routing.conditions import Conditions
from meshd.routing.conditions import segment_bytes as conditions_bytes
from meshd.routing.load import LoadTable, segment_bytes
from meshd.routing.registry import Upstream

UPSTREAMS = [
    Upstream(0, "a", "http://a:1", models=("m1", "m2"), is_healthy=True, state="active"),
    Upstream(1, "b", "http://b:1", models=("m1",)),
    Upstream(2, "c", "http://c:1"),
]
READY = HealthFacts(
    is_draining=False,
    has_registry=True,
    pool_is_alive=True,
    pool_has_failed=False,
    healthy_workers=1,
    total_workers=3,
)


class Node:
    """A board with this very process in one I/O seat, its metric cells and loads."""

    def __init__(self, upstreams: Sequence[Upstream] = UPSTREAMS, facts: HealthFacts = READY) -> None:
        self.topology = Topology.of(1, 1)
        self.catalog = build_catalog()
        self.board = ProcessBoard.create(self.topology.board_seats)
        self.board.started_ns = time.monotonic_ns()
        self.board.row(0).open(Role.IO, 0, os.getpid(), "0")
        self.cells = Segment.create("metrics", segment_size(self.topology.metric_rows))
        self.row = MetricRow(self.cells, self.topology.board_controller, self.catalog)
        self.table = MetricTable(self.cells, self.topology.metric_rows, self.catalog)
        segment = Segment.create("load", segment_bytes(self.topology.io_seats))
        self.own_load = LoadTable(segment, 0, self.topology.io_seats)
        self.loads = LoadTable(segment, None, self.topology.io_seats)
        rings = create_rings(self.topology.io_seats, self.topology.prepare_seats)
        pool = PoolWatch(self.topology, self.board, rings, JobBalance(self.cells, self.catalog))
        seats = self.topology.io_seats
        conditions = Segment.create("conditions", conditions_bytes(seats))
        self.conditions = Conditions(conditions, None, seats)
        self.upstreams: list[Upstream] = list(upstreams)
        self.departed: dict[str, int] = {}
        self.upstream_metrics = UpstreamMetrics(
            lambda: self.upstreams, lambda: self.departed, self.loads, self.conditions, self.table
        )
        self.routes = MetricsRoutes(
            self.table,
            self.board,
            self.ledger(),
            lambda: facts,
            self.upstream_metrics,
            4096,
            pool,
            dict,
            dict,
        )

    def ledger(self) -> CpuLedger:
        name = "mesh_process_cpu_seconds_total"
        return CpuLedger({role: self.row.float_counter(name, kind=role) for role in KINDS})

    def ask(self, path: str, method: str = "GET") -> Response:
        return asyncio.run(self.routes.handle(Request(method, path, "", {})))

    def scrape(self) -> dict[tuple[str, tuple[str, ...]], float]:
        text = self.ask("/metrics").body.decode()
        return {
            (sample.name, tuple(sample.labels.values())): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    def cpu_total(self, kind: str) -> float:
        return self.table.sum_rows(()).value("mesh_process_cpu_seconds_total", kind)


def test_scrape_has_the_version_the_start_and_readiness() -> None:
    node = Node()
    answer, found = node.ask("/metrics"), node.scrape()
    assert answer.content_type == "text/plain; version=0.0.4; charset=utf-8"
    assert found["mesh_build_info", (__version__,)] == 1
    assert found["mesh_start_time_seconds", ()] == pytest.approx(time.time(), abs=600)
    assert found["mesh_ready", ()] == 1
    assert found["mesh_body_memory_limit_bytes", ()] == 4096


def test_scrape_shows_what_the_kernel_says_of_living_processes() -> None:
    found = Node().scrape()
    assert found["mesh_processes", ("io",)] == 1
    assert found["mesh_processes", ("leader",)] == 0
    assert found["mesh_process_resident_memory_bytes", ("io",)] > 1 << 20
    assert found["mesh_process_open_fds", ("io",)] > 3
    assert found["mesh_process_cpu_seconds_total", ("io",)] > 0


def test_process_that_vanished_before_the_scrape_does_not_break_it() -> None:
    node = Node()
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    node.board.row(1).open(Role.IO, 1, child, "0")
    assert node.scrape()["mesh_processes", ("io",)] == 2


def test_restarts_are_counted_from_the_board() -> None:
    node = Node()
    row = node.board.row(0)
    row.close()
    row.open(Role.IO, 0, os.getpid(), "0")
    assert node.scrape()["mesh_process_restarts_total", ("io",)] == 1


def test_only_prepare_workers_that_are_up_are_live() -> None:
    node = Node()
    row = node.board.row(node.topology.board_prepare(0))
    row.open(Role.PREPARE, 0, os.getpid(), "0")
    assert process_values(node.board, node.ledger())["mesh_prepare_live_workers"] == {(): 0}
    row.state = State.READY
    row.busy = 1
    values = process_values(node.board, node.ledger())
    assert values["mesh_prepare_live_workers"] == values["mesh_prepare_busy_workers"] == {(): 1}


def test_cpu_of_ended_processes_stays_in_the_total() -> None:
    node = Node()
    ledger = node.ledger()
    ledger.update({(Role.IO, 1): 5.0, (Role.IO, 2): 1.0})
    ledger.update({(Role.IO, 1): 6.0})
    ledger.update({(Role.IO, 1): 6.5, (Role.IO, 3): 0.25})
    assert node.cpu_total("io") == pytest.approx(1.0 + 6.5 + 0.25)


def test_next_controller_continues_the_cpu_totals() -> None:
    node = Node()
    first = node.ledger()
    first.update({(Role.IO, 1): 5.0, (Role.IO, 2): 4.0})
    first.update({(Role.IO, 1): 5.0})
    second = node.ledger()
    second.update({(Role.IO, 1): 5.5})
    assert node.cpu_total("io") == pytest.approx(9.0)
    second.update({(Role.IO, 1): 6.5})
    assert node.cpu_total("io") == pytest.approx(10.0)


def test_gauges_of_a_dead_process_are_gone_and_its_counters_stay() -> None:
    node = Node()
    row = MetricRow(node.cells, 0, node.catalog)
    row.gauge("mesh_admission_held").set(3)
    row.counter("mesh_http_accept_errors_total").inc()
    assert node.scrape()["mesh_admission_held", ()] == 3
    node.board.row(0).close()
    found = node.scrape()
    assert found["mesh_admission_held", ()] == 0
    assert found["mesh_http_accept_errors_total", ()] == 1


def test_health_routes_are_answered_from_the_facts() -> None:
    for path in ("/liveness", "/health", "/readyz"):
        answer = Node().ask(path)
        assert answer.status == 200
        assert dict(answer.headers)["cache-control"] == "no-store"
    draining = Node(facts=HealthFacts(True, True, True, False, 1, 1))
    assert draining.ask("/readiness").status == 503
    assert draining.scrape()["mesh_ready", ()] == 0


def test_other_paths_and_methods_are_refused() -> None:
    assert orjson.loads(Node().ask("/workers").body)["error"]["code"] == "not_found"
    answer = Node().ask("/metrics", "POST")
    assert (answer.status, dict(answer.headers)["allow"]) == (405, "GET, HEAD")
