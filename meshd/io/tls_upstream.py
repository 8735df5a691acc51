"""An upstream connection over TLS: `start_tls` opens one; all else is as without TLS.

The chain and the name are always checked; the name is that of the URL, also where it is an address.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable

from meshd.io.tls_transport import UpstreamTlsTransport
from meshd.io.upstream import UpstreamConnection


class TlsUpstreamConnection(UpstreamConnection):
    """Knows how TLS ends, and lets its transport send a large body piece by piece."""

    __slots__ = ()

    def pause_writing(self) -> None:
        super().pause_writing()
        if isinstance(self.transport, UpstreamTlsTransport):
            self.transport.hold()

    def resume_writing(self) -> None:
        super().resume_writing()
        if isinstance(self.transport, UpstreamTlsTransport):
            self.transport.go_on()

    def connection_lost(self, exc: Exception | None) -> None:
        # A true end comes as close_notify, through eof_received. A bare end of TCP may be anybody's: a body
        # that only the end of the connection delimits is cut, not complete (RFC 9112 §9.8).
        super().connection_lost(exc or ConnectionResetError("no close_notify"))
        if isinstance(self.transport, UpstreamTlsTransport):
            self.transport.lost()


async def start_tls(
    loop: asyncio.AbstractEventLoop,
    tcp: asyncio.Transport,
    host: str,
    context: ssl.SSLContext,
    factory: Callable[[], TlsUpstreamConnection],
) -> TlsUpstreamConnection:
    """Shake hands over ``tcp``, which becomes the connection's, or is closed.

    Raises OSError, as ssl's errors are too; ValueError for an impossible name. TCP was first and TLS comes on
    top of it, for only who holds both transports knows what is unsent.
    """
    connection = factory()
    try:
        tls = await loop.start_tls(tcp, connection, context, server_hostname=host)
    except BaseException:  # a cancelled handshake too
        tcp.abort()
        raise
    if tls is None or tcp.is_closing():
        tcp.abort()
        raise ConnectionResetError("the upstream closed the connection within the TLS handshake")
    connection.connection_made(UpstreamTlsTransport(tls, tcp, loop))
    return connection
