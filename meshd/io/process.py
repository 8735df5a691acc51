"""The I/O process: `python -m meshd.io.process`, started by the supervisor.

Builds every object once, hands each what it needs, runs one uvloop, and ends when the supervisor says so
or is gone. It never imports a tokenizer or a template engine, and never parses a request body.
"""

from __future__ import annotations

import asyncio
import gc
import os
import random
import resource
import sys
import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import uvloop

from meshd import __version__
from meshd.admission.gate import Gate, GateLimits
from meshd.api.endpoints import EndpointRegistry
from meshd.config import Settings
from meshd.control import BoardRow, ChildLink, Manifest, ProcessBoard, Topology, start_child
from meshd.director import Director
from meshd.errors import StartupError
from meshd.io.account import Ledger
from meshd.io.cors import Cors
from meshd.io.departure import Departure
from meshd.io.downstream import DownstreamConnection
from meshd.io.headers import HttpDate, RequestIds
from meshd.io.listener import Listener
from meshd.io.measure import IoMetrics, PrepareCounters
from meshd.io.pool import Address, UpstreamPool
from meshd.io.registry_watch import RegistryWatch
from meshd.io.route_headers import RouteHeaders
from meshd.io.routes import Routes
from meshd.io.server import Server
from meshd.io.services import Services
from meshd.io.tls_downstream import TlsDownstreamConnection
from meshd.io.tls_greeter import TlsGreeter
from meshd.io.tls_transport import map_buffers_singly
from meshd.io.tracing import Tracing
from meshd.log import Log
from meshd.memory import Segment
from meshd.metrics.catalog import build_catalog
from meshd.metrics.cells import MetricRow
from meshd.metrics.job_balance import JobBalance
from meshd.prepare.client import PrepareClient
from meshd.prepare.layout import RINGS_KIND, RINGS_VERSION
from meshd.prepare.tokenizer_board import TokenizerBoard
from meshd.routing.conditions import Conditions
from meshd.routing.load import LoadTable
from meshd.routing.placement import Placer
from meshd.routing.policies.table import PolicyParts, policy_table
from meshd.routing.prefix_index import PrefixIndex
from meshd.routing.registry import RegistryBoard
from meshd.routing.retry_budget import RetryBudget
from meshd.routing.retry_rules import RetryRules
from meshd.routing.sessions import SessionTable
from meshd.slab import SLAB_KIND, BodySlab
from meshd.tls import TlsContext, client_context, server_context

if TYPE_CHECKING:
    from meshd.io.span_export import SpanExporter

GC_ALLOCATIONS: Final = 50_000
SEAT_SECS: Final = 10.0
TIMER_SECS: Final = 0.1  # how often timers are looked at
AGES_SECS: Final = 1.0  # how often the ages of running requests are counted
PREPARE_CHECK_SECS: Final = 0.05  # backstop of the prepare rings


