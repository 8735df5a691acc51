"""Upstreams that DNS answers list: addresses of A and AAAA records, or targets and ports of SRV records.

Each pair of name and record type is a scope of its own, asked again after the TTL of its records: a server
that answers A and times out for AAAA, as some do, loses no IPv6 upstream and still adds IPv4 ones. Priority
and weight of SRV records are not used; placement is the policy's.

What an answer means:

- records: these upstreams and no others;
- the name does not exist, or has no records of this type: none, but only when a second answer 5 s later
  says so too. Servers that just start, and zones that are being replaced, answer so for a moment, and
  draining all upstreams cannot be taken back. Nothing depends on an empty answer being believed early;
- no answer, or a failure told by the server: nothing is known and nothing changes.

Needs the extra ``dns``; the settings are refused without it, so that nobody else imports this module.
"""

from __future__ import annotations

import asyncio
import ipaddress
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import dns.asyncresolver
import dns.exception
import dns.message
import dns.resolver

from meshd.config.discovery import DnsName
from meshd.config.urls import normalize_url
from meshd.controller.announcement import Announcement
from meshd.controller.discovery.source import Backoff, Outage, Reconciler
from meshd.log import Log

SOURCE: Final = "dns"
SHORTEST_S: Final = 1.0
LONGEST_S: Final = 60.0
EMPTY_AGAIN_S: Final = 5.0
LIFETIME_S: Final = 5.0  # all attempts of one question

Endpoint = tuple[str, int]  # host or address, port


@dataclass(frozen=True, slots=True)
class Lookup:
    """One question: ``port`` is that of the upstreams found, None for SRV."""

    name: str
    record_type: str
    port: int | None

    @property
    def scope(self) -> str:
        return f"{self} "

    def __str__(self) -> str:
        return (
            f"{self.name} {self.record_type}"
            if self.port is None
            else f"{self.name}:{self.port} {self.record_type}"
        )


def lookups(names: Sequence[DnsName]) -> list[Lookup]:
    """Return the questions for names."""
    return [
        Lookup(name.name, record_type, name.port)
        for name in names
        for record_type in (("SRV",) if name.is_service else ("A", "AAAA"))
    ]


@dataclass(frozen=True, slots=True)
class Found:
    """An answer; no endpoints: the server says that there are none."""

    endpoints: tuple[Endpoint, ...]
    ttl_s: float


class LookupFailed(Exception):
    """Nothing is known; the text is for operators."""


class Resolver(Protocol):
    async def ask(self, lookup: Lookup) -> Found:
        """Raises LookupFailed."""


class SystemResolver:
    """Asks the servers of /etc/resolv.conf, with its search list; /etc/hosts is not read.

    ``make``: gives the resolver of each question, so that a changed configuration is seen.
    """

    def __init__(self, make: Callable[[], dns.asyncresolver.Resolver] = dns.asyncresolver.Resolver) -> None:
        self._make = make

    async def ask(self, lookup: Lookup) -> Found:
        try:
            answer = await self._make().resolve(
                lookup.name, lookup.record_type, search=True, lifetime=LIFETIME_S
            )
        except dns.resolver.NoAnswer as nothing:
            return Found((), _ttl_s([nothing.kwargs["response"]]))
        except dns.resolver.NXDOMAIN as unknown:
            return Found((), _ttl_s(list(unknown.kwargs["responses"].values())))
        except (dns.exception.DNSException, OSError) as failure:
            raise LookupFailed(str(failure) or type(failure).__name__) from failure
        return Found(_endpoints(answer, lookup.port), _ttl_s([answer.response]))


def _endpoints(records: dns.resolver.Answer, port: int | None) -> tuple[Endpoint, ...]:
    if port is not None:
        return tuple((record.address, port) for record in records)
    named = [(record.target.to_text(omit_final_dot=True).lower(), record.port) for record in records]
    # RFC 2782: the target "." says that the service is not offered.
    return tuple((host, number) for host, number in named if host and host != "." and number)


def _ttl_s(responses: Sequence[dns.message.QueryMessage]) -> float:
    """Return the least TTL on the way from question to answer; of a negative one, RFC 2308 §5."""
    return min((each.resolve_chaining().minimum_ttl for each in responses), default=0)


class DnsSource:
    """Follows the answers to one question. ``announce``: makes an announcement of a URL."""

    def __init__(
        self,
        lookup: Lookup,
        resolver: Resolver,
        reconciler: Reconciler,
        announce: Callable[[str], Announcement],
        log: Log,
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        rng: random.Random | None = None,
    ) -> None:
        self._lookup = lookup
        self._resolver = resolver
        self._reconciler = reconciler
        self._announce = announce
        self._sleep = sleep
        self._outage = Outage(SOURCE, str(lookup), log)
        self._backoff = Backoff(rng or random.Random())
        self._was_empty = False  # the answer before

    async def run(self) -> None:
        """Ask until cancelled."""
        while True:
            await self._sleep(await self.look())

    async def look(self) -> float:
        """Ask once; return the seconds until the next question."""
        try:
            found = await self._resolver.ask(self._lookup)
        except LookupFailed as failure:
            self._outage.note(str(failure))
            return self._backoff.take()
        self._outage.note("")
        self._backoff.reset()
        if not found.endpoints and not self._was_empty:
            self._was_empty = True
            return EMPTY_AGAIN_S
        self._was_empty = not found.endpoints
        urls = sorted({_url(host, port) for host, port in found.endpoints} - {""})
        self._reconciler.want(self._lookup.scope, {url: self._announce(url) for url in urls})
        return min(max(found.ttl_s, SHORTEST_S), LONGEST_S)


def _url(host: str, port: int) -> str:
    """Return the URL of an upstream; empty if there cannot be one, since zones hold whatever they hold."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        address = None
    if address is not None and address.is_unspecified:  # what filtering servers answer; it would be this host
        return ""
    is_v6 = address is not None and address.version == 6
    if "/" in host:  # it would begin a path
        return ""
    try:
        return normalize_url(f"http://[{host}]:{port}" if is_v6 else f"http://{host}:{port}")
    except ValueError:
        return ""
