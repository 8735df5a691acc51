"""The I/O process, started by the supervisor (meshd/birth.py).

Builds every object once, hands each what it needs, runs one uvloop, and ends when the supervisor says so
or is gone. It never imports a tokenizer or a template engine, and never parses a request body.
"""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import uvloop

from meshd.config import Settings
from meshd.control import BoardRow, ChildLink, Manifest, ProcessBoard, start_child
from meshd.errors import StartupError
from meshd.io.assembly import (
    open_conditions,
    open_director,
    open_placer,
    open_pool,
    open_prefix_index,
    open_prepare,
    open_services,
    open_slab,
    upstream_tls,
)
from meshd.io.departure import Departure
from meshd.io.downstream import DownstreamConnection
from meshd.io.gauges import Gauges
from meshd.io.listener import Listener
from meshd.io.registry_watch import RegistryWatch
from meshd.io.server import Server
from meshd.io.tls_downstream import TlsDownstreamConnection
from meshd.io.tls_greeter import TlsGreeter
from meshd.io.tls_transport import map_buffers_singly
from meshd.io.tracing import Tracing
from meshd.log import Log
from meshd.tls import TlsContext, server_context

if TYPE_CHECKING:
    from meshd.io.span_export import SpanExporter

GC_ALLOCATIONS: Final = 50_000
SEAT_SECS: Final = 10.0
LOOK_SECS: Final = 0.05  # backstop of the prepare rings and of everything that a lost wake-up delays
TICK_SECS: Final = 2 * LOOK_SECS  # how often timers are looked at


class IoProcess:
    """All objects of one I/O process, and its life."""

    def __init__(self, manifest: Manifest, loop: asyncio.AbstractEventLoop) -> None:
        settings = Settings.from_dict(manifest.settings)
        fds = manifest.fds
        self._loop = loop
        self._manifest = manifest
        self.log = Log(f"io{manifest.index}", settings.log_level, settings.json_log, log_dir=settings.log_dir)
        self.board = ProcessBoard.attach(fds["board"])
        self.row = self.board.row(manifest.seat)
        self.link = ChildLink.open(manifest, self.board)
        self._slab = open_slab(manifest)
        self.prepare, self.metrics = open_prepare(manifest, settings, self.board, self._slab)
        self._bell = fds[f"bell_io{manifest.index}"]
        conditions = open_conditions(manifest)
        index = open_prefix_index(manifest)
        placer = open_placer(manifest, settings, index, conditions, self.metrics)
        _await_seat(self.row)
        director = open_director(
            loop, manifest, settings, self.board, self._slab, self.prepare, placer, conditions
        )
        self._upstream_tls = upstream_tls(settings)
        self.pool = open_pool(loop, settings, self._upstream_tls, self.metrics)
        self._spans: SpanExporter | None = None
        tracing: Tracing | None = None
        if settings.enable_trace:
            self._spans = open_spans(settings.otlp_traces_endpoint, f"io{manifest.index}.{os.getpid()}")
            tracing = Tracing(self._spans, time.monotonic, is_tls=bool(settings.tls_cert_path))
        self.services = open_services(
            loop, manifest, settings, self.log, self.board, self.metrics, director, placer, self.pool,
            tracing, time.monotonic,  # uvloop's own clock stands still in a turn, and counts milliseconds
        )  # fmt: skip
        self._gauges = Gauges(self.services, index, self._spans)
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
        self._ticks_now = False
        self._due = time.monotonic()

    async def run(self) -> int:
        """Serve until told to end; return the exit code."""
        loop = self._loop
        loop.add_reader(self._bell, self._bell_rang)
        loop.add_reader(self.link.fileno(), self._link_spoke)
        await self._listener.open()
        self._look()
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
        if self.services.director.has_waiting:
            self.services.director.poll()

    def _look(self) -> None:
        """Do what is due after some time: one timer for all of it, since each wakes an idle process."""
        self.prepare.check(time.monotonic_ns())
        self.services.director.poll()
        self._registry_watch.check()
        self._ticks_now = not self._ticks_now
        if self._ticks_now:
            self._tick()
        self._loop.call_later(LOOK_SECS, self._look)

    def _tick(self) -> None:
        now = time.monotonic()
        self.metrics.loop_lag.observe(max(0.0, now - self._due))
        self._due = now + TICK_SECS
        self.row.beat()
        is_leaving = self._departure.has_begun or bool(self.board.is_draining)
        self.services.is_draining = self.server.is_draining = is_leaving
        self.server.check_timers(now)
        self._listener.check()
        self.pool.sweep()
        self.services.ledger.settle()
        if self.log.waiting:
            self.log.flush()
        self.metrics.flush()
        self._gauges.look(now)  # last: when they are 0, all that has ended is counted

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
    """Clients may have 40 % of the descriptors."""
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
    """Be the I/O process that the supervisor has started; returns the exit code."""
    try:
        return _serve(start_child(argv))
    except StartupError as error:
        sys.stderr.write(f"meshd io: {error}\n")
        return error.exit_code


def _serve(manifest: Manifest) -> int:
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
