"""The one writer of the registry: what is published, and when."""

from __future__ import annotations

import pytest

from meshd.controller.announcement import Announcement
from meshd.controller.registry_keeper import MAX_DESCRIPTION_BYTES, Refusal
from meshd.memory import Segment
from meshd.routing.registry import RegistryBoard, Upstream
from tests.fakes.upstream_set import UpstreamSet


def registered(outcome: Upstream | Refusal) -> Upstream:
    assert isinstance(outcome, Upstream)
    return outcome


def test_changes_of_one_moment_are_published_together() -> None:
    node = UpstreamSet()
    node.start(*(f"http://u{n}:1" for n in range(50)))
    node.run_due()
    before = node.published().generation
    for n in range(50):
        node.activate(f"http://u{n}:1", "m")
    assert node.run_due() == 1
    registry = node.published()
    assert registry.generation == before + 1
    assert all(u.is_healthy and u.state == "active" for u in registry.upstreams)


def test_change_to_the_same_value_publishes_nothing() -> None:
    node = UpstreamSet()
    node.start("http://a:1")
    node.run_due()
    node.registrations.set_health("http://a:1", False)
    assert node.run_due() == 0
    node.registrations.set_health("http://a:1", True)
    assert node.run_due() == 1


def test_next_controller_goes_on_with_ids_keys_and_health_of_the_former_one() -> None:
    node = UpstreamSet()
    wanted = (Announcement("http://a:1", api_key="secret", labels=(("x", "1"),)), "http://b:1")
    node.start(*wanted)
    node.activate("http://a:1", "m1", "m2", entries=('{"id":"m1","max_model_len":7}',))
    node.run_due()
    before = node.keeper.upstreams
    node.restart()
    node.start(*wanted)
    assert node.keeper.upstreams == before
    assert node.the("http://a:1").api_key == "secret"
    assert node.the("http://a:1").is_healthy
    waiting = node.keeper.job(node.the("http://b:1"))
    assert waiting is not None
    assert waiting.status == "pending"


def test_new_number_is_not_one_that_was_just_given_out() -> None:
    node = UpstreamSet()
    node.start("http://a:1", "http://b:1")
    node.restart()
    node.start("http://a:1", "http://b:1")
    assert registered(node.keeper.register(Announcement("http://c:1"))).number == 2


def test_number_of_which_something_is_remembered_rests_and_its_owner_leaves_all_the_same() -> None:
    node = UpstreamSet()
    node.start(*(f"http://u{n}:1" for n in range(1024)))
    node.remembered = {7}
    node.keeper.drain([node.the("http://u7:1")])
    node.pass_time(0.25)
    assert "http://u7:1" not in node.urls()
    assert node.keeper.register(Announcement("http://late:1")) is Refusal.FULL
    node.remembered = set()
    assert registered(node.keeper.register(Announcement("http://late:1"))).number == 7


def test_number_is_not_reused_while_somebody_holds_load_on_it() -> None:
    node = UpstreamSet()
    node.start(*(f"http://u{n}:1" for n in range(1024)))
    node.busy = {7}
    node.keeper.remove([node.the("http://u7:1")], is_forced=True)
    assert node.keeper.register(Announcement("http://late:1")) is Refusal.FULL
    node.busy = set()
    assert registered(node.keeper.register(Announcement("http://late:1"))).number == 7


@pytest.mark.parametrize(
    ("announcement", "refusal"),
    [
        (Announcement("http://a:1"), Refusal.EXISTS),
        (Announcement("http://b:1", labels=(("l", "x" * MAX_DESCRIPTION_BYTES),)), Refusal.TOO_LARGE),
    ],
)
def test_upstream_that_cannot_be_registered_says_why(announcement: Announcement, refusal: Refusal) -> None:
    node = UpstreamSet()
    node.start("http://a:1")
    assert node.keeper.register(announcement) is refusal
    assert node.urls() == ["http://a:1"]


def test_set_that_does_not_fit_leaves_the_last_one_in_force() -> None:
    node = UpstreamSet(Segment.create("registry", 8192))
    node.start("http://a:1")
    for n in range(100):
        node.keeper.register(Announcement(f"http://u{n}:1", labels=(("l", "x" * 100),)))
    node.run_due()
    assert [u.url for u in RegistryBoard(node.segment).read().upstreams] == ["http://a:1"]


