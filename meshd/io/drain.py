"""How an I/O process ends: running requests first, then the preparation pool, then whoever is left.

::

    0 ────────────── grace period ──────────────┤ 0.6 s │ 0.3 s │
      requests end, idle connections close      │       │       └ the process ends
      (at the latest now) the pool closes ──────┘       └ requests whose job still runs are cut
      jobs not started are answered, other requests cut

The supervisor kills an I/O process that lives 1 s past the grace period (supervisor/shutdown.py), so all of
this fits below that, and no stuck job, client or upstream can make the end wait any longer.
"""

from __future__ import annotations

import asyncio
import time
from typing import Final

from meshd.io.exchange import Exchange
from meshd.io.server import Server
from meshd.io.services import Services
from meshd.prepare.client import PrepareClient

JOB_OVERTIME_SECS: Final = 0.6
LAST_BYTES_SECS: Final = 0.3
_LOOK_SECS: Final = 0.02


async def drain(server: Server, services: Services, pool: PrepareClient, grace_s: float) -> None:
    """Return when nothing is left to serve; new requests must be refused already."""
    grace_end = time.monotonic() + grace_s
    while server.is_busy and time.monotonic() < grace_end:
        await asyncio.sleep(_LOOK_SECS)
        server.close_idle()
    pool.close()
    await asyncio.sleep(0)  # whoever was just told that the pool is closed answers it so
    for exchange in list(services.exchanges):
        if not _is_in_preparation(exchange):
            exchange.cut()
    overtime_end = time.monotonic() + JOB_OVERTIME_SECS
    while pool.has_jobs and time.monotonic() < overtime_end:
        await asyncio.sleep(_LOOK_SECS)
    for exchange in list(services.exchanges):
        exchange.cut()
    last_bytes_end = time.monotonic() + LAST_BYTES_SECS
    while server.is_open and time.monotonic() < last_bytes_end:
        await asyncio.sleep(_LOOK_SECS)
        server.close_idle()


def _is_in_preparation(exchange: Exchange) -> bool:
    record = exchange.record
    return record.body_at > 0 and not record.prepared_at
