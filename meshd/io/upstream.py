"""One HTTP/1.1 connection to an upstream: send a request, read one response, say how it ended.

States, each left exactly once per exchange:

    IDLE → AWAITING_HEAD (request written) → BODY → IDLE      a whole response, connection reusable
                   │                          │
                   └────────── CLOSED ────────┘               anything else

The response head keeps the promise that `start` returns. Body bytes then go to the sink attached by
`attach`; what arrives before that is kept, bounded by pausing the socket. The end of a response is
taken from its framing alone: bytes past it close the connection and are never relayed.
"""

from __future__ import annotations

import asyncio
import select
import socket
import time
from collections.abc import Callable
from typing import Final, Protocol, cast

from meshd.api.rank_body import Buffer
from meshd.io.chunked import ChunkedDecoder, ChunkedError
from meshd.io.http1 import (
    MAX_RESPONSE_HEAD_BYTES,
    ResponseHead,
    UpstreamProtocolError,
    find_head_end,
    parse_response_head,
)
from meshd.strand import Promise

MAX_INTERIM_RESPONSES: Final = 16
MAX_UNATTACHED_BYTES: Final = 65536
MAX_KNOWN_BYTES: Final = 2048  # of a head that a connection remembers
JOINED_BODY_BYTES: Final = 16384
UNSENT_HIGH: Final = 65536  # of request bytes: above, the transport tells when the last one has gone


class UpstreamFailure(Exception):
    """An exchange failed on the upstream's side.

    ``code``: a code of ``meshd.errors``. ``has_response_bytes``: whether any byte of a response had come.
    ``was_sent``: whether the whole request had been handed to the socket.
    """

    def __init__(self, code: str, cause: str, has_response_bytes: bool, was_sent: bool) -> None:
        super().__init__(cause)
        self.code = code
        self.cause = cause
        self.has_response_bytes = has_response_bytes
        self.was_sent = was_sent


class BodySink(Protocol):
    """Where the body of a response goes, as it arrives."""

    def pass_chunks(self, data: bytes, decoder: ChunkedDecoder) -> bool:
        """Take ``data`` with its framing if it can be relayed as it stands; else it comes as payload."""
        ...

    def body_data(self, data: bytes) -> None: ...

    def body_end(self) -> None: ...

    def body_failed(self, failure: UpstreamFailure) -> None: ...


