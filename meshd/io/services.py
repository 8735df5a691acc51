"""What every exchange of one I/O process works with; built once, in `assembly.py`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from meshd.api.endpoints import EndpointRegistry
from meshd.config import Settings
from meshd.director import Director
from meshd.io.account import Ledger
from meshd.io.cors import Cors
from meshd.io.exchange import Exchange
from meshd.io.headers import HttpDate, RequestIds
from meshd.io.measure import IoMetrics
from meshd.io.pool import Address, UpstreamPool
from meshd.io.route_headers import RouteHeaders
from meshd.io.routes import Routes
from meshd.io.tracing import Tracing
from meshd.log import Log


@dataclass(slots=True)
class Services:
    """The long-lived objects of one I/O process; ``controller`` is where admin routes are relayed."""

    loop: asyncio.AbstractEventLoop
    settings: Settings
    log: Log
    metrics: IoMetrics
    director: Director
    pool: UpstreamPool
    routes: Routes
    endpoints: EndpointRegistry
    cors: Cors | None  # None: no origin is listed
    request_ids: RequestIds
    date: HttpDate
    controller: Address
    max_body_bytes: int
    request_timeout_s: float  # of the settings, at hand for each request
    first_byte_timeout_s: float
    io_process: int
    clock: Callable[[], float]
    ledger: Ledger
    tracing: Tracing | None = None  # None: no spans are made
    route_headers: RouteHeaders | None = None  # None: nothing is told of placements
    exchanges: set[Exchange] = field(default_factory=set)
    is_draining: bool = False
