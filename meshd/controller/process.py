"""The controller process: it owns what must exist once, and no traffic waits for it.

Registry and health of upstreams, the metrics port, admin answers, and the sweep after dead processes. If
it dies, traffic goes on with the last published registry, and the next controller starts from there.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
import time
from collections.abc import Sequence
from functools import partial
from typing import Final

from meshd.admission.cells import Cells
from meshd.api.health import HealthFacts
from meshd.config.cluster import find_cluster
from meshd.config.settings import Settings
from meshd.control import ChildLink, Manifest, ProcessBoard, start_child
from meshd.controller.admin import AdminRoutes
from meshd.controller.answers import refuse
from meshd.controller.breakers import BreakerKeeper, TransitionTeller
from meshd.controller.discovery.tasks import Discovery
from meshd.controller.http_client import UpstreamClient, give_lookups_threads
from meshd.controller.http_server import HttpServer
from meshd.controller.pool_watch import PoolWatch
from meshd.controller.prober import ProbeCounters
from meshd.controller.routing_memory import RoutingMemory
from meshd.controller.scrape import KINDS, CpuLedger, MetricsRoutes
from meshd.controller.sweeper import SWEEP_INTERVAL_S, Sweeper
from meshd.controller.tokenizer_control import TokenizerControl
from meshd.controller.upstreams import UpstreamControl
from meshd.errors import StartupError
from meshd.log import Log
from meshd.memory import Segment
from meshd.metrics.catalog import build_catalog
from meshd.metrics.cells import MetricRow
from meshd.metrics.job_balance import JobBalance
from meshd.metrics.table import MetricTable
from meshd.prepare.layout import RINGS_KIND, RINGS_VERSION
from meshd.prepare.tokenizer_board import TokenizerBoard
from meshd.routing import conditions
from meshd.routing.breaker import BreakerRules
from meshd.routing.conditions import Conditions
from meshd.routing.load import LoadTable
from meshd.routing.prefix_index import PrefixIndex
from meshd.routing.readiness import node_facts
from meshd.routing.registry import RegistryBoard
from meshd.routing.sessions import SessionLedger
from meshd.tls import TlsContext, client_context

HAND_OVER_S: Final = 5.0  # longest wait for running requests; the supervisor waits 8 s


class Controller:
    """Builds every part from the manifest; ``run`` serves until told to stop."""

    def __init__(self, manifest: Manifest, settings: Settings, log: Log) -> None:
        self._manifest = manifest
        self._settings = settings
        self._log = log
        self._topology = manifest.topology
        fds = manifest.fds
        self._board = ProcessBoard.attach(fds["board"])
        self._link = ChildLink.open(manifest, self._board)
        self._registry = RegistryBoard(Segment.attach(fds["registry"], "registry"))
        self._tokenizers = TokenizerBoard.attach(fds["tokenizers"])
        loads = Segment.attach(fds["load"], "load")
        self._loads = LoadTable(loads, None, self._topology.io_seats, self._topology.max_upstreams)
        self._conditions = Conditions(
            Segment.attach(fds["conditions"], conditions.SEGMENT_KIND),
            None,
            self._topology.io_seats,
            self._topology.max_upstreams,
        )
        catalog = build_catalog(settings.prometheus_duration_buckets)
        cells = Segment.attach(fds["metrics"], "metrics")
        rings = Segment.attach(fds["rings"], RINGS_KIND, RINGS_VERSION)
        self._pool = PoolWatch(self._topology, self._board, rings, JobBalance(cells, catalog))
        self._table = MetricTable(cells, self._topology.metric_rows, catalog)
        self._row = MetricRow(cells, manifest.seat, catalog)
        self._drops = self._row.counter("mesh_internal_drops_total", queue="log")
        self._upstream_tls = TlsContext(
            lambda: client_context(
                settings.ca_cert_paths, settings.client_cert_path, settings.client_key_path
            )
        )
        self._breakers = BreakerKeeper(
            self._conditions.cells,
            self._registry,
            self._board,
            self._topology,
            BreakerRules(
                settings.cb_failure_threshold,
                settings.cb_success_threshold,
                settings.cb_timeout_duration_secs,
                settings.cb_window_duration_secs,
                settings.disable_circuit_breaker,
            ),
            TransitionTeller(self._row, log),
        )
        admission = Cells(Segment.attach(fds["gate"], "gate"), None, self._topology.io_seats)
        self._sweeper = Sweeper(self._board, self._topology, self._loads, admission, self._pool, log)

        self._http: list[HttpServer] = []
        self._is_handing_over = False

    async def run(self) -> None:
        """Start, say ready, and work until the supervisor says drain or quit, or is gone."""
        loop = asyncio.get_running_loop()
        give_lookups_threads(loop)
        stopped = asyncio.Event()
        memory = self._routing_memory()
        memory.start()
        upstreams = self._upstream_control(loop, memory)
        upstreams.start()
        tokenizers = TokenizerControl(
            self._tokenizers,
            self._board,
            self._topology,
            self._settings,
            self._log,
            lambda: upstreams.keeper.upstreams,
        )
        tokenizers.start()
        self._sweeper.sweep()
        servers = await self._listen(upstreams, tokenizers, memory)
        loop.add_reader(self._link.fileno(), self._on_message, stopped)
        self._link.ready()
        discovery = Discovery(
            self._settings, find_cluster(os.environ), upstreams.sources, self._row, self._log
        )
        async with asyncio.TaskGroup() as tasks:
            background = [
                tasks.create_task(upstreams.run()),
                tasks.create_task(discovery.run()),
                tasks.create_task(self._breakers.run()),
                tasks.create_task(memory.run()),
                tasks.create_task(self._beat(upstreams, tokenizers)),
            ]
            await stopped.wait()
            for server in servers:
                server.close()
            if self._is_handing_over:
                await self._end_requests()
            upstreams.close()
            for task in background:
                task.cancel()

    async def _end_requests(self) -> None:
        """Answer what was asked; what comes later waits in the listen queue for the successor."""
        for server in self._http:
            server.is_closing = True
        deadline = time.monotonic() + HAND_OVER_S
        while any(server.busy for server in self._http) and time.monotonic() < deadline:
            await asyncio.sleep(0.01)

    async def _listen(
        self, upstreams: UpstreamControl, tokenizers: TokenizerControl, memory: RoutingMemory
    ) -> list[asyncio.Server]:
        counters = {
            role: self._row.float_counter("mesh_process_cpu_seconds_total", kind=role) for role in KINDS
        }
        metrics = MetricsRoutes(
            self._table,
            self._board,
            CpuLedger(counters),
            self._facts,
            upstreams.metrics(self._table),
            self._topology.body_memory_bytes,
            self._pool,
            tokenizers.engines,
            memory.values,
        )
        admin = AdminRoutes([*upstreams.routes(), *tokenizers.routes(), *memory.routes()], self._log)
        handlers = (("metrics_listen", metrics.handle), ("controller_listen", admin.handle))
        self._http = [HttpServer(handler, refuse, self._log, admits=self._admits) for _, handler in handlers]
        return [
            await server.listen(socket.socket(fileno=self._manifest.fds[name]))
            for server, (name, _) in zip(self._http, handlers, strict=True)
        ]

    def _routing_memory(self) -> RoutingMemory:
        fds, topology = self._manifest.fds, self._topology
        index = PrefixIndex(
            Segment.attach(fds["prefix_index"], "prefix_index"),
            topology.io_seats,
            topology.io_seats,
            topology.prefix_index_bytes,
        )
        return RoutingMemory(
            index,
            SessionLedger(Segment.attach(fds["sessions"], "sessions")),
            lambda: [upstream.number for upstream in self._registry.read().upstreams],
            self._loads.load,
            self._settings.eviction_interval_secs,
        )

    def _upstream_control(self, loop: asyncio.AbstractEventLoop, memory: RoutingMemory) -> UpstreamControl:
        checks = partial(self._row.counter, "mesh_worker_health_checks_total", worker_type="regular")
        return UpstreamControl(
            self._settings,
            self._registry,
            self._loads,
            self._conditions,
            UpstreamClient(self._upstream_tls.get),
            ProbeCounters(checks(result="success"), checks(result="failure")),
            self._log,
            schedule=loop.call_later,
            ring_bells=partial(ring_bells, self._manifest.fds),
            forget=memory.forget_cached,
            is_clean=memory.is_clean,
        )

    def _admits(self, pid: int, uid: int) -> bool:
        """Only this node's processes, and what the same user starts, may use the admin socket."""
        return uid == os.getuid() or any(row.is_alive and row.pid == pid for row in self._board.rows())

    def _facts(self) -> HealthFacts:
        settings = self._settings
        return node_facts(
            self._board,
            self._topology,
            self._registry.read(),
            self._conditions,
            self._settings.retry_max_backoff_ms / 1e3,
            needs_tokens=settings.policy == "prefix_hash",
            has_tokenizer=self._tokenizers.has_tokenizer(),
        )

    async def _beat(self, upstreams: UpstreamControl, tokenizers: TokenizerControl) -> None:
        """Heartbeat, sweep and log, some times a second."""
        row = self._board.row(self._manifest.seat)
        dropped = 0
        while True:
            row.beat()
            self._sweeper.sweep()
            upstreams.sweep()
            tokenizers.poll()
            self._log.flush()
            self._drops.inc(self._log.dropped - dropped)
            dropped = self._log.dropped
            await asyncio.sleep(SWEEP_INTERVAL_S)

    def _on_message(self, stopped: asyncio.Event) -> None:
        for message in self._link.recv():
            if message["t"] in ("drain", "quit", "hand_over"):
                self._is_handing_over = message["t"] == "hand_over"
                stopped.set()
            elif message["t"] == "reopen_logs":
                with contextlib.suppress(OSError):  # the old file stays open
                    self._log.reopen()
                self._reload_tls()
        if self._link.is_closed:
            stopped.set()

    def _reload_tls(self) -> None:
        try:
            if self._upstream_tls.reload():
                self._log.info("certificates_read", side="upstreams")
        except StartupError as error:
            self._log.error("certificates_refused", side="upstreams", message=f"{error}; the old ones stay")


