"""Upstreams that DNS answers list, asked of a server on loopback."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator

import dns.asyncresolver
import dns.rcode
import pytest

from meshd.config.discovery import read_dns_name
from meshd.controller.announcement import Announcement
from meshd.controller.discovery.dns import (
    EMPTY_AGAIN_S,
    DnsSource,
    Found,
    Lookup,
    LookupFailed,
    SystemResolver,
    lookups,
)
from tests.fakes.discovery import Bench
from tests.fakes.dns_server import DnsServer

A = Lookup("engines.example", "A", 8000)
AAAA = Lookup("engines.example", "AAAA", 8000)
SRV = Lookup("_http._tcp.engines.example", "SRV", None)


@pytest.fixture
def server() -> Iterator[DnsServer]:
    with DnsServer() as running:
        yield running


def resolver(server: DnsServer, search: str = "") -> SystemResolver:
    def make() -> dns.asyncresolver.Resolver:
        made = dns.asyncresolver.Resolver(configure=False)
        made.nameservers = ["127.0.0.1"]
        made.port = server.port
        made.timeout = made.lifetime = 0.2
        made.search = [dns.name.from_text(search)] if search else []
        return made

    return SystemResolver(make)


def ask(server: DnsServer, lookup: Lookup) -> Found:
    return asyncio.run(resolver(server).ask(lookup))


class Played:
    """Gives answers, or failures, one after the other; the last again and again."""

    def __init__(self, *answers: Found | LookupFailed) -> None:
        self.answers = list(answers)

    async def ask(self, lookup: Lookup) -> Found:
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, LookupFailed):
            raise answer
        return answer


def follow(bench: Bench, lookup: Lookup, *answers: Found | LookupFailed) -> list[float]:
    """Ask once for each answer; return the delays."""
    played = Played(*answers)
    reconciler = bench.reconciler("dns", (A.scope, AAAA.scope, SRV.scope))
    source = DnsSource(lookup, played, reconciler, Announcement, bench.log, rng=random.Random(1))

    async def run() -> list[float]:
        return [await source.look() for _ in answers]

    return asyncio.run(run())


def addresses(*found: str, ttl_s: float = 30) -> Found:
    return Found(tuple((address, 8000) for address in found), ttl_s)


def test_names_ask_for_both_kinds_of_addresses_and_underscores_for_srv() -> None:
    names = [read_dns_name(text) for text in ("engines.example:8000", "_http._tcp.engines.example")]
    assert lookups(names) == [A, AAAA, SRV]


def test_every_address_is_found_with_its_ttl(server: DnsServer) -> None:
    server.records["engines.example.", "A"] = (17, ["10.0.0.1", "10.0.0.2"])
    server.records["engines.example.", "AAAA"] = (18, ["2001:db8::1"])
    found = ask(server, A)
    assert (sorted(found.endpoints), found.ttl_s) == ([("10.0.0.1", 8000), ("10.0.0.2", 8000)], 17)
    assert ask(server, AAAA) == Found((("2001:db8::1", 8000),), 18)


def test_srv_records_bring_targets_and_ports(server: DnsServer) -> None:
    server.records["_http._tcp.engines.example.", "SRV"] = (
        9,
        ["0 5 8001 Pod-1.engines.example.", "1 5 8002 pod-2.engines.example.", "0 0 1 ."],
    )
    found = ask(server, SRV)
    assert sorted(found.endpoints) == [("pod-1.engines.example", 8001), ("pod-2.engines.example", 8002)]


def test_the_least_ttl_on_the_way_counts(server: DnsServer) -> None:
    server.records["engines.example.", "CNAME"] = (4, ["blue.example."])
    server.records["blue.example.", "A"] = (17, ["10.0.0.1"])
    assert ask(server, A) == Found((("10.0.0.1", 8000),), 4)


def test_a_missing_name_and_a_name_without_records_are_empty_answers(server: DnsServer) -> None:
    assert ask(server, A) == Found((), 7)  # the minimum of the zone
    server.records["engines.example.", "A"] = (17, ["10.0.0.1"])
    assert ask(server, AAAA) == Found((), 7)


@pytest.mark.parametrize("fault", [None, dns.rcode.SERVFAIL, dns.rcode.REFUSED])
def test_silence_and_failures_of_the_server_are_no_answers(
    server: DnsServer, fault: dns.rcode.Rcode | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshd.controller.discovery.dns.LIFETIME_S", 0.3)
    server.faults["engines.example.", "A"] = fault
    with pytest.raises(LookupFailed):
        ask(server, A)


def test_names_without_a_final_dot_are_searched(server: DnsServer) -> None:
    server.records["engines.prod.example.", "A"] = (17, ["10.0.0.1"])
    found = asyncio.run(resolver(server, search="prod.example.").ask(Lookup("engines", "A", 80)))
    assert found.endpoints == (("10.0.0.1", 80),)


def test_an_answer_that_loses_an_entry_drains_that_upstream_only() -> None:
    """Behaviour 26 of routing.md, DNS."""
    bench = Bench()
    follow(bench, A, addresses("10.0.0.1", "10.0.0.2", "10.0.0.3"), addresses("10.0.0.3", "10.0.0.1"))
    assert bench.keeper.urls("dns") == ["http://10.0.0.1:8000", "http://10.0.0.3:8000"]
    assert bench.counts("dns") == (2, 3, 1)


def test_an_unreachable_server_removes_none_and_is_asked_again_with_backoff() -> None:
    """Behaviour 26 of routing.md, DNS."""
    bench = Bench()
    failures = [LookupFailed("timeout") for _ in range(6)]
    delays = follow(bench, A, addresses("10.0.0.1"), *failures)
    assert bench.keeper.urls("dns") == ["http://10.0.0.1:8000"]
    assert delays[1] == 1
    assert 15 <= delays[-1] <= 30
    assert bench.log.problems() == ["timeout"]


def test_an_empty_answer_counts_when_the_next_one_says_so_too() -> None:
    bench = Bench()
    nothing = Found((), 20)
    delays = follow(bench, A, addresses("10.0.0.1"), nothing, addresses("10.0.0.1"), nothing)
    assert bench.keeper.urls("dns") == ["http://10.0.0.1:8000"]
    assert delays == [30, EMPTY_AGAIN_S, 30, EMPTY_AGAIN_S]
    assert follow(bench, A, nothing, nothing) == [EMPTY_AGAIN_S, 20]
    assert bench.keeper.urls("dns") == []


@pytest.mark.parametrize(("ttl_s", "delay_s"), [(0, 1), (1, 1), (7.5, 7.5), (60, 60), (86400, 60)])
def test_the_next_question_comes_after_the_ttl_within_1_to_60_s(ttl_s: float, delay_s: float) -> None:
    assert follow(Bench(), A, addresses("10.0.0.1", ttl_s=ttl_s)) == [delay_s]


def test_one_kind_of_record_that_fails_leaves_the_other_alone() -> None:
    bench = Bench()
    follow(bench, A, addresses("10.0.0.1"))
    follow(bench, AAAA, addresses("2001:db8::1"))
    follow(bench, AAAA, LookupFailed("timeout"))
    follow(bench, A, addresses("10.0.0.2"))
    assert bench.keeper.urls("dns") == ["http://10.0.0.2:8000", "http://[2001:db8::1]:8000"]


def test_targets_of_srv_are_upstreams_by_name() -> None:
    bench = Bench()
    follow(bench, SRV, Found((("pod-1.engines.example", 8001), ("10.0.0.9", 8002)), 5))
    assert bench.keeper.urls("dns") == ["http://10.0.0.9:8002", "http://pod-1.engines.example:8001"]


def test_records_that_cannot_be_upstreams_are_left_out() -> None:
    bench = Bench()
    hosts = ("a b", "a\\@b", "0.0.0.0", "::", "x/y", "-", "good.example")
    follow(bench, SRV, Found(tuple((host, 8001) for host in hosts), 5))
    assert bench.keeper.urls("dns") == ["http://good.example:8001"]
