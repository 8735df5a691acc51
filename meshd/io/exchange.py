"""The life of one request, from its head to its outcome, as straight-line code.

    head → checks → ticket → body memory → body → view → placement → upstream → relay → finish

`run` is one task per request. Whatever happens, `_finish` runs exactly once and gives everything back:
load, connection, ticket, slot; then it counts, writes one access line and lets the client's connection
go on. Two events come from outside: the client leaves (`client_gone`), and timers (`check_timers`).
"""

from __future__ import annotations

import asyncio
import traceback
from typing import TYPE_CHECKING, Final

from meshd.api.dialects import StreamDialect, dialect_of_path, error_body
from meshd.api.endpoints import Endpoint, find_endpoint
from meshd.api.view import RoutingView
from meshd.errors import MeshError
from meshd.io.account import Record, count, write_access_line
from meshd.io.downstream import DownstreamConnection
from meshd.io.headers import (
    downstream_head,
    error_fields,
    forwarded_fields,
    local_answer,
    upstream_head,
)
from meshd.io.http1 import RequestHead, ResponseHead
from meshd.io.pool import Address
from meshd.io.relay import Relay
from meshd.io.request_checks import check_endpoint_head, content_length_of
from meshd.io.sse import SseRelay
from meshd.io.upstream import UpstreamConnection, UpstreamFailure

if TYPE_CHECKING:
    from meshd.admission.gate import Ticket
    from meshd.director import BodyRoom
    from meshd.io.services import Services
    from meshd.prepare.job import Job
    from meshd.routing.placement import Placement

MAX_ADMIN_BODY_BYTES: Final = 1 << 20
_STREAM_API: Final = {
    "chat": "openai",
    "completions": "openai",
    "generate": "openai",
    "messages": "messages",
    "responses": "responses",
}
_CONTRACT: Final[dict[str, StreamDialect]] = {
    "chat": "openai",
    "completions": "openai",
    "generate": "openai",
    "messages": "messages",
    "responses": "responses",
}
_FAILURE_MESSAGES: Final = {
    "upstream_connection_failed": "The upstream could not be reached, or closed the connection.",
    "upstream_connect_timeout": "The upstream did not accept a connection in time.",
    "upstream_timeout": "The upstream did not answer in time.",
    "upstream_protocol_error": "The upstream sent something that is not HTTP/1.1.",
}
_ATTEMPT_ERRORS: Final = {
    "upstream_connection_failed": "reset",
    "upstream_connect_timeout": "connect_timeout",
    "upstream_timeout": "timeout",
    "upstream_protocol_error": "protocol",
}
_STREAM_FAILURES: Final = {
    "upstream_connection_failed": "cut",
    "upstream_timeout": "idle",
    "upstream_protocol_error": "protocol",
    "admission_closed": "shutdown",
}


