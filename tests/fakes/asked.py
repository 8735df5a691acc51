"""A request on one upstream connection, without a leg."""

from __future__ import annotations

from collections.abc import Sequence

from meshd.api.rank_body import Buffer
from meshd.io.http1 import ResponseHead
from meshd.io.upstream import UpstreamConnection
from meshd.strand import Promise


def asked(
    connection: UpstreamConnection, method: str, head: bytes, body: Sequence[Buffer] = ()
) -> Promise[ResponseHead]:
    """Send a request; return the promise of its response head."""
    response = Promise[ResponseHead]()
    connection.start(method, head, body, response)
    return response