def ring_bells(fds: dict[str, int]) -> None:
    """Wake every I/O process; a bell whose count is full rings already."""
    for name, fd in fds.items():
        if name.startswith("bell_io"):
            with contextlib.suppress(BlockingIOError):
                os.eventfd_write(fd, 1)


def main(argv: Sequence[str]) -> int:
    try:
        manifest = start_child(argv)
    except StartupError as exc:
        sys.stderr.write(f"meshd: {exc}\n")
        return exc.exit_code
    settings = Settings.from_dict(manifest.settings)
    log = Log("ctl", settings.log_level, settings.json_log, log_dir=settings.log_dir)
    try:
        if manifest.takes_over and not _wait_to_take_over(manifest, settings):
            return 0
        asyncio.run(Controller(manifest, settings, log).run())
    except StartupError as exc:
        log.error("start_failed", reason=str(exc))
        return exc.exit_code
    except Exception as fault:  # the main loop's edge: the supervisor starts another controller
        log.error("controller_failed", reason=_reason(fault))
        return 1
    finally:
        log.close()
    return 0


def _wait_to_take_over(manifest: Manifest, settings: Settings) -> bool:
    """Wait until the predecessor has stopped writing: nothing of ours may exist before. False: not wanted.

    Raises StartupError for what this process could not work with, while there still is another.
    """
    client_context(settings.ca_cert_paths, settings.client_cert_path, settings.client_key_path)
    row = ProcessBoard.attach(manifest.fds["board"]).row(manifest.seat)
    return ChildLink(os.dup(manifest.fds["link"]), row).wait_to_take_over()


def _reason(exc: BaseException) -> str:
    while isinstance(exc, BaseExceptionGroup):
        exc = exc.exceptions[0]
    return f"{type(exc).__name__}: {exc}"
