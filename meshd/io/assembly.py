"""Builds what the exchanges of one I/O process share: shared memory, director, pool, routes, each once.

`process.py` calls these in the order of the layers and owns what they return; nothing here has a life.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from meshd import __version__
from meshd.admission.gate import Gate, GateLimits
from meshd.api.endpoints import EndpointRegistry
from meshd.config import Settings
from meshd.control import Manifest, ProcessBoard, Topology
from meshd.director import Director
from meshd.io.account import Ledger
from meshd.io.cors import Cors
from meshd.io.headers import HttpDate, RequestIds
from meshd.io.measure import IoMetrics, PrepareCounters
from meshd.io.pool import Address, UpstreamPool
from meshd.io.route_headers import RouteHeaders
from meshd.io.routes import Routes
from meshd.io.services import Services
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
from meshd.tls import TlsContext, client_context


def open_slab(manifest: Manifest) -> BodySlab:
    segment = Segment.attach(manifest.fds[f"slab{manifest.index}"], SLAB_KIND)
    return BodySlab(segment, manifest.topology.view_bytes)


def open_prepare(
    manifest: Manifest, settings: Settings, board: ProcessBoard, slab: BodySlab
) -> tuple[PrepareClient, IoMetrics]:
    """Return the client of the preparation pool, and the metrics of this process, whose row it counts in.

    ``slab`` must not have handed out a slot yet.
    """
    topology, fds = manifest.topology, manifest.fds
    catalog = build_catalog(settings.prometheus_duration_buckets)
    metrics = Segment.attach(fds["metrics"], "metrics")
    cells = MetricRow(metrics, manifest.seat, catalog)
    client = PrepareClient(
        topology,
        manifest.index,
        Segment.attach(fds["rings"], RINGS_KIND, RINGS_VERSION),
        board,
        slab,
        [fds[f"bell_prepare{seat}"] for seat in range(topology.prepare_seats)],
        PrepareCounters(cells),
        settings,
        time.monotonic_ns,
        JobBalance(metrics, catalog).open_jobs(manifest.seat),
    )
    return client, IoMetrics(cells)


def open_conditions(manifest: Manifest) -> Conditions:
    topology = manifest.topology
    return Conditions(
        Segment.attach(manifest.fds["conditions"], "conditions"),
        manifest.index,
        topology.io_seats,
        topology.max_upstreams,
        owner=os.getpid(),
    )


def open_prefix_index(manifest: Manifest) -> PrefixIndex:
    topology = manifest.topology
    return PrefixIndex(
        Segment.attach(manifest.fds["prefix_index"], "prefix_index"),
        manifest.index,
        topology.io_seats,
        topology.prefix_index_bytes,
    )


def open_placer(
    manifest: Manifest, settings: Settings, index: PrefixIndex, conditions: Conditions, metrics: IoMetrics
) -> Placer:
    topology, fds = manifest.topology, manifest.fds
    return Placer(
        RegistryBoard(Segment.attach(fds["registry"], "registry")),
        LoadTable(
            Segment.attach(fds["load"], "load"), manifest.index, topology.io_seats, topology.max_upstreams
        ),
        policy_table(
            PolicyParts(
                random.Random(),
                manifest.index,
                index,
                SessionTable(Segment.attach(fds["sessions"], "sessions")),
                settings.prefix_hash_load_factor,
                settings.cache_threshold,
                settings.balance_abs_threshold,
                settings.balance_rel_threshold,
            )
        ),
        settings.policy,
        metrics,
        conditions=conditions,
    )


def open_director(
    loop: asyncio.AbstractEventLoop,
    manifest: Manifest,
    settings: Settings,
    board: ProcessBoard,
    slab: BodySlab,
    prepare: PrepareClient,
    placer: Placer,
    conditions: Conditions,
) -> Director:
    """Return the director. This process must have its seat on the board: the gate strikes dead owners."""
    topology, fds = manifest.topology, manifest.fds
    queue_timeout_ns = int(settings.queue_timeout_secs * 1e9)
    return Director(
        loop,
        _open_gate(manifest, settings, queue_timeout_ns),
        slab,
        prepare,
        placer,
        board,
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


def _open_gate(manifest: Manifest, settings: Settings, queue_timeout_ns: int) -> Gate:
    topology, fds = manifest.topology, manifest.fds
    bells = [fds[f"bell_io{seat}"] for seat in range(topology.io_seats)]
    return Gate(
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


def upstream_tls(settings: Settings) -> TlsContext:
    """Return what connections to upstreams are encrypted with; nothing is read before it is needed."""
    return TlsContext(
        lambda: client_context(settings.ca_cert_paths, settings.client_cert_path, settings.client_key_path)
    )


def open_pool(
    loop: asyncio.AbstractEventLoop, settings: Settings, tls: TlsContext, metrics: IoMetrics
) -> UpstreamPool:
    return UpstreamPool(
        loop,
        tls=tls.get,
        idle_timeout_s=settings.upstream_keepalive_timeout_secs,
        connect_timeout_s=settings.upstream_connect_timeout_secs,
        on_count=metrics.upstream_connections.add,
    )


def open_services(
    loop: asyncio.AbstractEventLoop,
    manifest: Manifest,
    settings: Settings,
    log: Log,
    board: ProcessBoard,
    metrics: IoMetrics,
    director: Director,
    placer: Placer,
    pool: UpstreamPool,
    tracing: Tracing | None,
    clock: Callable[[], float],
) -> Services:
    topology = manifest.topology
    return Services(
        loop=loop,
        settings=settings,
        log=log,
        metrics=metrics,
        director=director,
        pool=pool,
        routes=Routes(
            director.health_facts,
            lambda: placer.registry,
            partial(server_info, settings, topology, board),
            settings.open_admin,
        ),
        endpoints=EndpointRegistry(settings.passthrough_paths),
        cors=Cors(settings.cors_allowed_origins) if settings.cors_allowed_origins else None,
        request_ids=RequestIds(settings.request_id_headers),
        date=HttpDate(time.time),
        controller=Address("controller", unix_path=topology.controller_socket),
        max_body_bytes=min(settings.max_payload_size, topology.body_memory_bytes),
        request_timeout_s=settings.request_timeout_secs,
        first_byte_timeout_s=settings.first_byte_timeout_secs,
        io_process=manifest.index,
        clock=clock,
        ledger=Ledger(metrics, log, manifest.index, tracing),
        tracing=tracing,
        route_headers=RouteHeaders(settings) if settings.route_headers else None,
    )


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
