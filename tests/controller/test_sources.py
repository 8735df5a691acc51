"""What settings and discovery want in the set, compared with what is there."""

from __future__ import annotations

from meshd.controller.announcement import Announcement
from meshd.controller.registry_keeper import Refusal
from meshd.routing.registry import Upstream
from tests.fakes.upstream_set import UpstreamSet

A, B, C = "http://a:1", "http://b:1", "http://c:1"


def test_first_start_publishes_one_generation_of_starting_upstreams_in_order() -> None:
    node = UpstreamSet()
    node.start(A, Announcement(B, model_id="m"))
    registry = node.published()
    assert registry.generation == 1
    assert [(u.number, u.url, u.models, u.source) for u in registry.upstreams] == [
        (0, A, (), "config"),
        (1, B, ("m",), "config"),
    ]
    assert {(u.state, u.is_healthy) for u in registry.upstreams} == {("starting", False)}
    assert node.bells == 1


def test_start_without_any_upstream_publishes_an_empty_set() -> None:
    node = UpstreamSet()
    node.start()
    assert node.published().generation == 1


def test_start_adds_what_the_settings_name_anew_and_drains_what_they_no_longer_name() -> None:
    node = UpstreamSet()
    node.start(A, B)
    node.keeper.register(Announcement("http://by-hand:1"))
    node.run_due()
    node.restart()
    node.start(B, C)
    assert [(u.url, u.state) for u in node.published().upstreams] == [
        (A, "draining"),
        (B, "starting"),
        ("http://by-hand:1", "starting"),
        (C, "starting"),
    ]


def test_server_of_the_settings_that_a_user_removed_stays_removed_in_the_next_controller() -> None:
    node = UpstreamSet()
    node.start(A, B)
    node.keeper.drain([node.the(A)])
    node.pass_time(0.25)
    node.restart()
    node.start(A, B)
    assert node.urls() == [B]


def test_change_by_a_user_stays_until_the_settings_say_something_new() -> None:
    node = UpstreamSet()
    node.start(Announcement(A, api_key="k1", priority=1))
    node.activate(A, "m")
    node.keeper.change(node.the(A), priority=99)
    node.run_due()
    node.restart()
    node.start(Announcement(A, api_key="k1", priority=1))
    assert node.the(A).priority == 99
    node.restart()
    node.start(Announcement(A, api_key="k2", priority=2, labels=(("x", "1"),)))
    changed = node.the(A)
    assert (changed.priority, changed.api_key, changed.labels) == (2, "k2", {"x": "1"})
    assert (changed.is_healthy, changed.state) == (True, "active")


def test_announced_upstream_is_added_once() -> None:
    node = UpstreamSet()
    node.start()
    node.sources.announce("file", "a", Announcement(A, model_id="m1"))
    node.sources.announce("file", "a", Announcement(A, model_id="m1"))
    assert [(u.url, u.source, u.source_key, u.models) for u in node.keeper.upstreams] == [
        (A, "file", "a", ("m1",))
    ]
    assert node.sources.keys_of("file") == {"a"}
    assert node.sources.keys_of("dns") == set()


def test_announcement_that_a_source_changed_is_taken_over_and_one_that_it_repeats_is_not() -> None:
    node = UpstreamSet()
    node.start()
    node.sources.announce("file", "a", Announcement(A, api_key="k1"))
    node.activate(A, "m")
    node.keeper.change(node.the(A), priority=99)
    node.run_due()
    node.restart()
    node.start()
    node.sources.announce("file", "a", Announcement(A, api_key="k1"))
    assert node.the(A).priority == 99
    node.sources.announce("file", "a", Announcement(A, api_key="k2", labels=(("x", "1"),)))
    changed = node.the(A)
    assert (changed.api_key, changed.labels, changed.is_healthy) == ("k2", {"x": "1"}, True)


def test_upstream_of_a_source_that_a_user_removed_stays_removed_until_it_was_withdrawn() -> None:
    node = UpstreamSet()
    node.start()
    node.sources.announce("file", "a", Announcement(A))
    node.keeper.drain([node.the(A)])
    node.pass_time(0.25)
    node.restart()
    node.start()
    node.sources.announce("file", "a", Announcement(A))
    assert node.urls() == []
    assert node.sources.keys_of("file") == {"a"}
    node.sources.withdraw("file", "a")
    node.sources.announce("file", "a", Announcement(A))
    assert node.urls() == [A]


def test_waiting_announcement_comes_as_it_was_last_made() -> None:
    node = UpstreamSet()
    node.start(A)
    node.sources.announce("dns", A, Announcement(A, api_key="k1"))
    node.sources.announce("dns", A, Announcement(A, api_key="k2"))
    node.keeper.drain([node.the(A)])
    node.pass_time(0.25)
    assert (node.the(A).source, node.the(A).api_key) == ("dns", "k2")


def test_source_drains_only_its_own() -> None:
    node = UpstreamSet()
    node.start(A)
    node.sources.announce("file", A, Announcement(A))
    node.sources.announce("file", B, Announcement(B))
    node.sources.withdraw("file", A)
    node.sources.withdraw("dns", B)
    assert [(u.url, u.state) for u in node.keeper.upstreams] == [(A, "starting"), (B, "starting")]
    node.sources.withdraw("file", B)
    assert node.the(B).state == "draining"
    assert node.sources.keys_of("file") == set()


def test_announced_upstream_waits_while_its_url_is_taken() -> None:
    node = UpstreamSet()
    node.start(A)
    node.sources.announce("dns", A, Announcement(A))
    assert node.sources.keys_of("dns") == {A}
    node.keeper.drain([node.the(A)])
    node.pass_time(0.25)
    assert [(u.url, u.source) for u in node.keeper.upstreams] == [(A, "dns")]


def test_waiting_upstream_that_is_withdrawn_never_comes() -> None:
    node = UpstreamSet()
    node.start(A)
    node.sources.announce("dns", A, Announcement(A))
    node.sources.withdraw("dns", A)
    node.keeper.drain([node.the(A)])
    node.pass_time(0.25)
    node.pass_time(0.25)
    assert node.urls() == []


def test_server_of_the_settings_that_waited_is_announced_again_by_the_next_controller() -> None:
    node = UpstreamSet()
    node.start()
    node.sources.announce("file", A, Announcement(A))
    node.run_due()
    node.restart()
    node.start(A)
    node.restart()
    node.start(A)
    node.sources.withdraw("file", A)
    node.pass_time(0.25)
    assert [(u.url, u.source, u.state) for u in node.keeper.upstreams] == [(A, "config", "starting")]


def test_those_that_wait_for_a_full_set_are_not_all_tried_at_each_look() -> None:
    node = UpstreamSet(is_prompt=True)
    node.start(*(f"http://u{n}:1" for n in range(1024)))
    for n in range(2000):
        node.sources.announce("file", f"http://w{n}:1", Announcement(f"http://w{n}:1"))
    tries: list[str] = []
    register = node.keeper.register

    def counted(announcement: Announcement, *rest: str) -> Upstream | Refusal:
        tries.append(announcement.base_url)
        return register(announcement, *rest)

    node.keeper.register = counted  # type: ignore[method-assign, assignment]
    node.sources.sweep()
    assert tries == ["http://w0:1"]
    node.keeper.remove([node.the("http://u7:1")])
    node.sources.sweep()
    assert node.urls()[-1] == "http://w0:1"
