"""Answer the metrics port: ``/metrics`` and the health routes.

Values that belong to no single process (the set of upstreams, loads, what the kernel says of each process)
are computed here at the moment of a scrape.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import psutil

from meshd import __version__
from meshd.api.health import HEALTH_ROUTES, HealthFacts, health_answer, unreadiness
from meshd.control import ProcessBoard, Role, State
from meshd.controller.answers import error_answer, request_id
from meshd.controller.http_server import Request, Response
from meshd.controller.pool_watch import PoolWatch
from meshd.controller.upstream_metrics import UpstreamMetrics
from meshd.metrics.cells import FloatCounter
from meshd.metrics.render import CONTENT_TYPE, render
from meshd.metrics.table import MetricTable

KINDS: Final = (Role.IO, Role.PREPARE, Role.LEADER, Role.CONTROLLER)

Values = dict[str, dict[tuple[str, ...], float]]


class CpuLedger:
    """CPU seconds of all processes of a kind, those that have ended included.

    Total = what ended processes had used when last seen + what living ones have used. The totals live in
    the controller's metric row, so a new controller goes on where the old one stopped.
    """

    def __init__(self, counters: dict[Role, FloatCounter]) -> None:
        self._counters = counters
        self._ended: dict[Role, float] = {}
        self._living: dict[tuple[Role, int], float] = {}

    def update(self, used: dict[tuple[Role, int], float]) -> None:
        """Take the CPU seconds of each living process, by role and pid."""
        living = dict.fromkeys(self._counters, 0.0)
        for (role, _pid), seconds in used.items():
            living[role] += seconds
        for role, counter in self._counters.items():
            if role not in self._ended:  # first look: whatever the former controller saw is counted already
                self._ended[role] = max(0.0, counter.total - living[role])
            gone = (s for key, s in self._living.items() if key[0] is role and key not in used)
            self._ended[role] += sum(gone)
            counter.raise_to(self._ended[role] + living[role])
        self._living = dict(used)


class MetricsRoutes:
    """Answers the requests on the metrics port.

    ``facts``: what the health routes answer from. ``body_memory_bytes``: the bound of the node.
    """

    def __init__(
        self,
        table: MetricTable,
        board: ProcessBoard,
        ledger: CpuLedger,
        facts: Callable[[], HealthFacts],
        upstreams: UpstreamMetrics,
        body_memory_bytes: int,
        pool: PoolWatch,
        engines: Callable[[], dict[tuple[str, ...], float]],
        routing: Callable[[], Values],
    ) -> None:
        self._table = table
        self._engines = engines
        self._routing = routing
        self._board = board
        self._ledger = ledger
        self._facts = facts
        self._upstreams = upstreams
        self._body_memory_bytes = body_memory_bytes
        self._pool = pool
        self._start_time_s = time.time() - (time.monotonic_ns() - board.started_ns) / 1e9

    async def handle(self, request: Request) -> Response:
        route = HEALTH_ROUTES.get(request.path)
        if route is None and request.path != "/metrics":
            return error_answer(request, "not_found", "There is no such path.")
        if request.method not in ("GET", "HEAD"):
            return error_answer(request, "method_not_allowed", "This path answers GET and HEAD.", "GET, HEAD")
        if route is None:
            return Response(200, self.metrics(), CONTENT_TYPE)
        status, body = health_answer(route, self._facts())
        headers = (("cache-control", "no-store"), ("x-request-id", request_id(request)))
        return Response(status, body, headers=headers)

    def metrics(self) -> bytes:
        """Render everything; some 20 ms for a dozen processes, without waiting for any of them."""
        values = process_values(self._board, self._ledger)
        values |= self._upstreams.values()
        values |= self._routing()
        values["mesh_tokenizer_info"] = self._engines()
        values["mesh_build_info"] = {(__version__,): 1}
        values["mesh_start_time_seconds"] = {(): self._start_time_s}
        values["mesh_body_memory_limit_bytes"] = {(): self._body_memory_bytes}
        values["mesh_prepare_execution_reserved"] = {(): self._pool.reserved_workers()}
        values["mesh_ready"] = {(): float(unreadiness(self._facts()) is None)}
        totals = self._table.sum_rows(live_rows(self._board))
        self._upstreams.hide_departed(totals)
        totals.series["mesh_prepare_errors_total"][("prepare_cancelled",)][0] += self._pool.lost_jobs()
        return render(self._table.catalog, totals, values)


def live_rows(board: ProcessBoard) -> set[int]:
    """Return the metric rows whose owner lives; row numbers are board seats."""
    return {row.seat for row in board.rows() if row.is_alive}


def process_values(board: ProcessBoard, ledger: CpuLedger) -> Values:
    """Read the board and the kernel; a process that ends meanwhile is left out."""
    counts, restarts, memory, fds = (dict.fromkeys(KINDS, 0) for _ in range(4))
    used: dict[tuple[Role, int], float] = {}
    ready = busy = 0
    for row in board.rows():
        role = row.role
        if role is None or role not in counts:
            continue
        restarts[role] += row.restarts
        pid = row.pid
        if not row.is_alive or not pid:
            continue
        counts[role] += 1
        if role is Role.PREPARE:
            ready += row.state in (State.READY, State.DRAINING)
            busy += row.busy > 0
        try:
            process = psutil.Process(pid)
            with process.oneshot():
                times = process.cpu_times()
                memory[role] += process.memory_info().rss
                fds[role] += process.num_fds()
        except psutil.Error:
            continue
        used[role, pid] = times.user + times.system
    ledger.update(used)
    return {
        "mesh_processes": _by_kind(counts),
        "mesh_process_restarts_total": _by_kind(restarts),
        "mesh_process_resident_memory_bytes": _by_kind(memory),
        "mesh_process_open_fds": _by_kind(fds),
        "mesh_prepare_live_workers": {(): ready},
        "mesh_prepare_busy_workers": {(): busy},
    }


def _by_kind(values: dict[Role, int]) -> dict[tuple[str, ...], float]:
    return {(str(role),): value for role, value in values.items()}
