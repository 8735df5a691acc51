"""The life of one request, from its head to its outcome, as straight-line code.

    head → checks → ticket → body memory → body → view → placement → upstream → relay → finish

`run` is one strand per request (strand.py). Whatever happens, `_finish` runs exactly once and gives
everything back: load, connection, ticket, slot; its record goes to the ledger, which counts and logs it later
(account.py), and the client's connection goes on. Two events come from outside: the client leaves
(`client_gone`), and timers (`check_timers`).
"""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Collection
from typing import TYPE_CHECKING

from meshd.api.endpoints import Endpoint
from meshd.api.view import RoutingView
from meshd.errors import MeshError
from meshd.io.answers import LocalAnswer
from meshd.io.attempts import Attempts, report_answer
from meshd.io.controller_relay import (
    CONTROLLER_AUTHORITY,
    CONTROLLER_SECS,
    MAX_ADMIN_BODY_BYTES,
    ask_controller,
)
from meshd.io.downstream import DownstreamConnection
from meshd.io.explain import explain, read_question
from meshd.io.fan_out import FanOut, ResourceRequest
from meshd.io.first_upstream import ask_first_upstream
from meshd.io.headers import downstream_head
from meshd.io.http1 import Field, RequestHead, ResponseHead
from meshd.io.intake import Intake, wait_for_ticket
from meshd.io.leg import Leg
from meshd.io.prepared_answer import PreparedAnswer
from meshd.io.relay import Relay
from meshd.io.request_checks import (
    check_endpoint_head,
    check_length_and_expectation,
)
from meshd.io.response import downstream_framing, make_relay
from meshd.io.routes import Route, check_asking, check_reading
from meshd.strand import Promise

if TYPE_CHECKING:
    from meshd.admission.gate import Ticket
    from meshd.io.services import Services
    from meshd.prepare.job import Job


