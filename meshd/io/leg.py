"""One leg of a request: the exchange with one upstream, up to its response head, and its timers."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from meshd.api.rank_body import Buffer
from meshd.errors import MeshError
from meshd.io.http1 import ResponseHead
from meshd.io.pool import Address
from meshd.io.upstream import UpstreamConnection, UpstreamFailure
from meshd.strand import Promise

if TYPE_CHECKING:
    from meshd.io.services import Services

_MESSAGES: Final = {
    "upstream_connection_failed": "The upstream could not be reached, or closed the connection.",
    "upstream_connect_timeout": "The upstream did not accept a connection in time.",
    "upstream_timeout": "The upstream did not answer in time.",
    "upstream_protocol_error": "The upstream sent something that is not HTTP/1.1.",
    "admission_closed": "The server is shutting down.",
}
_ERROR_TYPES: Final = {
    "upstream_connection_failed": "reset",
    "upstream_connect_timeout": "connect_timeout",
    "upstream_timeout": "timeout",
    "upstream_protocol_error": "protocol",
}


class Leg(Promise[ResponseHead]):
    """One HTTP exchange with one upstream, and the promise of its response head; `ask` begins it.

    It owns its connection until `release` or `close`. Whoever waits for it gets the head, or an
    `UpstreamFailure`. A reused connection that dies before any response byte is replaced once, by a fresh
    one, and who waits does not notice.

    ``request_deadline``: of the request timer, on the clock of ``io``; 0 for none.
    """

    __slots__ = (
        "_address",
        "_body",
        "_connecting",
        "_first_byte_deadline",
        "_io",
        "_is_closed",
        "_is_cut_off",
        "_method",
        "_progress_at",
        "_request",
        "_unsent_bytes",
        "connection",
        "is_reused",
        "request_deadline",
    )

    def __init__(self, io: Services, request_deadline: float) -> None:
        super().__init__()
        self._io = io
        self._address: Address | None = None
        self._method = ""
        self._request = b""
        self._body: list[Buffer] = []
        self._connecting: asyncio.Task[None] | None = None
        self._first_byte_deadline = 0.0
        self._is_closed = False
        self._is_cut_off = False
        self._progress_at = 0.0
        self._unsent_bytes = 0
        self.request_deadline = request_deadline
        self.connection: UpstreamConnection | None = None
        self.is_reused = False

    def __repr__(self) -> str:
        return f"Leg({self.connection!r} reused={self.is_reused})"

    @property
    def response(self) -> ResponseHead | None:
        """The response head, if it has come."""
        return self._result

    def ask(
        self,
        address: Address,
        method: str,
        request: bytes,
        body: list[Buffer],
        needs_fresh: bool,
        now: float = 0.0,
    ) -> Leg:
        """Send a request, once; return the leg itself, to wait for.

        ``needs_fresh`` rules reuse out. The buffers of ``body`` stay the caller's, to be kept until they are
        sent. ``now``: the time, of a caller who has just looked.
        """
        self._address = address
        self._method = method
        self._request = request
        self._body = body
        connection = None if needs_fresh else self._io.pool.try_idle(address, now)
        if connection is None:
            self._begin_fresh()
        else:
            self.is_reused = True
            self._start(connection, now)
        return self

    def set_exception(self, error: BaseException) -> None:
        """Fail, or replace a reused connection that died of having been idle."""
        if self.is_reused and not self._is_cut_off and _is_early_death(error):
            self.is_reused = False
            self._io.metrics.reuse_retries.inc()
            self._begin_fresh()
        else:
            super().set_exception(error)

    def _begin_fresh(self) -> None:
        """Connect within a task, for it has timeouts."""
        self._connecting = asyncio.create_task(self._connect())
        self._connecting.add_done_callback(self._connected)

    async def _connect(self) -> None:
        """Open a connection within the connect timer, and within the request timer if that ends first.

        It is held here before it can get lost to a cancellation.
        """
        io, address = self._io, self._address
        assert address is not None
        left_s = self.request_deadline - io.clock()
        if left_s > io.settings.upstream_connect_timeout_secs:
            self.connection = await io.pool.connect(address)
            return
        try:
            async with asyncio.timeout(max(0.0, left_s)):
                self.connection = await io.pool.connect(address)
        except TimeoutError as timeout:
            raise UpstreamFailure("upstream_timeout", "request timer", False, False) from timeout

    def _connected(self, task: asyncio.Task[None]) -> None:
        self._connecting = None
        connection = self.connection
        error = asyncio.CancelledError() if task.cancelled() or self._is_closed else task.exception()
        if error is None and connection is not None:
            if not self._is_cut_off and not connection.is_closed:
                self._start(connection, 0.0)
                return
            cause = "cut off before it was sent" if self._is_cut_off else "closed at once"
            error = UpstreamFailure("upstream_connection_failed", cause, False, False)
        if connection is not None:
            connection.close()
        super().set_exception(error or asyncio.CancelledError())

    def _start(self, connection: UpstreamConnection, now: float) -> None:
        self.connection = connection
        connection.start(self._method, self._request, self._body, self, now)
        limit_s = self._io.first_byte_timeout_s
        if limit_s:
            self._first_byte_deadline = connection.last_byte_at + limit_s

    @property
    def is_broken(self) -> bool:
        """Whether what has not been read yet of the response will never come."""
        connection = self.connection
        return connection is None or (connection.is_closed and not connection.is_complete)

    def close(self) -> None:
        """End it at once; the upstream sees its connection close."""
        self._is_closed = True
        if self._connecting is not None:
            self._connecting.cancel()
        if self.connection is not None:
            self.connection.close()

    def release(self) -> None:
        """Give the connection back to the pool, which keeps it only if the exchange left it clean."""
        if self._connecting is not None:
            self.close()
        elif self.connection is not None:
            self._io.pool.release(self.connection)

    def cut_off(self, cause: str) -> None:
        """Fail as if the upstream had closed the connection, but without another try there."""
        self._is_cut_off = True
        self.fail("upstream_connection_failed", cause)

    def fail(self, code: str, cause: str) -> None:
        if self.connection is not None:
            self.connection.fail(code, cause)

    # ----------------------------------------------------------------------------------------- timers

    def check_timers(self, now: float) -> None:
        """Act on the timers of an attempt; called several times a second."""
        connection = self.connection
        if connection is None or not connection.is_busy or connection.is_complete:
            return
        response = self._result
        if response is None:
            self._check_head_timers(connection, now)
        elif not connection.is_paused:
            if now - connection.last_byte_at > self._io.settings.stream_idle_timeout_secs:
                connection.fail("upstream_timeout", "stream idle timer")
            elif not response.is_sse and 0.0 < self.request_deadline < now:
                connection.fail("upstream_timeout", "request timer")

    def _check_head_timers(self, connection: UpstreamConnection, now: float) -> None:
        if 0.0 < self.request_deadline < now:
            connection.fail("upstream_timeout", "request timer")
        elif not connection.is_sent:
            unsent = connection.unsent_bytes
            if unsent != self._unsent_bytes:  # it takes bytes, if slowly
                self._unsent_bytes, self._progress_at = unsent, now
            elif now - self._progress_at > self._io.settings.stream_idle_timeout_secs:
                connection.fail("upstream_timeout", "the upstream takes no request bytes")
            if self._first_byte_deadline:
                self._first_byte_deadline = now + self._io.first_byte_timeout_s
        elif 0.0 < self._first_byte_deadline < now:
            connection.fail("upstream_timeout", "first-byte timer")


def _is_early_death(error: BaseException) -> bool:
    """Whether a connection was closed before any byte of a response."""
    return (
        isinstance(error, UpstreamFailure)
        and error.code == "upstream_connection_failed"
        and not error.has_response_bytes
    )


def error_type_of(failure: UpstreamFailure) -> str:
    """Return the `error_type` label of a failed attempt."""
    is_connect = not failure.was_sent and not failure.has_response_bytes
    if failure.code == "upstream_connection_failed" and is_connect:
        return "connect"
    return _ERROR_TYPES.get(failure.code, "reset")


def as_error(failure: UpstreamFailure, url: str) -> MeshError:
    """Translate a failure of the upstream into the client's error; addresses go to the log alone."""
    return MeshError(failure.code, _MESSAGES[failure.code], cause=f"{url}: {failure.cause}")
