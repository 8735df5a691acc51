"""The attempts of one request, from placement to the response head that is relayed.

One loop: place, ask, and, if what came back may be asked for again, wait and go round. Everything here ends
before the first byte of a response has gone to the client, and the body of the request stays in its slot.

    place ──> ask ──> a head that is final ─────────────────────────> relayed
      ^        └────> a failure, or a head that may be retried
      │                  └─ attempts, time and budget left? ─ no ──> what there is goes to the client
      └── wait: back-off, or the end of a cool-down ── yes

The load of a failed attempt is given back before the wait. An answer that may be retried is *kept*
meanwhile, on its connection and with its body unread (the connection bounds what it holds): if no further
attempt can be made the client gets it unchanged. When the next attempt begins, the connection goes back to
the pool if that body is there whole, and is closed if not.

Each failure and each final answer is reported to the breaker once: a failure when it is seen, an answer when
its body has ended. Not reported means neutral.
"""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING, Final, NamedTuple

from meshd.api.rank_body import Buffer, ranked_body
from meshd.io.headers import forwarded_fields, upstream_head
from meshd.io.leg import Leg, as_error, error_type_of
from meshd.io.session_assignment import assigned_upstream, session_key
from meshd.io.upstream import UpstreamFailure
from meshd.routing.availability import NoneAvailable
from meshd.routing.placement import SessionUnassigned
from meshd.routing.retry_rules import BUSY, FAILURES
from meshd.strand import Strand

if TYPE_CHECKING:
    from meshd.api.endpoints import Endpoint
    from meshd.api.view import RoutingView
    from meshd.director import BodyRoom
    from meshd.io.account import Record
    from meshd.io.http1 import RequestHead, ResponseHead
    from meshd.io.relay import Relay
    from meshd.io.services import Services
    from meshd.io.tracing import LegTrace
    from meshd.routing.conditions import Outcome
    from meshd.routing.placement import Placement
    from meshd.routing.upstream import Upstream

BODILESS: Final = ("GET", "HEAD", "DELETE")  # without a body these go out without a length field
_SAFE_METHODS: Final = ("GET", "HEAD")


class Holder(Strand):
    """The exchange: it owns the leg and the placement of the moment, and gives back what it finds there."""

    __slots__ = ("leg", "placement", "record")

    def __init__(self, loop: asyncio.AbstractEventLoop, record: Record) -> None:
        super().__init__(loop)
        self.leg: Leg | None = None
        self.placement: Placement | None = None
        self.record = record


class _Kept(NamedTuple):
    """An answer that is relayed if no further attempt is made; its leg is the holder's."""

    placement: Placement
    response: ResponseHead
    authority: str