class IoProcess:
    """All objects of one I/O process, and its life."""

    def __init__(self, manifest: Manifest, loop: asyncio.AbstractEventLoop) -> None:
        settings = Settings.from_dict(manifest.settings)
        topology, fds = manifest.topology, manifest.fds
        self._loop = loop
        self._manifest = manifest
        self.log = Log(f"io{manifest.index}", settings.log_level, settings.json_log, log_dir=settings.log_dir)
        self.board = ProcessBoard.attach(fds["board"])
        self.row = self.board.row(manifest.seat)
        self.link = ChildLink.open(manifest, self.board)
        catalog = build_catalog(settings.prometheus_duration_buckets)
        metrics = Segment.attach(fds["metrics"], "metrics")
        cells = MetricRow(metrics, manifest.seat, catalog)
        self.metrics = IoMetrics(cells)
        self._slab = slab = BodySlab(
            Segment.attach(fds[f"slab{manifest.index}"], SLAB_KIND), topology.view_bytes
        )
        self.prepare = PrepareClient(
            topology,
            manifest.index,
            Segment.attach(fds["rings"], RINGS_KIND, RINGS_VERSION),
            self.board,
            slab,
            [fds[f"bell_prepare{seat}"] for seat in range(topology.prepare_seats)],
            PrepareCounters(cells),
            settings,
            time.monotonic_ns,
            JobBalance(metrics, catalog).open_jobs(manifest.seat),
        )
        self._bell = fds[f"bell_io{manifest.index}"]
        registry = RegistryBoard(Segment.attach(fds["registry"], "registry"))
        loads = LoadTable(
            Segment.attach(fds["load"], "load"), manifest.index, topology.io_seats, topology.max_upstreams
        )
        conditions = Conditions(
            Segment.attach(fds["conditions"], "conditions"),
            manifest.index,
            topology.io_seats,
            topology.max_upstreams,
            owner=os.getpid(),
        )
        self._index = PrefixIndex(
            Segment.attach(fds["prefix_index"], "prefix_index"),
            manifest.index,
            topology.io_seats,
            topology.prefix_index_bytes,
        )
        placer = Placer(
            registry,
            loads,
            policy_table(
                PolicyParts(
                    random.Random(),
                    manifest.index,
                    self._index,
                    SessionTable(Segment.attach(fds["sessions"], "sessions")),
                    settings.prefix_hash_load_factor,
                    settings.cache_threshold,
                    settings.balance_abs_threshold,
                    settings.balance_rel_threshold,
                )
            ),
            settings.policy,
            self.metrics,
            conditions=conditions,
        )
        _await_seat(self.row)
        queue_timeout_ns = int(settings.queue_timeout_secs * 1e9)
        bells = [fds[f"bell_io{seat}"] for seat in range(topology.io_seats)]
        gate = Gate(
            Segment.attach(fds["gate"], "gate"),
            manifest.index,
            topology.io_seats,
            os.getpid(),
            GateLimits(
                max_concurrent=settings.max_concurrent_requests,
                queue_size=settings.queue_size,
                queue_timeout_ns=queue_timeout_ns,
                body_memory_bytes=topology.body_memory_bytes,
            ),
            time.monotonic_ns,
            wake=lambda row: os.eventfd_write(bells[row], 1),
        )
        self._upstream_tls = TlsContext(
            lambda: client_context(
                settings.ca_cert_paths, settings.client_cert_path, settings.client_key_path
            )
        )
        self.pool = UpstreamPool(
            loop,
            tls=self._upstream_tls.get,
            idle_timeout_s=settings.upstream_keepalive_timeout_secs,
            connect_timeout_s=settings.upstream_connect_timeout_secs,
            on_count=self.metrics.upstream_connections.add,
        )
        director = Director(
            loop,
            gate,
            slab,
            self.prepare,
            placer,
            self.board,
            topology,
            queue_timeout_ns,
            has_tokenizer=TokenizerBoard.attach(fds["tokenizers"]).has_tokenizer,
            conditions=conditions,
            budget=RetryBudget(
                Segment.attach(fds["retries"], "retries"),
                manifest.index,
                topology.io_seats,
                settings.retry_budget_ratio,
                settings.retry_budget_min,
            ),
            retry_rules=RetryRules(
                1 if settings.disable_retries else settings.retry_max_retries,
                settings.retry_initial_backoff_ms / 1e3,
                settings.retry_max_backoff_ms / 1e3,
                settings.retry_backoff_multiplier,
                settings.retry_jitter_factor,
                settings.retry_on_500,
            ),
        )
        self._spans: SpanExporter | None = None
        tracing: Tracing | None = None
        if settings.enable_trace:
            self._spans = open_spans(settings.otlp_traces_endpoint, f"io{manifest.index}.{os.getpid()}")
            tracing = Tracing(self._spans, time.monotonic, is_tls=bool(settings.tls_cert_path))
        self._span_drops = 0
        self._span_trouble = ""
        self.services = Services(
            loop=loop,
            settings=settings,
            log=self.log,
            metrics=self.metrics,
            director=director,
            pool=self.pool,
            routes=Routes(
                director.health_facts,
                lambda: placer.registry,
                partial(server_info, settings, topology, self.board),
                settings.open_admin,
            ),
            endpoints=EndpointRegistry(settings.passthrough_paths),
            cors=Cors(settings.cors_allowed_origins) if settings.cors_allowed_origins else None,
            request_ids=RequestIds(settings.request_id_headers),
            date=HttpDate(time.time),
            controller=Address("controller", unix_path=topology.controller_socket),
            max_body_bytes=min(settings.max_payload_size, topology.body_memory_bytes),
            io_process=manifest.index,
            # uvloop's own clock stands still within a turn and counts whole milliseconds
            clock=time.monotonic,
            ledger=Ledger(self.metrics, self.log, manifest.index, tracing),
            tracing=tracing,
            route_headers=RouteHeaders(settings) if settings.route_headers else None,
        )
        self._registry_watch = RegistryWatch(
            lambda: placer.registry, self.pool.close_idle, lambda: self.services.exchanges
        )
        limit = _raise_descriptor_limit()
        cap = connection_cap(limit)
        self.server = Server(self.services, cap)
        self._most_accepted = cap + max(1, limit - _open_descriptors() - 2 * cap)
        self._handshakes = 0
        self._tls: TlsContext | None = None
        if settings.tls_cert_path:
            self._tls = TlsContext(lambda: server_context(settings.tls_cert_path, settings.tls_key_path))
            self._tls.get()
            map_buffers_singly()
        self._listener = Listener(
            loop,
            fds["listen"],
            self._accept,
            has_room=self._has_room,
            descriptor_limit=limit,
            on_pause=lambda: self.log.warning("accepting_paused", connections=self.server.connection_count),
            on_error=self.metrics.accept_errors.inc,
        )
        self._departure = Departure(
            loop, self.row, self._listener, self.server, self.services, self.prepare,
            lambda: self._handshakes, lambda: self._end(0),
        )  # fmt: skip
        self._ended: asyncio.Future[int] = loop.create_future()
        self._log_drops = 0
        self._evictions = 0
        self._due = time.monotonic()
        self._ages_due = 0.0

    async def run(self) -> int:
        """Serve until told to end; return the exit code."""
        loop = self._loop
        loop.add_reader(self._bell, self._bell_rang)
        loop.add_reader(self.link.fileno(), self._link_spoke)
        await self._listener.open()
        self._tick()
        self._check_prepare()
        self.link.ready()
        return await self._ended

    # ------------------------------------------------------------------------------------ connections

    def _accept(self) -> asyncio.BaseProtocol:
        if self._tls is None:
            return DownstreamConnection(self.server)
        self._handshakes += 1
        return TlsGreeter(
            self._loop, self._tls.get(), self._connection, self.server.header_timeout_s, self._handshake_ended
        )

    def _connection(self) -> asyncio.BaseProtocol:
        return TlsDownstreamConnection(self.server)

    def _handshake_ended(self, failure: str) -> None:
        self._handshakes -= 1
        if failure:
            self.log.debug("tls_handshake_failed", reason=failure)

    def _has_room(self) -> bool:
        """Bound who is turned away or shakes hands too, so that each running request finds a descriptor."""
        return self.server.connection_count + self._handshakes < self._most_accepted

    def _reload_tls(self) -> None:
        for side, tls in (("traffic", self._tls), ("upstreams", self._upstream_tls)):
            try:
                if tls is not None and tls.reload():
                    self.log.info("certificates_read", side=side)
            except StartupError as error:
                self.log.error("certificates_refused", side=side, message=f"{error}; the old ones stay")

    # -------------------------------------------------------------------------------------- callbacks

    def _bell_rang(self) -> None:
        try:
            os.eventfd_read(self._bell)  # before draining: the other order loses wake-ups
        except BlockingIOError:
            return
        self.prepare.drain_completions()
        self.services.director.poll()
        self._registry_watch.check()

    def _check_prepare(self) -> None:
        self.prepare.check(time.monotonic_ns())
        self.services.director.poll()
        self._registry_watch.check()
        self._loop.call_later(PREPARE_CHECK_SECS, self._check_prepare)

    def _tick(self) -> None:
        now = time.monotonic()
        self.metrics.loop_lag.observe(max(0.0, now - self._due))
        self._due = now + TIMER_SECS
        self.row.beat()
        is_leaving = self._departure.has_begun or bool(self.board.is_draining)
        self.services.is_draining = self.server.is_draining = is_leaving
        self.server.check_timers(now)
        self._listener.check()
        self._set_gauges(now)
        self.pool.sweep()
        self.services.ledger.settle()
        if self._index.evictions != self._evictions:
            self.metrics.index_evictions.inc(self._index.evictions - self._evictions)
            self._evictions = self._index.evictions
        self.metrics.flush()
        if self._spans is not None:
            self._watch_spans(self._spans)
        if self.log.waiting:
            self.log.flush()
        if self.log.dropped > self._log_drops:
            self.metrics.log_drops.inc(self.log.dropped - self._log_drops)
            self._log_drops = self.log.dropped
        self._loop.call_later(TIMER_SECS, self._tick)

    def _set_gauges(self, now: float) -> None:
        director, metrics = self.services.director, self.metrics
        metrics.tickets_held.set(director.held_tickets)
        metrics.requests_waiting.set(director.waiting_requests)
        metrics.body_reserved.set(director.reserved_bytes)
        if now >= self._ages_due:
            self._ages_due = now + AGES_SECS
            exchanges = self.services.exchanges
            metrics.requests_in_flight([now - exchange.record.started_at for exchange in exchanges])

    def _watch_spans(self, spans: SpanExporter) -> None:
        if spans.dropped > self._span_drops:
            self.metrics.trace_drops.inc(spans.dropped - self._span_drops)
            self._span_drops = spans.dropped
        if bool(spans.trouble) != bool(self._span_trouble):
            if spans.trouble:
                self.log.warning("spans_not_taken", cause=spans.trouble)
            else:
                self.log.info("spans_taken_again")
            self._span_trouble = spans.trouble

    def _link_spoke(self) -> None:
        for message in self.link.recv():
            kind = message.get("t")
            if kind == "drain":
                self._departure.drain(float(message.get("grace_s", 0.0)))
            elif kind == "retire":
                self._departure.retire(float(message.get("grace_s", 0.0)))
            elif kind == "linger":
                self.services.is_draining = self.server.is_draining = True
            elif kind == "quit":
                self._departure.cut()
            elif kind == "reopen_logs":
                self.log.reopen()
                self._reload_tls()
        if self.link.is_closed:
            self._end(1)

    def close_spans(self) -> None:
        if self._spans is not None:
            self._spans.close()

    def _end(self, code: int) -> None:
        self.services.ledger.settle()
        self._slab.trim()  # the next owner of this seat may be long in coming
        self.metrics.flush()
        self.log.flush(10_000)
        if not self._ended.done():
            self._ended.set_result(code)


