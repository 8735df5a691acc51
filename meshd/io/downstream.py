"""One client connection: bytes in, one request at a time, answers out in order (RFC 9112 §9).

    HEAD → WAIT → BODY → BUSY → HEAD …       the ordinary life; WAIT: head known, no slot yet
             └──────┴──────┴──→ DISCARD → HEAD    an answer went out before a short rest of the body was read
                            └─→ LINGER → CLOSED   … or before a long or unknown rest
    any ──→ CLOSING → CLOSED                     closed by us, or by the client: what was written is flushed

After the head a sized body is received straight into its slot of shared memory: `get_buffer` hands the
slot itself to the event loop. Everything else passes through one scratch buffer of the process, which
is safe because uvloop reads and delivers within one callback. A client that sent a large body probably
repeats its head and sends another one, so the next head is read alone: then no byte of that body passes
through the scratch buffer either. Bytes of a next request wait in ``_pending``; past 64 KiB the socket is
not read. A next request does not begin while the client has not taken the answers to those before it.

The connection knows nothing of meaning: it starts an exchange for each head, and the exchange tells it
what to write and when the answer has ended.
"""

from __future__ import annotations

import asyncio
from typing import Final

from meshd.errors import MeshError
from meshd.io.body import BodyReceiver, Room
from meshd.io.client_socket import ClientSocket
from meshd.io.http1 import RequestHead, check_partial_head, find_head_end
from meshd.io.ports import ActiveExchange, ConnectionServer
from meshd.strand import Promise

HEAD_READ_BYTES: Final = (
    16384  # read at most before a head is whole: what follows goes where it belongs at once
)
MAX_PENDING_BYTES: Final = 65536
MAX_KEPT_HEAD_BYTES: Final = (
    2048  # a longer one is not kept for the sake of the next; there may be 10,000 clients
)
KEEPABLE_REST_BYTES: Final = 65536  # of an unread body that is worth discarding to keep the connection
DISCARD_SECS: Final = 5.0
LINGER_BYTES: Final = 1 << 20
LINGER_SECS: Final = 2.0

# Each a constant: unpacked from a range, a compiled build would look each use up in a dict.
_HEAD: Final = 0
_WAIT: Final = 1
_BODY: Final = 2
_BUSY: Final = 3
_DISCARD: Final = 4
_LINGER: Final = 5
_CLOSING: Final = 6
_CLOSED: Final = 7
_STATE_NAMES: Final = ("HEAD", "WAIT", "BODY", "BUSY", "DISCARD", "LINGER", "CLOSING", "CLOSED")


