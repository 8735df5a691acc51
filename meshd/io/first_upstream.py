"""Ask one upstream about itself: ``/get_model_info`` and ``/model_info``. One attempt."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshd.io.attempts import Holder
from meshd.io.headers import forwarded_fields, upstream_head
from meshd.io.leg import Leg, as_error, error_type_of
from meshd.io.tracing import NO_TRACE
from meshd.io.upstream import UpstreamFailure

if TYPE_CHECKING:
    from meshd.io.http1 import RequestHead, ResponseHead
    from meshd.io.services import Services


async def ask_first_upstream(io: Services, holder: Holder, head: RequestHead) -> tuple[ResponseHead, str]:
    """Send the request to the first available upstream; return its response head and its authority.

    Load and leg are the holder's to give back. A body is not passed on. Raises ``MeshError``.
    """
    record = holder.record
    upstream = io.director.first_available()
    placement = holder.placement = record.placement = io.director.hold(upstream)
    record.upstream, record.reason, record.attempts = upstream.url, placement.reason, 1
    address, authority = io.pool.target(upstream)
    key = upstream.api_key
    traced, trace_fields = NO_TRACE if io.tracing is None else io.tracing.leg(record, head, upstream.url)
    request = upstream_head(
        head,
        base_path=upstream.base_path,
        authority=authority,
        fields=forwarded_fields(head, key is None, trace_fields),
        body_bytes=None,
        request_id=record.request_id,
        api_key=key,
        sends_x_api_key=False,
    )
    leg = holder.leg = Leg(io, io.clock() + io.request_timeout_s)
    try:
        response = await leg.ask(address, head.method, request, [], needs_fresh=False)
    except UpstreamFailure as failure:
        kind = error_type_of(failure)
        io.metrics.attempt_failed(kind)
        if traced is not None:
            traced.error = kind
        raise as_error(failure, upstream.url) from failure
    finally:
        if traced is not None:
            traced.end(io.clock(), leg)
    io.metrics.upstream_response(response.status)
    return response, authority