class Exchange:
    """One request on one client connection."""

    __slots__ = (
        "_closes",
        "_connection",
        "_downstream",
        "_endpoint",
        "_first_byte_deadline",
        "_head",
        "_io",
        "_job",
        "_placement",
        "_record",
        "_relay",
        "_request_deadline",
        "_response",
        "_room",
        "_task",
        "_ticket",
        "_view",
    )

    def __init__(self, io: Services, downstream: DownstreamConnection, head: RequestHead) -> None:
        self._io = io
        self._downstream = downstream
        self._head = head
        self._record = Record(downstream.head_started_at)
        self._endpoint: Endpoint | None = None
        self._ticket: Ticket | None = None
        self._room: BodyRoom | None = None
        self._job: Job | None = None
        self._view: RoutingView | None = None
        self._placement: Placement | None = None
        self._connection: UpstreamConnection | None = None
        self._response: ResponseHead | None = None
        self._relay: Relay | None = None
        self._closes = False
        self._first_byte_deadline = self._request_deadline = 0.0
        self._task: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        stage = (
            "relay" if self._relay else "upstream" if self._placement else "prepare" if self._room else "new"
        )
        return f"Exchange({self._head.method} {self._head.path} {stage} {self._record.request_id})"

    def start(self) -> None:
        self._task = self._io.loop.create_task(self.run())

    async def run(self) -> None:
        """Serve the request; returns when everything it held has been given back."""
        try:
            await self._serve()
        except MeshError as error:
            self._answer_error(error)
        except asyncio.CancelledError:
            if not self._record.is_client_gone:
                self._answer_error(MeshError("admission_closed", "The server is shutting down."))
        except Exception as error:
            self._log_fault(error)
            self._answer_error(MeshError("internal_error", "Something went wrong here."))
        finally:
            self._finish()

    # -------------------------------------------------------------------------------- straight-line life

    async def _serve(self) -> None:
        io, head, record = self._io, self._head, self._record
        local = io.routes.find(head.path)
        if local is not None:
            self._begin(local.label, "req-")
            record.is_routine = local.health is not None
            if local.is_relayed:
                await self._serve_by_controller()
            else:
                self._answer(*io.routes.answer(local, head.method))
            return
        try:
            endpoint = find_endpoint(head.method, head.path)
        except MeshError:
            self._begin("other", "req-")
            raise
        self._endpoint = endpoint
        self._begin(endpoint.path, endpoint.id_prefix)
        if endpoint.picks_by == "local":
            self._answer(*io.routes.models())
            return
        record.endpoint = endpoint.label
        await self._receive(endpoint)
        view = await self._prepare(endpoint)
        self._request_deadline = record.prepared_at + io.settings.request_timeout_secs
        placement = self._placement = io.director.place(endpoint, view)
        record.placed_at = io.clock()
        record.upstream, record.reason, record.attempts = placement.upstream.url, placement.reason, 1
        io.metrics.stage_placement(record.placed_at - record.prepared_at)
        response = await self._ask_upstream(placement, view)
        await self._relay_response(endpoint.label, response, io.pool.target(placement.upstream)[1])

    def _begin(self, label: str, id_prefix: str) -> None:
        io, record = self._io, self._record
        record.label = label
        record.request_id = io.request_ids.choose(self._head, id_prefix)
        record.duration = io.metrics.request(label, self._head.method)

    async def _receive(self, endpoint: Endpoint) -> None:
        """Checks on the head, ticket, body memory, body: the order of http.md §3."""
        io, head = self._io, self._head
        check_endpoint_head(endpoint, head, io.max_body_bytes)
        self._ticket = io.director.try_admit() or await self._wait_for_ticket()
        io.metrics.tickets_granted.inc()
        length = content_length_of(head)
        room = self._room = io.director.try_reserve(length) or await io.director.reserve(length)
        self._record.ticket_at = io.clock()
        io.metrics.stage_admission(self._record.ticket_at - self._record.started_at)
        await self._read_body(room, io.max_body_bytes)
        self._record.body_at = io.clock()
        io.metrics.stage_body(self._record.body_at - self._record.ticket_at)

    async def _wait_for_ticket(self) -> Ticket:
        io = self._io
        started_at = io.clock()
        try:
            ticket = await io.director.wait_for_ticket()
        except MeshError as error:
            io.metrics.admission_rejected(error.code.removeprefix("admission_"))
            raise
        except asyncio.CancelledError:
            io.metrics.admission_canceled.inc()
            raise
        io.metrics.admission_wait.observe(io.clock() - started_at)
        return ticket

    async def _read_body(self, room: BodyRoom, most: int) -> None:
        head, downstream = self._head, self._downstream
        if not head.has_body:
            return
        expects = head.is_http11 and b"expect" in head.values
        if expects and not downstream.has_body_bytes:
            downstream.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        ready = downstream.begin_body(room, most)
        try:
            if ready is not None:
                await ready
        finally:
            self._record.bytes_in = downstream.body_received

    async def _prepare(self, endpoint: Endpoint) -> RoutingView:
        io, record = self._io, self._record
        room = self._room
        assert room is not None
        self._job = io.director.job(endpoint, room, record.bytes_in)
        view = await io.director.prepare(self._job)
        self._view = view
        record.prepared_at = io.clock()
        record.job_run_s = sum(view.stage_ns) / 1e9
        record.model, record.is_stream = view.model, view.wants_stream
        record.model_label = io.director.model_label(view.model)
        record.routed = io.metrics.routed(record.model_label, endpoint.label, view.wants_stream)
        io.metrics.stage_prepare(record.prepared_at - record.body_at)
        return view

    async def _ask_upstream(self, placement: Placement, view: RoutingView) -> ResponseHead:
        """Send the request to the chosen upstream; return its response head."""
        io, head, upstream = self._io, self._head, placement.upstream
        assert self._room is not None
        key = upstream.api_key
        address, authority = io.pool.target(upstream)
        request = upstream_head(
            head,
            base_path=upstream.base_path,
            authority=authority,
            fields=forwarded_fields(head, passes_credentials=key is None),
            body_bytes=self._record.bytes_in,
            request_id=self._record.request_id,
            api_key=key,
            sends_x_api_key=key is not None and head.path.startswith("/v1/messages"),
        )
        body = self._room.body[: self._record.bytes_in]
        try:
            response = await self._exchange_heads(address, request, body, needs_fresh=view.creates_state)
        except UpstreamFailure as failure:
            io.metrics.attempt_failed(_attempt_error(failure))
            raise _as_error(failure, upstream.url) from failure
        io.metrics.upstream_response(response.status)
        io.metrics.stage_upstream_head(self._record.head_at - self._record.placed_at)
        return response

    async def _exchange_heads(
        self, address: Address, request: bytes, body: memoryview | None, needs_fresh: bool
    ) -> ResponseHead:
        """Write the request on an idle connection, or a fresh one; a stale idle one is replaced once."""
        io, method = self._io, self._head.method
        connection = None if needs_fresh else io.pool.try_idle(address)
        if connection is not None:
            self._record.is_reused = True
            try:
                return await self._write_request(connection, method, request, body)
            except UpstreamFailure as failure:
                if failure.has_response_bytes or failure.code != "upstream_connection_failed":
                    raise
                io.metrics.reuse_retries.inc()
                self._record.is_reused = False
        connection = await io.pool.connect(address)
        if self._record.is_client_gone:
            connection.close()
            raise asyncio.CancelledError
        return await self._write_request(connection, method, request, body)

    async def _write_request(
        self, connection: UpstreamConnection, method: str, request: bytes, body: memoryview | None
    ) -> ResponseHead:
        self._connection = connection
        waiting = connection.start(method, request, body)
        first_byte_s = self._io.settings.first_byte_timeout_secs
        self._first_byte_deadline = self._io.clock() + first_byte_s if first_byte_s else 0.0
        response = await waiting
        self._record.head_at = self._io.clock()
        return response

    async def _relay_response(self, label: str, response: ResponseHead, authority: str) -> None:
        io, head, connection = self._io, self._head, self._connection
        assert connection is not None
        self._response = response
        self._record.status = response.status
        framing, line = _framing(head, response)
        self._closes = (
            not head.keeps_alive
            or framing == "close"
            or io.is_draining
            or self._downstream.must_close_after()
        )
        is_encoded = response.values.get(b"content-encoding", b"identity").lower() != b"identity"
        is_ok = 200 <= response.status < 300
        api = _STREAM_API.get(label, "") if is_ok and not is_encoded else ""
        sse = SseRelay(api) if response.is_sse and response.has_body else None
        relay = self._relay = Relay(
            self._downstream,
            connection,
            framing=framing,
            event_dialect=_CONTRACT.get(label) if api else None,
            sse=sse,
            must_end=label != "generate",
            observes_body=sse is None and is_ok and not is_encoded and label != "other",
        )
        if is_encoded:
            io.metrics.observation_skipped("content_encoding")
        if connection.is_sent:
            self._release_room()  # no retry can follow once the head has gone out
        io.metrics.response(response.status, "")
        self._record.outcome = await relay.run(
            downstream_head(
                response,
                request_id=self._record.request_id,
                date=io.date.value(),
                framing=line,
                closes=self._closes,
                upstream_authority=authority,
                extra=self._route_fields(),
            )
        )
        self._closes = self._closes or relay.is_cut

    def _route_fields(self) -> tuple[tuple[bytes, bytes], ...]:
        placement = self._placement
        if placement is None or not self._io.settings.route_headers:
            return ()
        return (
            (b"x-mesh-upstream", placement.upstream.url.encode("latin-1")),
            (b"x-mesh-attempts", b"1"),
            (b"x-mesh-route-reason", placement.reason.encode("latin-1")),
        )

    async def _serve_by_controller(self) -> None:
        """Relay an admin route to the controller, by the same code that relays inference."""
        io, head = self._io, self._head
        room = self._room = await io.director.reserve(content_length_of(head))
        if head.content_length is not None and head.content_length > MAX_ADMIN_BODY_BYTES:
            raise MeshError("body_too_large", "The body of an admin request may have 1 MiB.")
        await self._read_body(room, MAX_ADMIN_BODY_BYTES)
        request = upstream_head(
            head,
            base_path="",
            authority="controller",
            fields=forwarded_fields(head, passes_credentials=True) + b"x-mesh-client: 1\r\n",
            body_bytes=self._record.bytes_in if head.has_body else None,
            request_id=self._record.request_id,
            api_key=None,
            sends_x_api_key=False,
        )
        self._request_deadline = io.clock() + 10.0
        body = self._room.body[: self._record.bytes_in] if self._room is not None else None
        try:
            response = await self._exchange_heads(io.controller, request, body, needs_fresh=False)
        except UpstreamFailure as failure:
            raise MeshError(
                "controller_unavailable", "The controller is being restarted.", cause=failure.cause
            ) from failure
        await self._relay_response("other", response, "controller")

    # ---------------------------------------------------------------------------------- local answers

    def _answer(self, status: int, body: bytes, fields: tuple[tuple[bytes, bytes], ...] = ()) -> None:
        io, head = self._io, self._head
        self._record.status = status
        self._closes = not head.keeps_alive or io.is_draining or self._downstream.must_close_after()
        self._record.outcome = "completed"
        self._record.bytes_out = len(body)
        io.metrics.response(status, "")
        self._downstream.write(
            local_answer(
                status,
                body,
                request_id=self._record.request_id,
                date=io.date.value(),
                closes=self._closes,
                is_head=head.method == "HEAD",
                extra=fields,
            )
        )

    def _answer_error(self, error: MeshError) -> None:
        io, head = self._io, self._head
        self._record.error_code = error.code
        self._record.outcome = "failed"
        if error.cause:
            io.log.warning(
                "request_failed", request_id=self._record.request_id, code=error.code, cause=error.cause
            )
        if self._relay is not None or self._record.is_client_gone:
            self._downstream.abort()  # a head has gone out already: only a cut is truthful now
            return
        self._record.status = error.status
        self._closes = (
            error.is_closing or not head.keeps_alive or io.is_draining or self._downstream.must_close_after()
        )
        body = error_body(
            dialect_of_path(head.path), error.code, error.status, error.message, self._record.request_id
        )
        self._record.bytes_out = len(body)
        io.metrics.response(error.status, error.code)
        self._downstream.write(
            local_answer(
                error.status,
                body,
                request_id=self._record.request_id,
                date=io.date.value(),
                closes=self._closes,
                is_head=head.method == "HEAD",
                extra=error_fields(error) + self._route_fields(),
            )
        )

    # -------------------------------------------------------------------------------- events from outside

    def client_gone(self, cause: str) -> None:
        """The client left: the upstream learns it at once, everything held is given back."""
        if self._record.is_client_gone:
            return
        self._record.is_client_gone = True
        if self._connection is not None:
            self._connection.close()
        if self._task is not None:
            self._task.cancel()

    def client_paused(self) -> None:
        if self._relay is not None:
            self._relay.pause()

    def client_resumed(self) -> None:
        if self._relay is not None:
            self._relay.resume()

    def check_timers(self, now: float) -> None:
        """Act on timers of the upstream side; the process calls this several times a second."""
        connection = self._connection
        if connection is None or not connection.is_busy or connection.is_complete:
            return
        silence = now - connection.last_byte_at
        if self._response is None:
            if self._first_byte_deadline and now > self._first_byte_deadline and connection.is_sent:
                connection.fail("upstream_timeout", "first-byte timer")
            elif self._request_deadline and now > self._request_deadline:
                connection.fail("upstream_timeout", "request timer")
            elif not connection.is_sent and silence > self._io.settings.stream_idle_timeout_secs:
                connection.fail("upstream_timeout", "the upstream takes no request bytes")
            return
        if connection.is_paused:
            return
        if silence > self._io.settings.stream_idle_timeout_secs:
            connection.fail("upstream_timeout", "stream idle timer")
        elif not self._response.is_sse and self._request_deadline and now > self._request_deadline:
            connection.fail("upstream_timeout", "request timer")

    def cut(self) -> None:
        """End the request because meshd itself ends (the grace period is over)."""
        if self._relay is not None and self._connection is not None:
            self._connection.fail("admission_closed", "the grace period is over")
        elif self._task is not None:
            self._task.cancel()

    # ------------------------------------------------------------------------------------------ finish

    def _finish(self) -> None:
        """Give everything back, count, and let the client's connection go on; exactly once."""
        io = self._io
        if self._connection is not None:
            io.pool.release(self._connection)
        if self._placement is not None:
            io.director.release(self._placement)
        self._release_room()
        if self._ticket is not None:
            self._ticket.release()
        io.exchanges.discard(self)
        try:
            self._account()
        except Exception as error:  # a fault in counting must not cost the client its connection
            self._log_fault(error)
        if not self._record.is_client_gone:
            self._downstream.finish(self._closes)

    def _account(self) -> None:
        io, record, relay, head = self._io, self._record, self._relay, self._head
        now = io.clock()
        count(io.metrics, record, relay, now)
        if relay is not None and relay.failure is not None and record.endpoint:
            io.metrics.stream_failure(record.endpoint, _stream_failure(relay.failure))
        if not io.log.wants_access(record.is_routine):
            return
        write_access_line(
            io.log,
            record,
            relay,
            now,
            client=self._downstream.peer,
            io_process=io.io_process,
            method=head.method,
            path=head.path,
            is_http11=head.is_http11,
        )

    def _log_fault(self, error: Exception) -> None:
        self._io.log.error(
            "internal_error",
            request_id=self._record.request_id,
            error=repr(error),
            trace="".join(traceback.format_exception(error)),
        )

    def _release_room(self) -> None:
        """Give the body back; after a job that is when no prepare worker can touch it any more."""
        room, self._room = self._room, None
        if room is not None:
            room.release(self._job)


def _framing(head: RequestHead, response: ResponseHead) -> tuple[str, bytes]:
    """Return the kind of framing towards the client, and its header line."""
    if not response.has_body:
        if response.content_length is None:
            return "none", b""
        return "none", b"content-length: %d\r\n" % response.content_length
    if response.content_length is not None:
        return "length", b"content-length: %d\r\n" % response.content_length
    if head.is_http11:
        return "chunked", b"transfer-encoding: chunked\r\n"
    return "close", b""


def _attempt_error(failure: UpstreamFailure) -> str:
    if (
        failure.code == "upstream_connection_failed"
        and not failure.was_sent
        and not failure.has_response_bytes
    ):
        return "connect"
    return _ATTEMPT_ERRORS.get(failure.code, "reset")


def _stream_failure(failure: UpstreamFailure) -> str:
    if failure.cause == "no end of stream":
        return "no_end"
    return _STREAM_FAILURES.get(failure.code, "cut")


def _as_error(failure: UpstreamFailure, url: str) -> MeshError:
    """Translate a failure of the upstream into the client's error; addresses go to the log alone."""
    return MeshError(failure.code, _FAILURE_MESSAGES[failure.code], cause=f"{url}: {failure.cause}")