def test_labels_fill_priority_and_cost_and_members_win() -> None:
    node = UpstreamSet()
    labels = (("priority", "7"), ("cost", "0.5"))
    node.start(
        Announcement("http://a:1", labels=labels),
        Announcement("http://b:1", labels=labels, priority=9, cost=2.0),
        Announcement("http://c:1", labels=(("priority", "many"), ("cost", "nan"))),
    )
    assert [(u.priority, u.cost) for u in node.keeper.upstreams] == [(7, 0.5), (9, 2.0), (50, 1.0)]


def test_draining_upstream_leaves_when_its_load_is_gone_and_not_before() -> None:
    node = UpstreamSet()
    node.start("http://a:1", "http://b:1")
    node.activate("http://a:1", "m")
    node.busy = {0}
    node.keeper.drain([node.the("http://a:1")])
    node.run_due()
    assert [(u.url, u.state) for u in node.published().upstreams] == [
        ("http://a:1", "draining"),
        ("http://b:1", "starting"),
    ]
    node.pass_time(60)
    assert node.urls() == ["http://a:1", "http://b:1"]
    node.busy = set()
    node.pass_time(0.25)
    assert [u.url for u in node.published().upstreams] == ["http://b:1"]


def test_idle_upstream_drains_long_enough_to_be_seen_draining() -> None:
    node = UpstreamSet()
    node.start("http://a:1")
    node.keeper.drain([node.the("http://a:1")])
    node.pass_time(0.1)
    assert node.urls() == ["http://a:1"]
    node.pass_time(0.15)
    assert node.urls() == []


def test_draining_goes_on_in_the_next_controller() -> None:
    node = UpstreamSet()
    node.start("http://a:1")
    node.keeper.drain([node.the("http://a:1")])
    node.run_due()
    node.restart()
    node.start("http://a:1")
    node.pass_time(0.25)
    assert node.urls() == []


def test_removal_by_force_publishes_what_is_to_be_cut_for_a_while() -> None:
    node = UpstreamSet()
    node.start("http://a:1", "http://b:1")
    upstream = node.the("http://a:1")
    node.busy = {upstream.number}
    node.keeper.remove([upstream], is_forced=True)
    node.run_due()
    assert [u.url for u in node.published().upstreams] == ["http://b:1"]
    assert node.published().cut == (upstream.id,)
    node.restart()
    node.start("http://a:1", "http://b:1")
    assert node.published().cut == (upstream.id,)
    node.now_s += 11
    node.keeper.publisher.now()
    assert node.published().cut == ()


def test_departed_upstream_is_remembered_for_its_metrics_also_by_the_next_controller() -> None:
    node = UpstreamSet()
    node.start("http://a:1")
    node.keeper.remove([node.the("http://a:1")])
    node.run_due()
    node.restart()
    node.start("http://a:1")
    assert list(node.keeper.departures.departed) == ["http://a:1"]
    node.now_s += 901
    assert node.keeper.departures.departed == {}


def test_changed_upstream_that_has_left_stays_away() -> None:
    node = UpstreamSet()
    node.start("http://a:1")
    upstream = node.the("http://a:1")
    node.keeper.remove([upstream])
    node.keeper.change(upstream, is_healthy=True)
    assert node.urls() == []


def test_reused_address_is_a_new_upstream_that_starts_unhealthy() -> None:
    """routing.md behaviour 24, as far as the set is concerned: another id and another number."""
    node = UpstreamSet()
    node.start()
    node.sources.announce("kubernetes", "uid-1", Announcement("http://10.0.0.1:8000"))
    node.activate("http://10.0.0.1:8000", "m")
    former = node.the("http://10.0.0.1:8000")
    node.sources.withdraw("kubernetes", "uid-1")
    node.sources.announce("kubernetes", "uid-2", Announcement("http://10.0.0.1:8000"))
    node.pass_time(0.25)
    node.pass_time(0.25)
    present = node.the("http://10.0.0.1:8000")
    assert (present.state, present.is_healthy) == ("starting", False)
    assert present.id != former.id
    assert present.number != former.number
