"""The one writer of the registry: what is published, and when."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from meshd.config import load_settings
from meshd.config.workers import WorkerSpec
from meshd.controller.registration import Discovered
from meshd.controller.registry_keeper import JOB_KEPT_S, Announcement, RegistryKeeper, announcements
from meshd.log import Log
from meshd.memory import Segment
from meshd.routing.registry import SEGMENT_BYTES, RegistryBoard


def quiet_log() -> Log:
    return Log("test", "error", stream_fd=-1)


@dataclass
class Node:
    """A keeper with a scheduler that runs what is due only when asked."""

    segment: Segment = field(default_factory=lambda: Segment.create("registry", SEGMENT_BYTES))
    now_s: float = 100.0
    bells: int = 0
    due: list[Callable[[], None]] = field(default_factory=list)
    is_dp_aware: bool = False

    def keeper(self) -> RegistryKeeper:
        return RegistryKeeper(
            RegistryBoard(self.segment),
            quiet_log(),
            is_idle=lambda number: True,
            schedule=lambda delay_s, call: self.due.append(call),
            ring_bells=self._ring,
            clock=lambda: self.now_s,
            wall_clock=lambda: 1790000000.5,
            is_dp_aware=self.is_dp_aware,
        )

    def run_due(self) -> int:
        calls, self.due = self.due, []
        for call in calls:
            call()
        return len(calls)

    def _ring(self) -> None:
        self.bells += 1


def test_first_start_publishes_one_generation_of_starting_upstreams_in_order() -> None:
    node = Node()
    node.keeper().start([Announcement("http://a:1"), Announcement("http://b:1", model_id="m")])
    registry = RegistryBoard(node.segment).read()
    assert registry.generation == 1
    assert [(u.number, u.url, u.models) for u in registry.upstreams] == [
        (0, "http://a:1", ()),
        (1, "http://b:1", ("m",)),
    ]
    assert {(u.state, u.is_healthy) for u in registry.upstreams} == {("starting", False)}
    assert node.bells == 1


def test_start_without_any_upstream_publishes_an_empty_set() -> None:
    node = Node()
    node.keeper().start([])
    assert RegistryBoard(node.segment).read().generation == 1


def test_changes_of_one_moment_are_published_together() -> None:
    node = Node()
    keeper = node.keeper()
    keeper.start([Announcement(f"http://u{n}:1") for n in range(50)])
    node.run_due()
    before = RegistryBoard(node.segment).generation()
    for n in range(50):
        keeper.activate(f"http://u{n}:1", Discovered(("m",)))
    assert node.run_due() == 1
    registry = RegistryBoard(node.segment).read()
    assert registry.generation == before + 1
    assert all(u.is_healthy and u.state == "active" for u in registry.upstreams)


def test_change_to_the_same_health_publishes_nothing() -> None:
    node = Node()
    keeper = node.keeper()
    keeper.start([Announcement("http://a:1")])
    node.run_due()
    keeper.set_health("http://a:1", False)
    assert node.run_due() == 0
    keeper.set_health("http://a:1", True)
    assert node.run_due() == 1


def test_next_controller_goes_on_with_ids_keys_and_health_of_the_former_one() -> None:
    node = Node()
    first = node.keeper()
    first.start(
        [Announcement("http://a:1", api_key="secret", labels=(("x", "1"),)), Announcement("http://b:1")]
    )
    first.activate("http://a:1", Discovered(("m1", "m2")))
    node.run_due()
    second = node.keeper()
    second.start([Announcement("http://c:1")])
    assert second.upstreams == first.upstreams
    assert second.upstreams[0].api_key == "secret"
    assert second.upstreams[0].is_healthy
    waiting = second.job(second.upstreams[1])
    assert waiting is not None
    assert waiting.status == "pending"


def test_new_number_is_not_one_that_was_just_given_out() -> None:
    node = Node()
    node.keeper().start([Announcement("http://a:1"), Announcement("http://b:1")])
    keeper = node.keeper()
    keeper.start([])
    upstream = keeper.register(Announcement("http://c:1"))
    assert upstream is not None
    assert upstream.number == 2


def test_set_that_is_full_refuses_another_upstream() -> None:
    node = Node()
    keeper = node.keeper()
    keeper.start([Announcement(f"http://u{n}:1") for n in range(1024)])
    assert keeper.register(Announcement("http://late:1")) is None
    assert len(keeper.upstreams) == 1024


def test_job_runs_through_its_states_and_is_forgotten_after_five_minutes() -> None:
    node = Node()
    keeper = node.keeper()
    keeper.start([Announcement("http://a:1")])
    statuses = []
    for step in (
        lambda: None,
        lambda: keeper.begin("http://a:1"),
        lambda: keeper.activate("http://a:1", Discovered()),
    ):
        step()
        job = keeper.job(keeper.upstreams[0])
        assert job is not None
        statuses.append(job.status)
    assert statuses == ["pending", "processing", "completed"]
    node.now_s += JOB_KEPT_S
    assert keeper.job(keeper.upstreams[0]) is None


def test_set_that_does_not_fit_leaves_the_last_one_in_force() -> None:
    node = Node(Segment.create("registry", 8192))
    keeper = node.keeper()
    keeper.start([Announcement("http://a:1")])
    for n in range(100):
        keeper.register(Announcement(f"http://u{n}:1", labels=(("l", "x" * 100),)))
    node.run_due()
    assert [u.url for u in RegistryBoard(node.segment).read().upstreams] == ["http://a:1"]


def test_upstreams_of_the_settings_get_the_common_key_unless_they_have_their_own() -> None:
    flags = ["--worker-urls", "http://a:1", "http://b:1", "--api-key", "k"]
    specs = (WorkerSpec("http://c:1", api_key="own", model_id="m", priority=7), WorkerSpec("http://d:1"))
    settings = replace(load_settings(flags, {}).settings, workers=specs)
    found = announcements(settings)
    keys = [(a.base_url, a.api_key) for a in found]
    assert keys == [("http://a:1", "k"), ("http://b:1", "k"), ("http://c:1", "own"), ("http://d:1", "k")]
    assert (found[2].model_id, found[2].priority) == ("m", 7)


def test_server_becomes_one_upstream_for_each_rank_in_its_place_of_the_order() -> None:
    node = Node(is_dp_aware=True)
    keeper = node.keeper()
    keeper.start([Announcement("http://a:1", api_key="k", labels=(("x", "1"),)), Announcement("http://b:1")])
    origin = keeper.upstreams[0]
    keeper.activate("http://a:1", Discovered(("m1",), dp_size=3))
    node.run_due()
    registry = RegistryBoard(node.segment).read()
    assert [(u.url, u.base_url, u.dp_rank, u.dp_size) for u in registry.upstreams] == [
        ("http://a:1@0", "http://a:1", 0, 3),
        ("http://a:1@1", "http://a:1", 1, 3),
        ("http://a:1@2", "http://a:1", 2, 3),
        ("http://b:1", "http://b:1", None, None),
    ]
    ranks = registry.upstreams[:3]
    assert [u.number for u in ranks] == [origin.number, 2, 3]
    assert {(u.api_key, u.state, u.is_healthy, u.models, u.labels["x"]) for u in ranks} == {
        ("k", "active", True, ("m1",), "1")
    }
    assert {u.origin_id for u in ranks} == {origin.id}
    assert len({origin.id, *(u.id for u in ranks)}) == 4
    jobs = [keeper.job(u) for u in keeper.upstreams[:3]]
    assert [(job.worker_url, job.status) for job in jobs if job] == [(u.url, "completed") for u in ranks]
    assert keeper.origins() == ["http://a:1", "http://b:1"]


def test_health_of_an_origin_is_that_of_all_its_ranks_and_survives_the_controller() -> None:
    node = Node(is_dp_aware=True)
    keeper = node.keeper()
    keeper.start([Announcement("http://a:1")])
    keeper.activate("http://a:1", Discovered(dp_size=2))
    keeper.set_health("http://a:1", False)
    assert [u.is_healthy for u in keeper.upstreams] == [False, False]
    node.run_due()
    second = node.keeper()
    second.start([])
    assert second.upstreams == keeper.upstreams
    second.activate("http://a:1", Discovered(dp_size=5))  # ranks stay as they were registered
    assert len(second.upstreams) == 2


def test_registration_without_a_number_of_ranks_fails_and_can_be_tried_again() -> None:
    node = Node(is_dp_aware=True)
    keeper = node.keeper()
    keeper.start([Announcement("http://a:1")])
    keeper.activate("http://a:1", Discovered(("m1",)))
    (upstream,) = keeper.upstreams
    job = keeper.job(upstream)
    assert job is not None
    assert (job.status, job.message) == ("failed", "the server does not tell its dp_size")
    assert (upstream.state, upstream.is_healthy) == ("starting", False)
    keeper.activate("http://a:1", Discovered(("m1",), dp_size=1))
    assert [u.url for u in keeper.upstreams] == ["http://a:1@0"]


def test_ranks_that_do_not_fit_the_set_fail_the_registration_as_a_whole() -> None:
    node = Node(is_dp_aware=True)
    keeper = node.keeper()
    keeper.start([Announcement(f"http://u{n}:1") for n in range(1000)])
    keeper.activate("http://u0:1", Discovered(dp_size=26))
    assert len(keeper.upstreams) == 1000
    keeper.activate("http://u0:1", Discovered(dp_size=25))
    assert len({u.number for u in keeper.upstreams}) == 1024
