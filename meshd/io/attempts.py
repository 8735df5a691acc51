"""The attempts of one request at an upstream, from placement to the response head that is relayed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

from meshd.api.rank_body import Buffer, ranked_body
from meshd.io.headers import forwarded_fields, upstream_head
from meshd.io.leg import Leg, as_error, error_type_of
from meshd.io.upstream import UpstreamFailure

if TYPE_CHECKING:
    from meshd.api.endpoints import Endpoint
    from meshd.api.view import RoutingView
    from meshd.director import BodyRoom
    from meshd.io.account import Record
    from meshd.io.http1 import RequestHead, ResponseHead
    from meshd.io.services import Services
    from meshd.routing.placement import Placement

BODILESS: Final = ("GET", "HEAD", "DELETE")  # without a body these go out without a length field


class Holder(Protocol):
    """The exchange: it owns the leg and the placement of the moment, and gives back what it finds there."""

    leg: Leg | None
    placement: Placement | None
    record: Record


class Attempts:
    """The attempts of one request; ``room`` holds its whole body until the last of them has it sent."""

    __slots__ = ("_endpoint", "_head", "_holder", "_io", "_room", "_view")

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

    def __repr__(self) -> str:
        return f"Attempts({self._endpoint.name} {self._holder.leg!r})"

    async def run(self) -> tuple[ResponseHead, str]:
        """Return the response head to relay, and the authority of the upstream that sent it.

        Its leg is the holder's. Raises ``MeshError`` when there is none.
        """
        io, record = self._io, self._holder.record
        placement = self._holder.placement = io.director.place(self._endpoint, self._view)
        record.placed_at = io.clock()
        record.upstream, record.reason, record.attempts = placement.upstream.url, placement.reason, 1
        try:
            response, authority = await self._ask(placement)
        except UpstreamFailure as failure:
            io.metrics.attempt_failed(error_type_of(failure))
            raise as_error(failure, placement.upstream.url) from failure
        io.metrics.upstream_response(response.status)
        if response.status >= 500:
            io.metrics.attempt_failed("status_5xx")
        return response, authority

    async def _ask(self, placement: Placement) -> tuple[ResponseHead, str]:
        """Send the request to the chosen upstream; raise UpstreamFailure."""
        io, head, record, view = self._io, self._head, self._holder.record, self._view
        upstream, endpoint = placement.upstream, self._endpoint
        address, authority = io.pool.target(upstream)
        key = upstream.api_key
        client_body = self._room.body[: record.bytes_in]
        rank = upstream.rank_for(endpoint) if upstream.dp_rank is not None else None
        buffers: list[Buffer] = [client_body]
        length = record.bytes_in
        if rank is not None:
            buffers, length = ranked_body(view, client_body, rank)
        request = upstream_head(
            head,
            base_path=upstream.base_path,
            authority=authority,
            fields=forwarded_fields(head, passes_credentials=key is None),
            body_bytes=length if length or head.method not in BODILESS else None,
            request_id=record.request_id,
            api_key=key,
            sends_x_api_key=key is not None and endpoint.dialect == "messages",
        )
        leg = self._holder.leg = Leg(io, record.prepared_at + io.settings.request_timeout_secs)
        try:
            return await leg.ask(address, head.method, request, buffers, view.creates_state), authority
        finally:
            record.is_reused = leg.is_reused
