"""How the set of upstreams follows what a source lists."""

from __future__ import annotations

import random

from meshd.controller.announcement import Announcement
from meshd.controller.discovery.source import Backoff, Outage
from tests.fakes.discovery import Bench, ListLog


def listed(*urls: str) -> dict[str, Announcement]:
    return {url: Announcement(url) for url in urls}


def test_what_is_listed_is_announced_and_what_is_no_longer_is_withdrawn() -> None:
    bench = Bench()
    reconciler = bench.reconciler("file")
    reconciler.want("", listed("http://a", "http://b"))
    assert bench.keeper.urls("file") == ["http://a", "http://b"]
    reconciler.want("", listed("http://b", "http://c"))
    assert bench.keeper.urls("file") == ["http://b", "http://c"]
    assert bench.keeper.calls[2:] == [("withdraw", "file", "http://a"), ("announce", "file", "http://c")]
    assert bench.counts("file") == (2, 3, 1)


def test_the_same_list_again_changes_nothing() -> None:
    bench = Bench()
    reconciler = bench.reconciler("file")
    for _ in range(3):
        reconciler.want("", listed("http://a"))
        reconciler.settle()
    assert bench.keeper.calls == [("announce", "file", "http://a")]
    assert bench.counts("file") == (1, 1, 0)


def test_a_changed_announcement_is_told_to_the_keeper_and_is_no_registration() -> None:
    bench = Bench()
    reconciler = bench.reconciler("file")
    reconciler.want("", listed("http://a"))
    reconciler.want("", {"http://a": Announcement("http://a", labels=(("x", "y"),))})
    assert bench.keeper.upstreams["file", "http://a"].labels == (("x", "y"),)
    assert bench.counts("file") == (1, 1, 0)


def test_upstreams_of_other_sources_are_never_touched() -> None:
    bench = Bench()
    for other in ("config", "api", "dns"):
        bench.keeper.announce(other, "http://x", Announcement("http://x"))
    bench.reconciler("file").want("", {})
    assert [bench.keeper.urls(other) for other in ("config", "api", "dns")] == [["http://x"]] * 3


def test_a_source_that_was_never_read_removes_nothing() -> None:
    bench = Bench()
    bench.keeper.announce("file", "http://a", Announcement("http://a"))
    bench.reconciler("file").settle()
    assert bench.keeper.urls("file") == ["http://a"]


def test_a_new_controller_compares_with_what_the_killed_one_left() -> None:
    bench = Bench()
    bench.reconciler("file").want("", listed("http://a", "http://b"))
    successor = bench.reconciler("file")
    successor.settle()
    assert bench.keeper.urls("file") == ["http://a", "http://b"]
    successor.want("", listed("http://b", "http://c"))
    assert bench.keeper.urls("file") == ["http://b", "http://c"]
    assert bench.counts("file") == (2, 3, 1)


def test_each_scope_keeps_what_it_has_until_it_is_read() -> None:
    bench = Bench()
    scopes = ("a:80 A ", "a:80 AAAA ", "b:80 A ")
    bench.reconciler("dns", scopes).want("a:80 A ", listed("http://1"))
    for scope in scopes:
        bench.keeper.announce("dns", f"{scope}http://old", Announcement("http://old"))
    reconciler = bench.reconciler("dns", scopes)
    reconciler.want("a:80 AAAA ", listed("http://6"))
    assert sorted(bench.keeper.keys_of("dns")) == [
        "a:80 A http://1", "a:80 A http://old", "a:80 AAAA http://6", "b:80 A http://old",
    ]  # fmt: skip


def test_a_scope_that_is_no_longer_configured_is_drained() -> None:
    bench = Bench()
    bench.reconciler("dns", ("a ", "b ")).want("a ", listed("http://1"))
    bench.reconciler("dns", ("b ",)).settle()
    assert bench.keeper.urls("dns") == []
    assert bench.counts("dns")[1:] == (1, 1)


def test_backoff_grows_from_one_to_thirty_seconds_and_starts_again() -> None:
    backoff = Backoff(random.Random(1))
    delays = [backoff.take() for _ in range(50)]
    assert all(1 <= delay <= 30 for delay in delays)
    assert delays[0] == 1
    assert min(delays[5:]) >= 15
    assert len(set(delays[5:])) > 40
    backoff.reset()
    assert backoff.take() == 1


def test_a_problem_is_told_once_and_its_end_too() -> None:
    log = ListLog()
    outage = Outage("dns", "a.example", log)
    for problem in ("", "timeout", "timeout", "refused", "", ""):
        outage.note(problem)
    assert log.events() == ["discovery_unreadable", "discovery_unreadable", "discovery_readable"]
    assert log.problems() == ["timeout", "refused"]
