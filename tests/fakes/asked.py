"""A request on one upstream connection, without a leg and a relay."""

from __future__ import annotations

from collections.abc import Sequence

from meshd.api.rank_body import Buffer
from meshd.io.http1 import ResponseHead
from meshd.io.upstream import BodySink, UpstreamConnection
from meshd.strand import Promise


def asked(
    connection: UpstreamConnection, method: str, head: bytes, body: Sequence[Buffer] = ()
) -> Promise[ResponseHead]:
    """Send a request; return the promise of its response head."""
    response = Promise[ResponseHead]()
    connection.start(method, head, list(body), response)
    return response


def attached(connection: UpstreamConnection, sink: BodySink) -> None:
    """Give the body to ``sink``, what came of it before as well, as a relay does for itself."""
    arrived = connection.attach(sink)
    if arrived:
        sink.body_data(arrived)
    if connection.failure is not None:
        sink.body_failed(connection.failure)
    elif connection.is_complete:
        sink.body_end()
