"""A client connection over TLS: as any other, but its transport must be told when it is lost."""

from __future__ import annotations

from meshd.io.downstream import DownstreamConnection
from meshd.io.tls_transport import TlsTransport


class TlsDownstreamConnection(DownstreamConnection):
    __slots__ = ()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if isinstance(self.transport, TlsTransport):
            self.transport.lost()
