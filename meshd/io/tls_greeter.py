"""The first moments of a client connection over TLS: a handshake, then the ordinary protocol takes over.

    TCP accepted → TlsGreeter → handshake → connect().connection_made(TlsTransport)
                                   └─ fails, or takes too long → closed without an answer

Plain HTTP on a TLS port, TLS 1.1 and port scanners all end on the lower branch. The connection itself, and so
its timers and the cap, begin after the handshake; handshakes have a time-out and a bound of their own.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Coroutine
from typing import Any, Final, cast

from meshd.io.tls_transport import SHUTDOWN_SECS, TlsTransport

_FAILURES: Final = (OSError, ValueError)  # every ssl.SSLError is an OSError


class TlsGreeter(asyncio.Protocol):
    """Hands one accepted connection to the protocol that ``connect`` makes, once TLS stands.

    ``on_end`` is called exactly once, with the reason if there was no handshake, else with an empty string.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        context: ssl.SSLContext,
        connect: Callable[[], asyncio.BaseProtocol],
        handshake_timeout_s: float,
        on_end: Callable[[str], None],
    ) -> None:
        self._loop = loop
        self._context = context
        self._connect = connect
        self._handshake_timeout_s = handshake_timeout_s
        self._on_end = on_end
        self._tcp: asyncio.Transport | None = None
        self._handshake: Coroutine[Any, Any, asyncio.Transport | None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        tcp = self._tcp = cast(asyncio.Transport, transport)  # uvloop's own class is not registered as one
        self._handshake = self._loop.start_tls(
            tcp,
            asyncio.Protocol(),  # nobody: there are no bytes before the handshake has ended
            self._context,
            server_side=True,
            ssl_handshake_timeout=self._handshake_timeout_s,
            ssl_shutdown_timeout=SHUTDOWN_SECS,
        )
        # Driven by hand: a task would begin a turn later, and the client's first bytes, which come at once,
        # would reach this protocol and be lost. Up to its wait it makes TLS the transport's protocol.
        self._go_on(None)

    def _go_on(self, waited: asyncio.Future[Any] | None) -> None:
        assert self._handshake is not None
        try:
            waiting = self._handshake.send(None)
        except StopIteration as end:
            self._finish(end.value)
        except _FAILURES as error:
            self._fail(str(error) or type(error).__name__)
        else:
            waiting.add_done_callback(self._go_on)

    def _finish(self, tls: asyncio.Transport | None) -> None:
        assert self._tcp is not None
        if tls is None or self._tcp.is_closing():  # the client left within its handshake
            self._fail("the client closed the connection")
            return
        self._on_end("")
        connection = self._connect()
        tls.set_protocol(connection)
        connection.connection_made(TlsTransport(tls, self._tcp))

    def _fail(self, reason: str) -> None:
        assert self._tcp is not None
        self._tcp.abort()
        self._on_end(reason)