def open_spans(endpoint: str, process: str) -> SpanExporter:
    """Start to export spans. Imported here: OpenTelemetry is an extra, and 40 MiB of memory."""
    from meshd.io.span_export import open_exporter

    spans = open_exporter(endpoint, process)
    spans.start()
    return spans


def server_info(settings: Settings, topology: Topology, board: ProcessBoard) -> dict[str, Any]:
    """Return what ``/get_server_info`` tells besides the number of upstreams."""
    return {
        "version": __version__,
        "uptime_secs": round((time.monotonic_ns() - board.started_ns) / 1e9, 3),
        "policy": settings.policy,
        "topology": "regular",
        "io_processes": topology.io_processes,
        "prepare_workers": topology.prepare_workers,
        "prepare_groups": len(topology.groups),
    }


def _raise_descriptor_limit() -> int:
    """Raise the soft limit of descriptors to the hard one; return it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard if hard != resource.RLIM_INFINITY else 1 << 20


def _open_descriptors() -> int:
    """The lowest free descriptor, which is about how many are in use at start."""
    lowest = os.dup(0)
    os.close(lowest)
    return lowest


def connection_cap(descriptor_limit: int) -> int:
    """Clients may have 40 % of the descriptors (http.md §2)."""
    return max(16, int(descriptor_limit * 0.4))


def _await_seat(row: BoardRow) -> None:
    """Wait until the supervisor has entered this process on the board.

    Until then the controller would take what stands in this seat's row for a dead process's, and strike it.
    """
    deadline = time.monotonic() + SEAT_SECS
    while row.pid != os.getpid():
        if time.monotonic() > deadline:
            raise StartupError("the supervisor did not enter this process on the board")
        time.sleep(0.001)


def main(argv: Sequence[str]) -> int:
    manifest = start_child(argv)
    loop = uvloop.new_event_loop()
    asyncio.set_event_loop(loop)
    process = IoProcess(manifest, loop)
    gc.collect()
    gc.freeze()  # nothing made so far is ever garbage: keep it out of every later collection
    gc.set_threshold(GC_ALLOCATIONS, 20, 100)  # a request makes 60 objects and no cycle that matters
    try:
        if manifest.takes_over and not process.link.wait_to_take_over():
            return 0
        return loop.run_until_complete(process.run())
    finally:
        process.pool.close_all()
        process.close_spans()
        process.log.close()


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except StartupError as error:
        sys.stderr.write(f"meshd io: {error}\n")
        sys.exit(error.exit_code)