class DownstreamConnection(ClientSocket):
    """A client connection; all methods are called on the event loop."""

    __slots__ = (
        "_body",
        "_body_byte_at",
        "_discard_left",
        "_has_served",
        "_head",
        "_head_room",
        "_idle_timeout_s",
        "_now",
        "_pending",
        "_scan_from",
        "_scratch",
        "_scratch_map",
        "_server",
        "_state",
        "_whole_bytes",
        "deadline",
        "exchange",
        "head_started_at",
    )

    def __init__(self, server: ConnectionServer) -> None:
        super().__init__()
        self._server = server
        self._now = server.now  # what each request needs is at hand here
        self._idle_timeout_s = server.idle_timeout_s
        self._scratch = server.scratch
        self._scratch_map = server.scratch_map
        self._head_room = server.head_scratch  # for the next bytes of a head
        self._state = _HEAD
        self._pending = b""
        self._scan_from = 0
        self._body: BodyReceiver | None = None
        self._whole_bytes = 0  # of a body that came with its head and needed no receiver
        self._discard_left = 0
        self._has_served = False
        self._body_byte_at = 0.0
        self.exchange: ActiveExchange | None = None
        self._head: RequestHead | None = None  # of the request in progress; between two, of the one before
        self.head_started_at = 0.0
        self.deadline = 0.0

    def __repr__(self) -> str:
        return f"DownstreamConnection({self.peer} {_STATE_NAMES[self._state]} pending={len(self._pending)})"

    # ------------------------------------------------------------------------------ asyncio callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.deadline = self._now() + self._server.header_timeout_s
        self._server.opened(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._state == _HEAD:
            return self._head_room
        body = self._body
        return body.free if self._state == _BODY and body is not None and body.is_sized else self._scratch

    def buffer_updated(self, nbytes: int) -> None:
        state = self._state
        if state == _BODY:
            body = self._body
            assert body is not None
            self._body_byte_at = self._now()
            if body.is_sized:
                body.received += nbytes
                if body.is_complete:
                    self._body_complete(body)
                return
        self._received(self._scratch_map[:nbytes])

    def eof_received(self) -> bool:
        # A half-close looks the same as a close, so it counts as the client leaving.
        self._gone("the client closed the connection")
        self.close()  # answers already written are still flushed
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        if self._state != _CLOSED:
            self._state = _CLOSED
            self._server.closed(self)
        self._gone("the client reset the connection" if exc else "the client closed the connection")

    def pause_writing(self) -> None:
        self.is_write_paused = True
        self.write_paused_at = self._now()
        if self.exchange is not None:
            self.exchange.client_paused()

    def resume_writing(self) -> None:
        self.is_write_paused = False
        if self.exchange is not None:
            self.exchange.client_resumed()
        elif self._state == _HEAD:
            self._go_on()

    # ------------------------------------------------------------------------------------ bytes by state

    def _received(self, data: bytes) -> None:
        state = self._state
        if state == _HEAD:
            self._pending = self._pending + data if self._pending else data
            self._read_head()
        elif state == _BODY:
            self._read_chunked(data)
        elif state in (_WAIT, _BUSY):
            self._pending += data
            if len(self._pending) > MAX_PENDING_BYTES:
                self._pause_reading()
        elif state in (_DISCARD, _LINGER):
            self._discard(data)

    def _read_head(self) -> None:
        pending = self._pending
        if not pending:
            return
        if not self.head_started_at:
            self.head_started_at = self._now()
        head = self._head.again(pending) if self._head is not None else None
        if head is None:
            head = self._find_head(pending)
            if head is None:
                return
        self._head = head
        self._pending = pending[len(head.raw) :]
        self._scan_from = 0  # a head that came in pieces may be one known from before
        self.deadline = 0.0
        self._state = _WAIT if head.has_body else _BUSY
        self.exchange = self._server.start_exchange(self, head)

    def _find_head(self, pending: bytes) -> RequestHead | None:
        """Read the head that ``pending`` begins with; None if it is not whole yet, or refused."""
        server = self._server
        end = find_head_end(pending, self._scan_from)
        try:
            if end >= 0:
                return server.parse_head(pending[:end])
            check_partial_head(pending, server.max_head_bytes, max(0, self._scan_from - 1))
        except MeshError as error:
            self._refuse(error, pending)
            return None
        self._scan_from = max(0, len(pending) - 3)
        self._head_room = server.head_scratch
        if self._has_served:  # the first head is timed from the accept, later ones from their first byte
            self.deadline = self.head_started_at + server.header_timeout_s
        return None

    def turn_away(self, error: MeshError) -> None:
        """Refuse the connection itself, before any head."""
        self._refuse(error, b"")

    def _refuse(self, error: MeshError, head: bytes) -> None:
        """Answer a head that could not be understood, and close: nothing after it can be trusted."""
        assert self.transport is not None
        self.transport.write(self._server.refuse(self, error, head))
        self._linger()

    # ------------------------------------------------------------------------------------------ body

    def take_whole_body(self) -> bytes | None:
        """Return the body if all of it came with its head; None if it is to be received by `begin_body`."""
        head = self._head
        assert head is not None
        length = head.content_length or 0
        body = self._pending
        if head.is_chunked or len(body) < length:
            return None
        if len(body) > length:
            self._pending = body[length:]
            body = body[:length]
        else:
            self._pending = b""
        self._whole_bytes = length
        self._state = _BUSY
        if len(self._pending) <= MAX_PENDING_BYTES:
            self._resume_reading()  # or nobody would see the client leave
        return body

    def begin_body(self, room: Room, most: int) -> Promise[None]:
        """Receive a body that is not there whole into ``room``; the promise tells when it is.

        ``most``: for a chunked body, the largest length allowed. The promise raises MeshError on broken
        framing, on a body that grows too large, and when the client stalls.
        """
        head = self._head
        assert head is not None
        pending, self._pending = self._pending, b""
        body = self._body = BodyReceiver(head, room, most)
        if body.is_sized:
            body.take(pending)
        body.ready = Promise[None]()
        self._state = _BODY
        self._body_byte_at = self._now()
        self.deadline = self._body_byte_at + self._server.body_timeout_s
        if pending and not body.is_sized:
            self._read_chunked(pending)
        if len(self._pending) <= MAX_PENDING_BYTES:
            self._resume_reading()
        return body.ready

    @property
    def has_body_bytes(self) -> bool:
        """Whether bytes of the body arrived already (then nobody waits for `100 Continue`)."""
        return bool(self._pending) or self.body_received > 0

    @property
    def body_received(self) -> int:
        return self._body.received if self._body is not None else self._whole_bytes

    def _read_chunked(self, data: bytes) -> None:
        body = self._body
        assert body is not None and body.ready is not None
        if body.ready.done():
            return  # it failed, and its exchange has not been told yet: nothing after that can be trusted
        try:
            rest = body.take(data)
        except MeshError as refusal:
            body.fail(refusal)
            return
        if body.is_complete:
            self._pending = rest
            self._body_complete(body)

    def _body_complete(self, body: BodyReceiver) -> None:
        self._state = _BUSY
        self.deadline = 0.0
        if body.ready is not None:
            body.ready.set_result(None)  # last: the exchange goes on within this call

    # --------------------------------------------------------------------------------------- answers

    def write(self, data: bytes | memoryview) -> None:
        if self.transport is not None and self._state < _LINGER:
            self.transport.write(data)

    def must_close_after(self) -> bool:
        """Whether an answer sent now has to end the connection, because of what is left of the body."""
        head = self._head
        if head is None:
            return True
        if self._state == _BUSY or not head.has_body:
            return False
        if head.is_chunked or head.has_expectation:
            return True
        return self._rest_of_body() - len(self._pending) > KEEPABLE_REST_BYTES

    def _rest_of_body(self) -> int:
        assert self._head is not None
        return (self._head.content_length or 0) - self.body_received

    def finish(self, closes: bool, now: float = 0.0) -> None:
        """The answer has been written whole: go on with the next request, or close.

        ``now``: the time, of a caller who has just looked.
        """
        is_body_open = self._state in (_WAIT, _BODY)
        rest = self._rest_of_body() if is_body_open and self._head is not None else 0
        self.exchange = None
        self._body = None
        if self._state >= _LINGER:
            return
        if closes:
            # Unread bytes would turn a plain close into a reset that can overtake the answer.
            if is_body_open or self._pending or self.is_read_paused:
                self._linger()
            else:
                self.close()
            return
        if is_body_open and rest > 0:
            self._state = _DISCARD
            self._discard_left = rest
            self.deadline = self._now() + DISCARD_SECS
            self._resume_reading()
            pending, self._pending = self._pending, b""
            if pending:
                self._discard(pending)
            return
        self._next_request(now or self._now())

    def abort(self, resets: bool = False) -> None:
        """Cut the connection so that the client sees a truncated answer; ``resets``: by a TCP reset."""
        self.exchange = None
        self._body = None
        if self.transport is None or self._state == _CLOSED:
            return
        self._state = _CLOSING
        self._cut(resets)

    def _next_request(self, now: float) -> None:
        self._state = _HEAD
        self._has_served = True
        self.head_started_at = 0.0
        self._whole_bytes = 0
        self._look_ahead()
        self.deadline = now + self._idle_timeout_s
        if self.is_write_paused:  # a client that reads no answers gets no more of them
            self._pause_reading()
            return
        self._go_on()

    def _look_ahead(self) -> None:
        """Get ready for another head like the last one."""
        head = self._head
        assert head is not None
        size = len(head.raw)
        if size > MAX_KEPT_HEAD_BYTES:
            self._head = None
        is_read_alone = (head.content_length or 0) >= HEAD_READ_BYTES
        if is_read_alone and size != len(self._head_room):
            self._head_room = self._scratch[:size]
        elif not is_read_alone and len(self._head_room) < HEAD_READ_BYTES:
            self._head_room = self._server.head_scratch

    def _go_on(self) -> None:
        """Begin the next request with what is pending; read on if that leaves room for more."""
        self._read_head()
        if self._state == _HEAD or len(self._pending) <= MAX_PENDING_BYTES:
            self._resume_reading()

    def _discard(self, data: bytes) -> None:
        if self._state == _LINGER:
            self._discard_left -= len(data)
            if self._discard_left <= 0:
                self.abort()
            return
        if len(data) < self._discard_left:
            self._discard_left -= len(data)
            return
        self._pending = data[self._discard_left :]
        self._discard_left = 0
        self._next_request(self._now())

    def _linger(self) -> None:
        """Shut down our side and read on for a while, so that the answer is not lost to a reset."""
        self._state = _LINGER
        self._pending = b""
        self._discard_left = LINGER_BYTES
        self.deadline = self._now() + LINGER_SECS
        if self.transport is None:
            return
        self._resume_reading()
        if not self._try_shut_down():
            self.close()

    # ----------------------------------------------------------------------------------------- time

    def check_deadline(self, now: float) -> None:
        """Act on a timer that has run out; the process calls this for every connection, often."""
        if self.is_write_paused and self._is_stuck(now, self._server.write_timeout_s):
            self._gone("the client took no byte of the response")
            self.abort()
            return
        if not self.deadline or now < self.deadline:
            return
        state = self._state
        if state == _HEAD:
            self._head_timed_out()
        elif state == _BODY:
            self.deadline = self._body_byte_at + self._server.body_timeout_s
            if self.deadline <= now:
                self.deadline = 0.0
                self._stalled()
        elif state in (_LINGER, _CLOSING) and self._has_taken_bytes():
            self.deadline = now + (LINGER_SECS if state == _LINGER else self._server.write_timeout_s)
        elif state >= _DISCARD:
            self.abort()

    def _head_timed_out(self) -> None:
        if not self._pending:
            self.close()
            return
        self._refuse(
            MeshError("request_timeout", "The request head did not arrive in time.", is_closing=True),
            self._pending,
        )

    def _stalled(self) -> None:
        if self._body is not None:
            error = MeshError("request_timeout", "The request body did not arrive in time.", is_closing=True)
            self._body.fail(error)

    @property
    def is_idle(self) -> bool:
        return self._state == _HEAD and not self._pending and self.exchange is None

    @property
    def is_closed(self) -> bool:
        return self._state == _CLOSED

    def close(self) -> None:
        """Close once what was written is flushed, if the client takes it at all."""
        if self.transport is None or self._state >= _CLOSING:
            return
        self._state = _CLOSING
        self._unsent = self._count_unsent()
        self.deadline = self._now() + self._server.write_timeout_s
        self.transport.close()

    # --------------------------------------------------------------------------------------- inside

    def _gone(self, cause: str) -> None:
        exchange, self.exchange = self.exchange, None
        if exchange is not None:
            exchange.client_gone(cause)