class UpstreamConnection(asyncio.Protocol):
    """One connection; owned by the pool while idle, by one exchange while busy."""

    __slots__ = (
        "_buffer",
        "_chunked",
        "_clock",
        "_head",
        "_head_end_scan",
        "_interim",
        "_is_write_paused",
        "_known",
        "_left",
        "_loop",
        "_method",
        "_on_closed",
        "_parse_head",
        "_pending",
        "_poll",
        "_response",
        "_sink",
        "failure",
        "is_busy",
        "is_closed",
        "is_complete",
        "is_early",
        "is_local",
        "is_paused",
        "key",
        "last_byte_at",
        "name",
        "remote",
        "served",
        "transport",
    )

    def __init__(
        self,
        key: str,
        loop: asyncio.AbstractEventLoop,
        on_closed: Callable[[UpstreamConnection], None],
        clock: Callable[[], float] = time.monotonic,
        parse_head: Callable[[bytes, str], ResponseHead] = parse_response_head,
    ) -> None:
        self.key = key
        self._loop = loop
        self._clock = clock
        self._parse_head = parse_head
        self._on_closed = on_closed
        self.transport: asyncio.Transport | None = None
        self.is_busy = False
        self.is_closed = False
        self.is_paused = False
        self.is_local = False  # to another process of the node, which is no upstream
        self.name = ""  # that was looked up for it, and the address that was connected to
        self.remote = ""
        self.served = 0
        self._poll: select.poll | None = None
        self.last_byte_at = 0.0
        self._is_write_paused = False
        self._response: Promise[ResponseHead] | None = None
        self._method = ""
        self._known: ResponseHead | None = None  # the last one: most answers to one method have it again
        self._reset("")

    def __repr__(self) -> str:
        state = "closed" if self.is_closed else "busy" if self.is_busy else "idle"
        return f"UpstreamConnection({self.key} {state} served={self.served} complete={self.is_complete})"

    def _reset(self, method: str) -> None:
        if method != self._method:
            self._method = method
            self._known = None
        self._buffer = b""
        self._head_end_scan = 0
        self._interim = 0
        self._head: ResponseHead | None = None
        self._chunked: ChunkedDecoder | None = None
        self._left = -1
        self._pending = b""
        self._sink: BodySink | None = None
        self.failure: UpstreamFailure | None = None
        self.is_early = False  # answered before the whole request had gone out
        self.is_complete = False

    # ------------------------------------------------------------------------------- what others call

    def start(
        self,
        method: str,
        head: bytes,
        body: list[Buffer],
        response: Promise[ResponseHead],
        now: float = 0.0,
    ) -> None:
        """Write one request; ``response`` gets the final response head, or an UpstreamFailure.

        The buffers of ``body`` are read until ``is_sent``: their owner keeps them until then. ``now``: the
        time, of a caller who has just looked.
        """
        assert self.transport is not None and not self.is_busy
        self._reset(method)
        self.is_busy = True
        self.last_byte_at = now or self._clock()
        self._response = response
        body_bytes = 0
        for buffer in body:
            body_bytes += len(buffer)
        # uvloop sends at once, so head and body go together: one system call, and the small copy is cheaper.
        if body_bytes > JOINED_BODY_BYTES:
            self.transport.writelines([head, *body])
            return
        for buffer in body:
            head += buffer
        self.transport.write(head)

    @property
    def is_sent(self) -> bool:
        return self.transport is None or self.transport.get_write_buffer_size() == 0

    @property
    def unsent_bytes(self) -> int:
        return 0 if self.transport is None else self.transport.get_write_buffer_size()

    def attach(self, sink: BodySink) -> bytes:
        """Give the body to ``sink`` from now on; return what came of it already.

        Whoever attaches looks next at ``failure`` and ``is_complete``: the sink is not told what happened
        before. Reading may have been paused while nobody took the body. The sink alone knows whether its
        client takes more, so it is the one to resume reading.
        """
        pending, self._pending = self._pending, b""
        self._sink = sink
        return pending

    def pause_reading(self) -> None:
        if self.transport is not None and not self.is_closed and not self.is_paused:
            self.is_paused = True
            self.transport.pause_reading()

    def resume_reading(self) -> None:
        if self.transport is not None and not self.is_closed and self.is_paused:
            self.is_paused = False
            self.last_byte_at = self._clock()  # our own pause is not the upstream's silence
            self.transport.resume_reading()

    @property
    def is_reusable(self) -> bool:
        """Whether the finished exchange left the connection clean."""
        head = self._head
        return (
            self.is_complete
            and not self.is_closed
            and head is not None
            and head.keeps_alive
            and not head.is_close_delimited
            and not self.is_early
        )

    def is_quiet(self) -> bool:
        """Whether the socket shows neither data nor an end: what the kernel knows, the loop may not yet.

        One system call, 0.4 µs. What an upstream sends unasked would pass for the next response.
        """
        poll = self._poll
        if poll is None:
            assert self.transport is not None
            poll = self._poll = select.poll()
            poll.register(self.transport.get_extra_info("socket").fileno(), select.POLLIN | select.POLLRDHUP)
        return not poll.poll(0)

    def close(self) -> None:
        """Close at once; unsent bytes are dropped, so that the upstream learns it in one round trip."""
        self.is_busy = False
        self._response = None
        if not self.is_closed and self.transport is not None:
            self.is_closed = True
            self.transport.abort()
        self._on_closed(self)

    def fail(self, code: str, cause: str) -> None:
        """End the exchange from our side (a timer, say) and close."""
        self._fail(code, cause)
        self.close()

    # ------------------------------------------------------------------------------ asyncio callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.Transport, transport)  # uvloop's own class is not registered as one
        self.transport = transport
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30)
        transport.set_write_buffer_limits(high=UNSENT_HIGH, low=0)

    def pause_writing(self) -> None:
        self._is_write_paused = True

    def resume_writing(self) -> None:
        self._is_write_paused = False

    def data_received(self, data: bytes) -> None:
        self.last_byte_at = self._clock()
        if not self.is_busy or self.is_complete:
            # Bytes past the end of a response: the response stands, the connection does not.
            self.close()
            return
        if self._head is None:
            self._read_head(data)
        else:
            self._read_body(data)

    def eof_received(self) -> bool:
        self._ended("the upstream closed the connection")
        # Left to itself the transport would first flush a request that nobody reads, out of a slot that
        # is soon another request's.
        self.close()
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_closed = True
        self._ended("the upstream reset the connection" if exc else "the upstream closed the connection")
        self.is_busy = False
        self._on_closed(self)

    # ----------------------------------------------------------------------------------------- inside

    def _read_head(self, data: bytes) -> None:
        known = self._known
        if known is not None and not self._buffer:
            head = known.again(data)
            if head is not None:
                self._head_ended(head, data[len(head.raw) :])
                return
        buffer = self._buffer = self._buffer + data if self._buffer else data
        while True:
            end = find_head_end(buffer, self._head_end_scan)
            if end < 0:
                self._head_end_scan = max(0, len(buffer) - 3)
                self._buffer = buffer
                if len(buffer) > MAX_RESPONSE_HEAD_BYTES:
                    self.fail("upstream_protocol_error", "response head too large")
                return
            try:
                head = self._parse_head(buffer[:end], self._method)
            except UpstreamProtocolError as error:
                self.fail("upstream_protocol_error", str(error))
                return
            buffer = buffer[end:]
            self._head_end_scan = 0
            if head.status >= 200:
                break
            self._interim += 1
            if self._interim > MAX_INTERIM_RESPONSES:
                self.fail("upstream_protocol_error", "too many interim responses")
                return
        self._buffer = b""
        self._known = head if len(head.raw) <= MAX_KNOWN_BYTES else None
        self._head_ended(head, buffer)

    def _head_ended(self, head: ResponseHead, rest: bytes) -> None:
        self._head = head
        self.is_early = not self.is_sent
        if head.is_chunked:
            self._chunked = ChunkedDecoder()
        elif not head.has_body:
            self._left = 0
        elif head.content_length is not None:
            self._left = head.content_length
        # else: close-delimited, _left stays -1
        if self._left == 0:
            self._complete(rest)
        elif rest:
            self._read_body(rest)
        response = self._response
        if response is not None:
            self._response = None  # it holds this connection
            response.set_result(head)  # last: the exchange goes on within this call

    def _read_body(self, data: bytes) -> None:
        if self._chunked is not None:
            self._read_chunked(data)
        elif self._left < 0:
            self._deliver(data)
        else:
            self._read_sized(data)

    def _read_sized(self, data: bytes) -> None:
        left = self._left - len(data)
        if left >= 0:
            self._left = left
            self._deliver(data)
            if not left:
                self._complete(b"")
        else:
            self._left = 0
            self._deliver(data[:left])
            self._complete(data[left:])

    def _read_chunked(self, data: bytes) -> None:
        assert self._chunked is not None
        try:
            if self._sink is not None and self._sink.pass_chunks(data, self._chunked):
                return
            pieces = self._chunked.feed(data)
        except ChunkedError as error:
            self.fail("upstream_protocol_error", str(error))
            return
        if pieces:
            self._deliver(pieces[0] if len(pieces) == 1 else b"".join(pieces))
        if self._chunked.is_complete and not self.is_closed:
            self._complete(self._chunked.rest)

    def _deliver(self, data: bytes) -> None:
        if self._sink is not None:
            self._sink.body_data(data)
            return
        self._pending = self._pending + data if self._pending else data
        if len(self._pending) > MAX_UNATTACHED_BYTES:
            self.pause_reading()

    def _complete(self, excess: bytes) -> None:
        self.is_complete = True
        if excess:
            self.is_closed = True
            if self.transport is not None:
                self.transport.abort()
        if self._sink is not None:
            self._sink.body_end()

    def _ended(self, cause: str) -> None:
        if not self.is_busy or self.is_complete or self.failure is not None:
            return
        if (
            self._head is not None
            and self._head.is_close_delimited
            and cause.endswith("closed the connection")
        ):
            self._complete(b"")
            return
        self._fail("upstream_connection_failed", cause)

    def _fail(self, code: str, cause: str) -> None:
        if self.failure is not None or self.is_complete:
            return
        has_bytes = self._head is not None or bool(self._buffer) or self._interim > 0
        # A transport that was reset says that nothing is unsent: what it said before counts.
        was_sent = self.is_sent and not self._is_write_paused
        self.failure = UpstreamFailure(code, cause, has_bytes, was_sent)
        response = self._response
        if response is not None:
            self._response = None
            response.set_exception(self.failure)
        elif self._sink is not None:
            self._sink.body_failed(self.failure)
