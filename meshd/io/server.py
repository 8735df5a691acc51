"""All client connections of one I/O process: what they share, their cap, and their timers."""

from __future__ import annotations

from mmap import mmap
from typing import Final

from meshd.api.dialects import dialect_of_path, error_body
from meshd.api.endpoints import Dialect
from meshd.errors import MeshError
from meshd.io.downstream import HEAD_READ_BYTES, DownstreamConnection
from meshd.io.exchange import Exchange
from meshd.io.head_cache import RequestHeads
from meshd.io.headers import error_fields, local_answer
from meshd.io.http1 import RequestHead
from meshd.io.services import Services

SCRATCH_BYTES: Final = 65536
_PATH_LOOK_BYTES: Final = 256


class Server:
    """What client connections need of their process (`ports.ConnectionServer`)."""

    def __init__(self, services: Services, connection_cap: int) -> None:
        settings = services.settings
        self._services = services
        self._cap = connection_cap
        self._connections: set[DownstreamConnection] = set()
        self.parse_head = RequestHeads(settings.max_header_bytes, settings.max_headers).parse
        self.scratch_map = mmap(-1, SCRATCH_BYTES)
        self.scratch = memoryview(self.scratch_map)
        self.head_scratch = self.scratch[:HEAD_READ_BYTES]
        self.header_timeout_s = settings.client_header_timeout_secs
        self.body_timeout_s = settings.client_body_timeout_secs
        self.idle_timeout_s = settings.client_idle_timeout_secs
        self.write_timeout_s = settings.stream_idle_timeout_secs
        self.max_head_bytes = settings.max_header_bytes
        self.is_draining = False
        self.now = services.clock

    def __repr__(self) -> str:
        return f"Server(connections={len(self._connections)} exchanges={len(self._services.exchanges)})"

    @property
    def is_busy(self) -> bool:
        return bool(self._services.exchanges)

    @property
    def is_open(self) -> bool:
        return bool(self._connections)

    def opened(self, connection: DownstreamConnection) -> None:
        self._connections.add(connection)
        self._services.metrics.connections.set(len(self._connections))
        if len(self._connections) > self._cap:
            connection.turn_away(
                MeshError("too_many_connections", "Too many connections are open.", is_closing=True)
            )

    def closed(self, connection: DownstreamConnection) -> None:
        self._connections.discard(connection)
        self._services.metrics.connections.set(len(self._connections))

    def start_exchange(self, connection: DownstreamConnection, head: RequestHead) -> Exchange:
        services = self._services
        exchange = Exchange(services, connection, head)
        services.exchanges.add(exchange)
        connection.exchange = exchange
        exchange.start()
        return exchange

    def refuse(self, connection: DownstreamConnection, error: MeshError, head: bytes) -> bytes:
        """Return the answer to a head that could not be understood (what there is of it); counted here."""
        services = self._services
        request_id = services.request_ids.generate("req-")
        services.metrics.requests("other", "other").heads.inc()
        services.metrics.response(error.status, error.code)
        if error.code not in ("request_timeout", "too_many_connections"):
            services.metrics.malformed.inc()
        services.log.access(
            {
                "request_id": request_id,
                "client": connection.peer,
                "io_process": services.io_process,
                "status": error.status,
                "error_code": error.code,
                "outcome": "refused",
            }
        )
        body = error_body(_dialect_of(head), error.code, error.status, error.message, request_id)
        return local_answer(
            error.status,
            body,
            request_id=request_id,
            date=services.date.value(),
            closes=True,
            extra=error_fields(error),
        )

    def check_timers(self, now: float) -> None:
        """Look at every deadline; some 0.1 µs a connection, ten times a second."""
        for connection in [c for c in self._connections if c.is_write_paused or 0.0 < c.deadline <= now]:
            connection.check_deadline(now)
        for exchange in list(self._services.exchanges):
            exchange.check_timers(now)

    def close_idle(self) -> None:
        for connection in [c for c in self._connections if c.is_idle]:
            connection.close()

    @property
    def connection_count(self) -> int:
        return len(self._connections)


def _dialect_of(head: bytes) -> Dialect:
    """Return the dialect of the path in a request line, as far as it can be read."""
    parts = head[:_PATH_LOOK_BYTES].split(b" ", 2)
    return dialect_of_path(parts[1].partition(b"?")[0].decode("latin-1")) if len(parts) > 1 else "openai"