class Attempts:
    """The attempts of one request; ``room`` holds its whole body until the last of them has it sent."""

    __slots__ = (
        "_deadline",
        "_endpoint",
        "_head",
        "_holder",
        "_io",
        "_kept",
        "_resets",
        "_room",
        "_traced",
        "_tried",
        "_tries",
        "_view",
        "authority",
        "began_at",
    )

    def __init__(
        self,
        io: Services,
        holder: Holder,
        head: RequestHead,
        endpoint: Endpoint,
        view: RoutingView,
        room: BodyRoom,
    ) -> None:
        self._io = io
        self._holder = holder
        self._head = head
        self._endpoint = endpoint
        self._view = view
        self._room = room
        self._deadline = holder.record.prepared_at + io.request_timeout_s
        self._traced: LegTrace | None = None
        self.authority = ""
        self.began_at = 0.0  # of the last attempt
        self._tries = 0  # attempts, and placements that found nobody
        self._tried: tuple[int, ...] = ()
        self._resets = 0
        self._kept: _Kept | None = None

    def __repr__(self) -> str:
        return f"Attempts({self._endpoint.name} tries={self._tries} {self._holder.leg!r})"

    async def run(self) -> ResponseHead:
        """Return the response head to relay; ``authority`` is of the upstream that sent it.

        Its leg and its placement are the holder's. Raises ``MeshError`` when there is none.
        """
        io, view, holder = self._io, self._view, self._holder
        if io.director.needs_session:
            view = self._view = view.for_session(session_key(self._head))
        while True:
            try:
                placement = self._place()
            except SessionUnassigned as unassigned:
                asking = assigned_upstream(io, view.session_key, unassigned.numbers)
                view.assigned = await asyncio.create_task(asking)  # it has a timeout
                continue
            except NoneAvailable as none:
                if await self._wait_for_upstream(none.wait_s):
                    continue
                if self._kept is None:
                    raise
                return self._take_back(self._kept)
            address, self.authority = io.pool.target(placement.upstream)
            request, buffers = self._message(placement.upstream)
            leg = holder.leg = Leg(io, self._deadline)
            # After a reset a second connection is not risked too: each attempt would count twice at servers.
            needs_fresh = view.creates_state or self._resets > 0
            failure: UpstreamFailure | None = None
            try:
                response = await leg.ask(
                    address, self._head.method, request, buffers, needs_fresh, self.began_at
                )
            except UpstreamFailure as caught:
                failure = caught
            finally:
                holder.record.is_reused = leg.is_reused
                if self._traced is not None:
                    self._traced.end(io.clock(), leg)
            if failure is not None:
                self._note_failure(failure)
                if self._may_repeat(failure) and await self._wait_for_retry(placement):
                    continue
                raise as_error(failure, placement.upstream.url) from failure
            status = response.status
            io.metrics.upstream_response(status)
            if status < 400:
                return response
            self._note_error(placement, response)
            is_retried = io.director.retry_rules.is_retried(status) and self._is_repeatable()
            if not is_retried:
                return response
            self._kept = _Kept(placement, response, self.authority)
            if not await self._wait_for_retry(placement):
                return response

    # ------------------------------------------------------------------------------------ one attempt

    def _place(self) -> Placement:
        """Begin an attempt. Raises ``NoneAvailable``, or the ``MeshError`` of a placement without a cure."""
        io, holder, record = self._io, self._holder, self._holder.record
        placement = holder.placement = io.director.place(self._endpoint, self._view, self._tried)
        now = self.began_at = io.clock()
        self._tries += 1
        if record.attempts:
            io.metrics.retried(self._endpoint.label)
            io.metrics.leg_ended(record.upstream, record.leg_outcome)
            record.leg_outcome = ""
            self._kept = None
            if holder.leg is not None:
                holder.leg.release()
                holder.leg = None
        else:
            record.placed_at = now
            io.director.budget.note_first(now)
        record.attempts += 1
        record.upstream, record.reason = placement.upstream.url, placement.reason
        record.placement = placement
        return placement

    def _message(self, upstream: Upstream) -> tuple[bytes, list[Buffer]]:
        """Return head and body as the chosen upstream gets them; this begins its span, if there is one."""
        io, head, record = self._io, self._head, self._holder.record
        endpoint, key = self._endpoint, upstream.api_key
        length = record.bytes_in
        rank = upstream.rank_for(endpoint) if upstream.dp_rank is not None else None
        if rank is None:
            buffers: list[Buffer] = [self._room.content(length)]
        else:
            buffers, length = ranked_body(self._view, self._room.body[:length], rank)
        trace_fields = b""
        if io.tracing is not None:
            self._traced, trace_fields = io.tracing.leg(record, head, upstream.url)
        request = upstream_head(
            head,
            base_path=upstream.base_path,
            authority=self.authority,
            fields=forwarded_fields(head, key is None, trace_fields),
            body_bytes=length if length or head.method not in BODILESS else None,
            request_id=record.request_id,
            api_key=key,
            sends_x_api_key=key is not None and endpoint.dialect == "messages",
        )
        return request, buffers

    def _note_failure(self, failure: UpstreamFailure) -> None:
        kind = error_type_of(failure)
        self._io.metrics.attempt_failed(kind)
        if self._holder.record.trace is not None:
            self._holder.record.trace.failed(kind)
        self._report_failure()

    def _note_error(self, placement: Placement, response: ResponseHead) -> None:
        """Take in what an error status says of its upstream."""
        metrics, status = self._io.metrics, response.status
        if status >= 500:
            metrics.attempt_failed("status_5xx")
        if status in BUSY:
            advice = response.values.get(b"retry-after")
            kind = self._io.director.note_busy(placement.upstream, advice, self._io.clock())
            metrics.backpressure(placement.upstream.url, kind)
        elif status in FAILURES:
            self._report_failure()

    def _report_failure(self) -> None:
        holder, io = self._holder, self._io
        holder.record.leg_outcome = "failure"
        assert holder.placement is not None
        if not io.director.report(holder.placement, "failure", self.began_at, io.clock()):
            io.metrics.outcome_drops.inc()

    # ---------------------------------------------------------------------------------- the next one

    def _is_repeatable(self) -> bool:
        """Whether the request may be sent again once it has reached an upstream."""
        return not self._view.creates_state and (
            self._endpoint.is_repeatable or self._head.method in _SAFE_METHODS
        )

    def _may_repeat(self, failure: UpstreamFailure) -> bool:
        """Whether the request may be sent again after ``failure``.

        A server that dies of a whole request costs one more attempt and no further: the request must not
        walk through the fleet.
        """
        leg = self._holder.leg
        if leg is not None and leg.connection is not None and not self._is_repeatable():
            return False  # bytes of it may have been read
        if failure.code == "upstream_connection_failed" and failure.was_sent:
            self._resets += 1
            return self._resets == 1
        return True

    async def _wait_for_retry(self, placement: Placement) -> bool:
        """Wait until the next attempt may begin; False if there is to be none, which is known at once.

        If True the attempt has been given back, except for an answer that is kept.
        """
        io, rules = self._io, self._io.director.retry_rules
        retry, now = self._tries, io.clock()
        if retry >= rules.max_attempts:
            if rules.max_attempts > 1:
                io.metrics.retries_exhausted(self._endpoint.label)
            return False
        ready_s = io.director.ready_in_s(self._endpoint, self._view)
        if math.isinf(ready_s):
            ready_s = 0.0  # that may change; if not, the placement says so
        delay_s = max(io.director.retry_delay_s(retry), ready_s)
        if ready_s > rules.max_s or now + delay_s >= self._deadline:
            return False
        if not io.director.budget.try_retry(now):
            io.metrics.budget_exhausted.inc()
            return False
        io.metrics.backed_off(retry, delay_s)
        self._give_back(placement)
        await asyncio.sleep(delay_s)
        return True

    async def _wait_for_upstream(self, wait_s: float) -> bool:
        """Wait after a placement that found nobody; False if that is not worth while.

        ``wait_s``: to the end of a cool-down, which is no attempt; infinite if that is not what is amiss.
        """
        io, record, rules = self._io, self._holder.record, self._io.director.retry_rules
        now = io.clock()
        if math.isinf(wait_s):
            self._tries += 1
            if self._tries >= rules.max_attempts:
                return False
            wait_s = io.director.retry_delay_s(self._tries)
            io.metrics.backed_off(self._tries, wait_s)
        elif wait_s > rules.max_s:
            return False
        if now + wait_s >= self._deadline:
            return False
        await asyncio.sleep(wait_s)
        if not record.attempts:
            record.waited_s += io.clock() - now
        return True

    def _give_back(self, placement: Placement) -> None:
        io, holder = self._io, self._holder
        self._tried = (*self._tried, placement.upstream.number)
        holder.placement = None
        io.director.release(placement)
        if self._kept is None and holder.leg is not None:
            holder.leg.release()
            holder.leg = None

    def _take_back(self, kept: _Kept) -> ResponseHead:
        """Return to the answer of the last attempt, for there is no further one."""
        holder = self._holder
        assert holder.leg is not None
        if holder.leg.is_broken:
            failure = UpstreamFailure("upstream_connection_failed", "its kept answer broke", True, True)
            raise as_error(failure, kept.placement.upstream.url)
        lost = kept.placement
        holder.placement = self._io.director.hold(lost.upstream, lost.policy, lost.reason)
        self.authority = kept.authority
        return kept.response


def report_answer(io: Services, holder: Holder, status: int, relay: Relay, began_at: float) -> None:
    """Report an answer that was relayed to its end, or to the failure of its upstream; once at the most."""
    record, placement = holder.record, holder.placement
    if placement is None or record.leg_outcome:
        return
    outcome = record.leg_outcome = outcome_of(status, relay)
    if not io.director.report(placement, outcome, began_at, relay.ended_at):
        io.metrics.outcome_drops.inc()


def outcome_of(status: int, relay: Relay) -> Outcome:
    """Return what an answer that has ended says of its upstream."""
    if relay.failure is not None:
        return "neutral" if relay.failure.code == "admission_closed" else "failure"
    return "success" if 200 <= status < 300 else "neutral"
