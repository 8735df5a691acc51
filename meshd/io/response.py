"""What a client is sent of an upstream's response: its framing, and what is observed as it passes."""

from __future__ import annotations

from meshd.api.endpoints import Endpoint, StreamApi
from meshd.io.account import Record
from meshd.io.downstream import DownstreamConnection
from meshd.io.http1 import RequestHead, ResponseHead
from meshd.io.relay import Relay
from meshd.io.sse import SseRelay
from meshd.io.upstream import UpstreamConnection


def downstream_framing(head: RequestHead, response: ResponseHead) -> tuple[str, str]:
    """Return the kind of framing towards the client (RFC 9112 §6.3), and its header line."""
    if response.content_length is not None:
        return ("length" if response.has_body else "none"), response.length_line
    if not response.has_body:
        return "none", ""
    if head.is_http11:
        return "chunked", "transfer-encoding: chunked\r\n"
    return "close", ""


def make_relay(
    endpoint: Endpoint | None,
    response: ResponseHead,
    record: Record,
    downstream: DownstreamConnection,
    upstream: UpstreamConnection,
    framing: str,
) -> Relay:
    """Choose what is observed of the response, and note it; of an admin route (no endpoint) nothing is."""
    is_ok = 200 <= response.status < 300
    is_observed = endpoint is not None and endpoint.is_observed and is_ok
    if response.is_encoded and is_observed and response.has_body:
        record.skipped_observation = "content_encoding"
        is_observed = False
    api: StreamApi = endpoint.stream_api if endpoint is not None and is_observed else ""
    sse = SseRelay(api) if response.is_sse and response.has_body else None
    record.is_messages = api == "messages"
    return Relay(
        downstream,
        upstream,
        framing=framing,
        event_dialect=api or None,
        sse=sse,
        must_end=endpoint is not None and endpoint.ends_with_marker,
        observes_body=sse is None and is_observed,
    )
