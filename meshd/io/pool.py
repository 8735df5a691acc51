"""Keep-alive connections to upstreams, one pool for each I/O process.

Idle connections are kept per origin, the most recently used one is taken first. They are idle since their
last byte, as the upstream counts it. A busy connection belongs to its exchange; `release` takes it back if
the exchange left it clean, else closes it.

A name may have several addresses. They are tried in order, each for its share of the connect timer, so that
a dead one leaves time for the next; one that answered after others had failed comes first from then on. A
name with idle connections is looked up every 10 s, and connections to an address that it has no more are
not used again: else a busy pool would never follow a name that moves.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeVar

from meshd.errors import StartupError
from meshd.io.head_cache import ResponseHeads
from meshd.io.resolver import Lookup, NameNotResolved, Resolver, is_literal, look_up
from meshd.io.tls_upstream import TlsUpstreamConnection, start_tls
from meshd.io.upstream import UpstreamConnection, UpstreamFailure
from meshd.routing.upstream import Upstream

MAX_IDLE_PER_ORIGIN: Final = 256
MAX_IDLE_LOCAL: Final = 2
"""To the controller: all I/O processes together must leave room among the connections it takes."""
_MAX_TARGETS: Final = 4096  # origins come and go; this is only a memo
_LEAST_SHARE_S: Final = 1.0  # of the connect timer, for one of many addresses

Proto = TypeVar("Proto", bound=asyncio.BaseProtocol)


@dataclass(frozen=True, slots=True)
class Address:
    """Where an origin listens: TCP host and port, or an abstract Unix socket (``unix_path``)."""

    key: str
    host: str = ""
    port: int = 0
    is_tls: bool = False
    unix_path: str = ""


def address_of(upstream: Upstream) -> Address:
    """Return where an upstream's origin listens; its ranks share connections."""
    return Address(upstream.base_url, upstream.host, upstream.port, upstream.is_tls)


def authority_of(upstream: Upstream) -> str:
    """Return the value of `host` towards an upstream: the default port is left out (RFC 9110 §7.2)."""
    host = f"[{upstream.host}]" if ":" in upstream.host else upstream.host
    return host if upstream.port == (443 if upstream.is_tls else 80) else f"{host}:{upstream.port}"


