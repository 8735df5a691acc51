"""Addresses of upstreams' names, looked up off the event loop.

An answer is kept for 10 s, a failure for 1 s, so that a name that moves is followed within 10 s and one that
was missing is found again at once. All who wait for a name wait for one lookup of it.

Each lookup has a thread of its own, for the system's resolver can only be waited for: a name whose servers
are silent holds its thread for half a minute, and with the few shared threads of the event loop such names
would delay all others. The threads are daemons, so that they do not hold up the end of the process either.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

ANSWER_SECS: Final = 10.0
FAILURE_SECS: Final = 1.0
MAX_LOOKUPS: Final = 64  # at a time; more wait their turn
MAX_NAMES: Final = 1024

Lookup = Callable[[str], Sequence[str]]
"""Return the addresses of a name in the order in which to try them; raise OSError or ValueError."""


class NameNotResolved(Exception):
    """The name has no address, or nobody could tell."""


@dataclass(slots=True)
class _Entry:
    """What is known of one name. ``error``: of the last lookup; ``addresses``: of the last good one."""

    addresses: tuple[str, ...] = ()
    error: str = ""
    expires_at: float = 0.0
    preferred: str = ""


def look_up(name: str) -> list[str]:
    """Ask the system; it sorts IPv6 and IPv4 addresses as RFC 6724 says. Blocks."""
    found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    return [str(sockaddr[0]) for *_, sockaddr in found]


def is_literal(host: str) -> bool:
    """Whether ``host`` is an address already."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.inet_pton(family, host.partition("%")[0])
    except (OSError, ValueError):
        return False
    return True


class Resolver:
    """The names of one I/O process. ``on_change`` is told a name, and its addresses if they have changed."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        lookup: Lookup = look_up,
        on_change: Callable[[str, tuple[str, ...]], None] = lambda _name, _addresses: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._loop = loop
        self._lookup = lookup
        self._on_change = on_change
        self._clock = clock
        self._entries: dict[str, _Entry] = {}
        self._running: dict[str, asyncio.Future[_Entry]] = {}
        self._waiting: deque[str] = deque()
        self._threads = 0

    def __repr__(self) -> str:
        return f"Resolver({len(self._entries)} names, running={self._threads} waiting={len(self._waiting)})"

    async def addresses(self, name: str) -> tuple[str, ...]:
        """Return the addresses of ``name``, at least one. Raises NameNotResolved."""
        entry = self._entries.get(name)
        if entry is None or self._clock() >= entry.expires_at:
            # Shielded: who stops waiting must not end the lookup of the others.
            entry = await asyncio.shield(self._running.get(name) or self._start(name))
        if entry.error:
            raise NameNotResolved(f"{name}: {entry.error}")
        return entry.addresses

    def known(self, name: str) -> tuple[str, ...]:
        """Return the addresses of the last lookup that found any, however old."""
        entry = self._entries.get(name)
        return () if entry is None else entry.addresses

    def refresh(self, name: str) -> None:
        """Look ``name`` up again if its answer has expired; returns at once."""
        entry = self._entries.get(name)
        if (entry is None or self._clock() >= entry.expires_at) and name not in self._running:
            self._start(name)

    def prefer(self, name: str, address: str) -> None:
        """Put ``address`` first from now on: those before it were tried and did not answer."""
        entry = self._entries.get(name)
        if entry is not None:
            entry.preferred = address
            entry.addresses = _in_order(entry.addresses, address)

    # ---------------------------------------------------------------------------------------- lookups

    def _start(self, name: str) -> asyncio.Future[_Entry]:
        future = self._running[name] = self._loop.create_future()
        if self._threads < MAX_LOOKUPS:
            self._run(name)
        else:
            self._waiting.append(name)
        return future

    def _run(self, name: str) -> None:
        self._threads += 1
        try:
            threading.Thread(target=self._look_up, args=(name,), name="lookup", daemon=True).start()
        except RuntimeError as error:  # the system has no thread to spare
            self._loop.call_soon(self._ended, name, (), str(error))

    def _look_up(self, name: str) -> None:
        """Run in a thread; it may outlive the event loop."""
        addresses: tuple[str, ...] = ()
        error = ""
        try:
            addresses = tuple(dict.fromkeys(self._lookup(name)))
            error = "" if addresses else "it has no address"
        except (OSError, ValueError) as failure:
            error = getattr(failure, "strerror", None) or str(failure) or type(failure).__name__
        try:
            self._loop.call_soon_threadsafe(self._ended, name, addresses, error)
        except RuntimeError:  # the loop is closed
            return

    def _ended(self, name: str, addresses: tuple[str, ...], error: str) -> None:
        self._threads -= 1
        entry = self._entries.get(name)
        if entry is None:
            entry = self._new_entry(name)
        before = entry.addresses
        entry.error = error
        entry.expires_at = self._clock() + (FAILURE_SECS if error else ANSWER_SECS)
        if not error:
            entry.addresses = _in_order(addresses, entry.preferred)
        future = self._running.pop(name)
        if not future.done():
            future.set_result(entry)
        if self._waiting and self._threads < MAX_LOOKUPS:
            self._run(self._waiting.popleft())
        if before and set(before) != set(entry.addresses):
            self._on_change(name, entry.addresses)

    def _new_entry(self, name: str) -> _Entry:
        if len(self._entries) >= MAX_NAMES:  # names of upstreams that left long ago, most likely
            oldest = min(self._entries, key=lambda each: self._entries[each].expires_at)
            del self._entries[oldest]
        entry = self._entries[name] = _Entry()
        return entry


def _in_order(addresses: tuple[str, ...], preferred: str) -> tuple[str, ...]:
    if preferred not in addresses:
        return addresses
    return (preferred, *(address for address in addresses if address != preferred))