class Exchange(Intake):
    """One request on one client connection."""

    __slots__ = (
        "_closes",
        "_fan_out",
        "_is_starting",
        "_job",
        "_prepared",
        "_relay",
        "_ticket",
    )

    def __init__(self, io: Services, downstream: DownstreamConnection, head: RequestHead) -> None:
        super().__init__(io, downstream, head)
        self._is_starting = True
        self._ticket: Ticket | None = None
        self._job: Job | None = None
        self._prepared: PreparedAnswer | None = None
        self._fan_out: FanOut | None = None
        self._relay: Relay | None = None
        self._closes = False

    def __repr__(self) -> str:
        stages = (
            ("relay", self._relay),
            ("upstream", self.leg),
            ("prepare", self._job or self._prepared),
            ("body", self._room),
        )
        stage = next((name for name, part in stages if part is not None), "new")
        return f"Exchange({self._head.method} {self._head.path} {stage} {self.record.request_id})"

    def start(self) -> None:
        """Begin, within the call that brought the head."""
        self.begin(self.run())
        self._is_starting = False

    async def run(self) -> None:
        """Serve the request; returns when everything it held has been given back."""
        io, head = self._io, self._head
        try:
            endpoint = head.facts.endpoint
            if endpoint is None:
                route = io.routes.find(head.path)
                if route is not None:
                    await self._serve_route(route)
                    return
                endpoint = self._find_endpoint()
            self._begin(endpoint.path, endpoint.id_prefix)
            if endpoint.picks_by == "local" and not endpoint.has_prepare_job:
                self._answer(*io.routes.models())
                return
            self.record.endpoint = endpoint.label
            check_endpoint_head(endpoint, head, io.max_body_bytes)
            self._ticket = io.director.try_admit() or await wait_for_ticket(io)
            io.metrics.tickets_granted.inc()
            if endpoint.picks_by == "fan_out":
                await self._serve_resource(endpoint, head.facts.resource_id)
            elif endpoint.picks_by == "local":
                await self._serve_prepared(endpoint)
            else:
                await self._serve_endpoint(endpoint)
        except MeshError as error:
            self._answer_error(error)
        except asyncio.CancelledError:
            if not self.record.is_client_gone:
                self._answer_error(MeshError("admission_closed", "The server is shutting down."))
        except Exception as fault:
            self._log_fault(fault)
            self._answer_error(MeshError("internal_error", "Something went wrong here."))
        finally:
            self._finish()

    # -------------------------------------------------------------------------------- straight-line life

    def _find_endpoint(self) -> Endpoint:
        head, endpoints = self._head, self._io.endpoints
        try:
            endpoint, resource_id = endpoints.find(head.method, head.path)
        except MeshError:
            self._begin(endpoints.template_of(head.path), "req-")
            raise
        head.facts.endpoint, head.facts.resource_id = endpoint, resource_id
        return endpoint

    async def _serve_route(self, route: Route) -> None:
        """Answer what is no inference: health, information, and what the controller answers."""
        io, head = self._io, self._head
        self._begin(route.label, "req-")
        self.record.is_routine = route.health is not None
        if route.is_relayed:
            io.routes.admit(head.method, self._downstream.peer)
            await self._serve_by_controller()
        elif route.kind == "explain":
            check_asking(head.method)
            io.routes.admit(head.method, self._downstream.peer)
            await self._serve_explanation()
        elif route.kind == "first_upstream":
            check_reading(head.method)
            await self._relayed(None, *await ask_first_upstream(io, self, head))
        else:
            self._answer(*io.routes.answer(route, head.method))

    async def _serve_endpoint(self, endpoint: Endpoint) -> None:
        """From the body to the response; the head has passed and the ticket is held."""
        io, record = self._io, self.record
        arriving = self._begin_body(io.max_body_bytes)
        if arriving is not None:
            await arriving
            self._note_body(io.clock())
        room = self._room
        assert room is not None
        if endpoint.has_prepare_job:
            job = self._job = record.job = io.director.job(endpoint, room, record.bytes_in)
            view = await io.director.prepare(job)
            if isinstance(view, MeshError):
                raise view
            assert isinstance(view, RoutingView)
        else:
            view = RoutingView("")
        self._note_view(endpoint, view)

        attempts = Attempts(io, self, self._head, endpoint, view, room)
        response = await attempts.run()
        ending = self._begin_relay(endpoint, response, attempts.authority)
        if ending is not None:
            await ending
        if self._relay is not None:
            report_answer(io, self, response.status, self._relay, attempts.began_at)

    async def _serve_prepared(self, endpoint: Endpoint) -> None:
        """A prepare worker writes the whole answer; no upstream is asked."""
        io, record = self._io, self.record
        room = await self._receive_body(io.max_body_bytes)
        prepared = self._prepared = PreparedAnswer(
            io.director, endpoint, room, record.bytes_in, io.settings.prepare_max_tokenize_bytes
        )
        self._room = None
        answer = await prepared.prepare()
        record.job = prepared.job
        self._note_view(endpoint, RoutingView(answer.model))
        self._closes = self._must_close()
        await prepared.send(answer, self._downstream, self._local_answer())

    async def _serve_resource(self, endpoint: Endpoint, resource_id: str) -> None:
        """A stored response may lie on any origin: all are asked, the best answer is relayed."""
        io, record = self._io, self.record
        record.ticket_at = io.clock()
        record.routed = io.metrics.routed(record.model_label, endpoint.label, False)
        origins = io.director.origins(endpoint)
        request = ResourceRequest(self._head, endpoint, resource_id, record.request_id, record)
        deadline = record.ticket_at + io.request_timeout_s
        fan_out = self._fan_out = FanOut(io, io.director, request, deadline)
        self.leg, response, authority, self.placement = await fan_out.run(origins)
        self._fan_out = None
        record.placement = self.placement
        record.upstream, record.reason = self.placement.upstream.url, self.placement.reason
        record.attempts = len(origins)
        await self._relayed(endpoint, response, authority)
        if self._relay is not None:
            report_answer(io, self, response.status, self._relay, record.ticket_at)

    def _begin(self, label: str, id_prefix: str) -> None:
        io, record = self._io, self.record
        record.label = label
        record.request_id = io.request_ids.choose(self._head, id_prefix)
        counted = self._head.facts.counted
        if counted is None:
            counted = self._head.facts.counted = io.metrics.requests(label, self._head.method)
        counted.heads.inc()
        record.duration = counted.duration

    def _note_view(self, endpoint: Endpoint, view: RoutingView) -> None:
        io, record = self._io, self.record
        record.prepared_at = io.clock()
        if record.job is not None:
            record.job_run_s = record.job.run_s
        record.model, record.is_stream = view.model, view.wants_stream
        record.model_label = io.director.model_label(view.model)
        record.routed = io.metrics.routed(record.model_label, endpoint.label, view.wants_stream)

    async def _relayed(self, endpoint: Endpoint | None, response: ResponseHead, authority: str) -> None:
        ending = self._begin_relay(endpoint, response, authority)
        if ending is not None:
            await ending

    def _begin_relay(
        self, endpoint: Endpoint | None, response: ResponseHead, authority: str
    ) -> Promise[str] | None:
        """Relay the response; None if it was all there, and is relayed."""
        io, head, record, leg = self._io, self._head, self.record, self.leg
        assert leg is not None and leg.connection is not None
        record.head_at = leg.connection.last_byte_at
        record.status = response.status
        framing, line = downstream_framing(head, response)
        self._closes = framing == "close" or self._must_close()
        if io.cors is not None:
            response = io.cors.relayed(head, response)
        relay = self._relay = make_relay(
            endpoint, response, record, self._downstream, leg.connection, framing
        )
        if not leg.connection.is_early:
            self._release_room()  # no retry can follow once the head has gone out
        io.metrics.response(response.status, "")
        return relay.begin(
            downstream_head(
                response,
                request_id=record.request_id,
                framing=line,
                closes=self._closes,
                upstream_authority=authority,
                date="" if response.is_dated else io.date.line(record.head_at),
                extra=self._extra_fields(),
            )
        )

    def _must_close(self) -> bool:
        return not self._head.keeps_alive or self._io.is_draining or self._downstream.must_close_after()

    def _extra_fields(self) -> tuple[Field, ...]:
        """What `--cors-allowed-origins` and `--route-headers` add to a response."""
        cors, record = self._io.cors, self.record
        fields = () if cors is None else cors.response_fields(self._head)
        headers = self._io.route_headers
        return fields if headers is None else fields + headers.fields(record)

    async def _serve_by_controller(self) -> None:
        """Relay an admin route to the controller, by the same code that relays inference."""
        io = self._io
        check_length_and_expectation(self._head, MAX_ADMIN_BODY_BYTES)
        room = await self._receive_body(MAX_ADMIN_BODY_BYTES)
        leg = self.leg = Leg(io, io.clock() + CONTROLLER_SECS)
        response = await ask_controller(leg, io, self._head, self.record, room)
        await self._relayed(None, response, CONTROLLER_AUTHORITY)

    async def _serve_explanation(self) -> None:
        """Tell where a request would go; its body takes the place of the one that asks."""
        io = self._io
        check_length_and_expectation(self._head, MAX_ADMIN_BODY_BYTES)
        room = await self._receive_body(MAX_ADMIN_BODY_BYTES)
        question = read_question(io, room, self.record.bytes_in)
        view = RoutingView("")
        if question.endpoint.has_prepare_job:
            job = self._job = io.director.job(question.endpoint, room, question.body_bytes)
            prepared = await io.director.prepare(job)
            if isinstance(prepared, MeshError):
                raise prepared
            assert isinstance(prepared, RoutingView)
            view = prepared
        self._answer(*await explain(io, question, view))

    # ---------------------------------------------------------------------------------- local answers

    def _answer(self, status: int, body: bytes, fields: tuple[Field, ...] = ()) -> None:
        self._closes = self._must_close()
        self._local_answer().success(status, body, fields)

    def _answer_error(self, error: MeshError) -> None:
        record = self.record
        if error.cause:
            self._io.log.warning(
                "request_failed", request_id=record.request_id, code=error.code, cause=error.cause
            )
        is_begun = self._relay is not None or (self._prepared is not None and self._prepared.has_begun)
        if is_begun or record.is_client_gone:
            record.error_code, record.outcome = error.code, "body_error"
            self._downstream.abort()  # a head has gone out already: only a cut is truthful now
            return
        self._closes = error.is_closing or self._must_close()
        self._local_answer().error(error)

    def _local_answer(self) -> LocalAnswer:
        return LocalAnswer(
            self._io, self._downstream, self._head, self.record, self._closes, self._extra_fields()
        )

    # -------------------------------------------------------------------------------- events from outside

    def client_gone(self, cause: str) -> None:
        """The client left: the upstream learns it at once, everything held is given back.

        Not if the response has ended: a client that leaves on its last byte got it whole, or broken, and
        the task is about to say so. One client in ten is as quick as that.
        """
        relay = self._relay
        if self.is_over or self.record.is_client_gone or (relay is not None and relay.outcome):
            return
        self.record.is_client_gone = True
        if self.leg is not None:
            self.leg.close()
        self._cancel()

    def client_paused(self) -> None:
        if self._relay is not None:
            self._relay.pause()

    def client_resumed(self) -> None:
        if self._relay is not None:
            self._relay.resume()
        elif self._prepared is not None:
            self._prepared.resume()

    def check_timers(self, now: float) -> None:
        """Act on timers of the upstream side; the process calls this several times a second."""
        if self.leg is not None:
            self.leg.check_timers(now)

    def cut(self) -> None:
        """End the request because meshd itself ends (the grace period is over)."""
        if self._relay is not None and self.leg is not None:
            self.leg.fail("admission_closed", "the grace period is over")
        else:
            self._cancel()

    def cut_off(self, removed: Collection[str], cause: str) -> None:
        """End what upstreams with these ids are doing for the request, as if they had closed it."""
        if self._fan_out is not None:
            self._fan_out.cut_off(removed, cause)
        elif self.placement is not None and self.leg is not None and self.placement.upstream.id in removed:
            self.leg.cut_off(cause)

    def _cancel(self) -> None:
        if self._job is not None:
            self._io.director.cancel(self._job)
        elif self._prepared is not None:
            self._prepared.cancel()
        self.cancel()

    # ------------------------------------------------------------------------------------------ finish

    def _finish(self) -> None:
        """Give everything back, hand the record in, let the client's connection go on; exactly once."""
        io = self._io
        if self.leg is not None:
            self.leg.release()
        if self.placement is not None:
            io.director.release(self.placement)
        self._release_room()
        if self._prepared is not None:
            self._prepared.release()
        if self._ticket is not None:
            self._ticket.release()
        io.exchanges.discard(self)
        if self._relay is not None:
            self._closes = self._closes or self._relay.is_cut
        self._hand_in()
        if self.record.is_client_gone:
            return
        if self._is_starting:  # else the requests of a pipeline would run within one another
            io.loop.call_soon(self._downstream.finish, self._closes)
        else:
            self._downstream.finish(self._closes, self.record.finished_at)

    def _hand_in(self) -> None:
        io, record = self._io, self.record
        record.finished_at = io.clock()
        if not record.bytes_in:  # else it was received whole
            record.bytes_in = self._downstream.body_received
        record.client = self._downstream.peer
        record.head = self._head
        relay = record.relay = self._relay
        if relay is not None and not record.outcome:
            record.outcome = relay.outcome
        io.ledger.add(record)

    def _log_fault(self, error: Exception) -> None:
        self._io.log.error(
            "internal_error",
            request_id=self.record.request_id,
            error=repr(error),
            trace="".join(traceback.format_exception(error)),
        )

    def _release_room(self) -> None:
        """Give the body back; after a job that is when no prepare worker can touch it any more."""
        room, self._room = self._room, None
        if room is not None:
            room.release(self._job)