class UpstreamPool:
    """All upstream connections of one I/O process. ``tls`` gives the context of each new https connection.

    ``on_count`` hears of each connection to an upstream that opens or ends; the controller is none.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        idle_timeout_s: float,
        connect_timeout_s: float,
        tls: Callable[[], ssl.SSLContext] = ssl.create_default_context,
        on_count: Callable[[int], None] = lambda _delta: None,
        lookup: Lookup = look_up,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._loop = loop
        self._idle_timeout_s = idle_timeout_s
        self._connect_timeout_s = connect_timeout_s
        self._tls = tls
        self._on_count = on_count
        self._clock = clock
        self._resolver = Resolver(loop, lookup=lookup, on_change=self._moved, clock=clock)
        self._heads = ResponseHeads()
        self._targets: dict[str, tuple[Address, str]] = {}
        self._idle: dict[str, list[UpstreamConnection]] = {}
        self._open: set[UpstreamConnection] = set()

    def __repr__(self) -> str:
        idle = sum(len(stack) for stack in self._idle.values())
        return f"UpstreamPool(open={len(self._open)} idle={idle} busy={len(self._open) - idle})"

    def target(self, upstream: Upstream) -> tuple[Address, str]:
        """Return the address and the authority of an upstream, made once per origin."""
        target = self._targets.get(upstream.base_url)
        if target is None:
            if len(self._targets) >= _MAX_TARGETS:
                self._targets.clear()
            target = self._targets[upstream.base_url] = (address_of(upstream), authority_of(upstream))
        return target

    def try_idle(self, address: Address, now: float = 0.0) -> UpstreamConnection | None:
        """Return a usable idle connection, or None. ``now``: the time, of a caller who has just looked."""
        stack = self._idle.get(address.key)
        fresh_after = (now or self._clock()) - self._idle_timeout_s
        while stack:
            connection = stack.pop()
            if not connection.is_closed and connection.last_byte_at > fresh_after and connection.is_quiet():
                return connection
            connection.close()
        return None

    async def connect(self, address: Address) -> UpstreamConnection:
        """Open a fresh connection; raise UpstreamFailure with the code of the cause."""
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                connection = await self._connect(address)
        except TimeoutError as timeout:
            raise UpstreamFailure("upstream_connect_timeout", "connect timer", False, False) from timeout
        except (NameNotResolved, OSError, ValueError, StartupError) as error:  # ValueError: TLS, of a name
            raise UpstreamFailure("upstream_connection_failed", str(error), False, False) from error
        if connection.is_closed:  # its end was seen before anyone held it
            raise UpstreamFailure("upstream_connection_failed", "closed at once", False, False)
        self._open.add(connection)
        connection.is_local = bool(address.unix_path)
        if not connection.is_local:
            self._on_count(1)
        return connection

    async def _connect(self, address: Address) -> UpstreamConnection:
        made = (address.key, self._loop, self._forget, self._clock, self._heads.parse)
        if address.unix_path:
            return await self._connect_unix(address.unix_path, lambda: UpstreamConnection(*made))
        if address.is_tls:
            context = self._tls()
            tcp, _, remote = await self._connect_tcp(address, asyncio.Protocol)
            connection: UpstreamConnection = await start_tls(
                self._loop, tcp, address.host, context, lambda: TlsUpstreamConnection(*made)
            )
        else:
            _, connection, remote = await self._connect_tcp(address, lambda: UpstreamConnection(*made))
        if remote:
            connection.name, connection.remote = address.host, remote
        return connection

    async def _connect_tcp(
        self, address: Address, factory: Callable[[], Proto]
    ) -> tuple[asyncio.Transport, Proto, str]:
        """Connect to the first address that answers; it comes third, empty if ``address`` is no name."""
        loop, name = self._loop, address.host
        if is_literal(name):
            return *await loop.create_connection(factory, name, address.port), ""
        ends_at = loop.time() + self._connect_timeout_s
        remotes = await self._resolver.addresses(name)
        for number, remote in enumerate(remotes):
            left_s = ends_at - loop.time()
            rest = len(remotes) - number
            share_s = max(left_s / rest, min(left_s, _LEAST_SHARE_S))
            try:
                async with asyncio.timeout(share_s if rest > 1 else None):
                    made = await loop.create_connection(factory, remote, address.port)
            except OSError:  # a TimeoutError is one too
                if rest == 1:
                    raise
                continue
            if number:
                self._resolver.prefer(name, remote)
            return *made, remote
        raise AssertionError("a name without an address")

    async def _connect_unix(self, path: str, factory: Callable[[], UpstreamConnection]) -> UpstreamConnection:
        # uvloop itself cannot name an abstract socket
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            await self._loop.sock_connect(sock, path)
            _, connection = await self._loop.create_unix_connection(factory, sock=sock)
        except BaseException:
            sock.close()
            raise
        return connection

    def release(self, connection: UpstreamConnection) -> None:
        """Take back a connection whose exchange has ended."""
        stack = self._idle.setdefault(connection.key, [])
        most = MAX_IDLE_LOCAL if connection.is_local else MAX_IDLE_PER_ORIGIN
        if not connection.is_reusable or self._idle_timeout_s <= 0 or len(stack) >= most:
            connection.close()
            return
        if connection.name and connection.remote not in self._resolver.known(connection.name):
            connection.close()  # the name has moved
            return
        connection.resume_reading()  # an idle connection is watched for its end
        connection.is_busy = False
        connection.served += 1
        stack.append(connection)

    def busy(self) -> list[UpstreamConnection]:
        return [connection for connection in self._open if connection.is_busy]

    def sweep(self) -> None:
        """Close idle connections that are too old to be used again; call about once a second."""
        fresh_after = self._clock() - self._idle_timeout_s
        for key in list(self._idle):
            stack = self._idle[key]
            for connection in [c for c in stack if c.last_byte_at <= fresh_after]:
                connection.close()
            if not stack:
                del self._idle[key]
            elif stack[0].name:
                self._resolver.refresh(stack[0].name)

    def close_idle(self, key: str) -> None:
        for connection in list(self._idle.get(key, ())):
            connection.close()

    def close_all(self) -> None:
        for connection in list(self._open):
            connection.close()

    def _moved(self, name: str, remotes: tuple[str, ...]) -> None:
        """A name has other addresses now: what is idle to those that are gone is of no use any more."""
        for stack in list(self._idle.values()):
            for connection in [c for c in stack if c.name == name and c.remote not in remotes]:
                connection.close()

    def _forget(self, connection: UpstreamConnection) -> None:
        if connection not in self._open:
            return
        self._open.discard(connection)
        if not connection.is_local:
            self._on_count(-1)
        stack = self._idle.get(connection.key)
        if stack and connection in stack:
            stack.remove(connection)
