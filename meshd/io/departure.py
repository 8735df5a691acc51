"""How an I/O process leaves.

*Drained*: the node ends. Whoever waits in the listen queue is still taken in; then nobody is, those who wait
for admission are refused, idle connections close, and running requests have their grace period (drain.py).

*Retired*: a successor serves the same listening socket. Nothing here is refused or closed for it: a
connection lives until its next answer, which says ``connection: close``, or until its own idle timer. To
close an idle one sooner would now and then meet a request on its way, which its client might not dare to
repeat. What is left at the end of the grace period ends as if drained.

*Cut*: what runs ends at once: an error in JSON before a head, a visible end of the body after it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Final

from meshd.control import BoardRow, State
from meshd.io.drain import drain
from meshd.io.listener import Listener
from meshd.io.server import Server
from meshd.io.services import Services
from meshd.prepare.client import PrepareClient

QUEUE_SECS: Final = 0.25  # for a listen queue to become empty
ARRIVAL_SECS: Final = 0.02  # for requests that are in the sockets already
LAST_BYTES_SECS: Final = 0.3  # for clients to take the end of what was cut
_LOOK_SECS: Final = 0.02


class Departure:
    """``handshakes``: how many connections ``server`` does not know yet. ``end`` ends the process."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        row: BoardRow,
        listener: Listener,
        server: Server,
        services: Services,
        pool: PrepareClient,
        handshakes: Callable[[], int],
        end: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._row = row
        self._listener = listener
        self._server = server
        self._services = services
        self._pool = pool
        self._handshakes = handshakes
        self._end = end
        self._task: asyncio.Task[None] | None = None
        self.has_begun = False

    def __repr__(self) -> str:
        return f"Departure(has_begun={self.has_begun}, {self._server!r})"

    def drain(self, grace_s: float) -> None:
        """Leave because the node ends; also from within a retirement."""
        self._begin(self._drain(grace_s))

    def retire(self, grace_s: float) -> None:
        """Leave what is new to a successor."""
        self._listener.close()
        self._begin(self._retire(time.monotonic() + grace_s))

    def cut(self) -> None:
        """Leave at once."""
        self._listener.close()
        self._begin(self._cut())

    def _begin(self, way: Coroutine[None, None, None]) -> None:
        self.has_begun = True
        self._row.state = State.DRAINING
        self._services.is_draining = self._server.is_draining = True
        if self._task is not None:
            self._task.cancel()
        self._task = self._loop.create_task(way)

    async def _drain(self, grace_s: float) -> None:
        grace_end = time.monotonic() + grace_s
        await self._listener.close_when_empty(min(QUEUE_SECS, grace_s / 2))
        await asyncio.sleep(ARRIVAL_SECS)
        self._services.director.close()
        self._server.close_idle()
        await drain(self._server, self._services, self._pool, max(0.0, grace_end - time.monotonic()))
        self._end()

    async def _retire(self, deadline: float) -> None:
        while (self._server.is_open or self._handshakes()) and time.monotonic() < deadline:
            await asyncio.sleep(_LOOK_SECS)
        self._services.director.close()
        await drain(self._server, self._services, self._pool, 0.0)
        self._end()

    async def _cut(self) -> None:
        self._services.director.close()
        for exchange in list(self._services.exchanges):
            exchange.cut()
        deadline = time.monotonic() + LAST_BYTES_SECS
        self._server.close_idle()
        while self._server.is_open and time.monotonic() < deadline:
            await asyncio.sleep(_LOOK_SECS)
            self._server.close_idle()
        self._end()
