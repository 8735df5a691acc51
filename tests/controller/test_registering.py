"""How a registration is completed, and what ranks a server becomes."""

from __future__ import annotations

from meshd.controller.announcement import Announcement
from meshd.controller.jobs import JOB_KEPT_S
from meshd.controller.registration import Discovered
from tests.fakes.upstream_set import UpstreamSet

A, B = "http://a:1", "http://b:1"


def test_job_runs_through_its_states_and_is_forgotten_after_five_minutes() -> None:
    node = UpstreamSet()
    node.start(A)
    statuses = []
    for step in (
        lambda: None,
        lambda: node.registrations.begin(A),
        lambda: node.registrations.activate(A, Discovered()),
    ):
        step()
        job = node.keeper.job(node.the(A))
        assert job is not None
        statuses.append(job.status)
    assert statuses == ["pending", "processing", "completed"]
    assert node.keeper.jobs.pending == 0
    node.now_s += JOB_KEPT_S
    assert node.keeper.job(node.the(A)) is None


def test_server_becomes_one_upstream_for_each_rank_in_its_place_of_the_order() -> None:
    node = UpstreamSet(is_dp_aware=True)
    node.start(Announcement(A, api_key="k", labels=(("x", "1"),)), B)
    origin = node.the(A)
    node.activate(A, "m1", dp_size=3)
    node.run_due()
    registry = node.published()
    assert [(u.url, u.base_url, u.dp_rank, u.dp_size) for u in registry.upstreams] == [
        ("http://a:1@0", A, 0, 3),
        ("http://a:1@1", A, 1, 3),
        ("http://a:1@2", A, 2, 3),
        (B, B, None, None),
    ]
    ranks = registry.upstreams[:3]
    assert [u.number for u in ranks] == [origin.number, 2, 3]
    assert {(u.api_key, u.state, u.is_healthy, u.models, u.labels["x"]) for u in ranks} == {
        ("k", "active", True, ("m1",), "1")
    }
    assert {u.origin_id for u in ranks} == {origin.id}
    assert len({origin.id, *(u.id for u in ranks)}) == 4
    jobs = [node.keeper.job(u) for u in node.keeper.upstreams[:3]]
    assert [(job.worker_url, job.status) for job in jobs if job] == [(u.url, "completed") for u in ranks]
    assert node.keeper.origins() == [A, B]


def test_health_of_an_origin_is_that_of_all_its_ranks_and_survives_the_controller() -> None:
    node = UpstreamSet(is_dp_aware=True)
    node.start(A)
    node.activate(A, dp_size=2)
    node.registrations.set_health(A, False)
    assert [u.is_healthy for u in node.keeper.upstreams] == [False, False]
    node.run_due()
    before = node.keeper.upstreams
    node.restart()
    node.start(A)
    assert node.keeper.upstreams == before
    node.activate(A, dp_size=5)  # ranks stay as they were registered
    assert len(node.keeper.upstreams) == 2


def test_removing_an_origin_removes_all_its_ranks() -> None:
    """routing.md behaviour 23."""
    node = UpstreamSet(is_dp_aware=True)
    node.start(A)
    origin = node.the(A)
    node.activate(A, dp_size=2)
    assert [u.url for u in node.keeper.find(origin.id)] == ["http://a:1@0", "http://a:1@1"]
    node.keeper.drain(node.keeper.find(origin.id))
    node.pass_time(0.25)
    assert node.urls() == []


def test_registration_without_a_number_of_ranks_fails_and_can_be_tried_again() -> None:
    node = UpstreamSet(is_dp_aware=True)
    node.start(A)
    node.activate(A, "m1")
    (upstream,) = node.keeper.upstreams
    job = node.keeper.job(upstream)
    assert job is not None
    assert (job.status, job.message) == ("failed", "the server does not tell its dp_size")
    assert (upstream.state, upstream.is_healthy) == ("starting", False)
    node.activate(A, "m1", dp_size=1)
    assert node.urls() == ["http://a:1@0"]


def test_ranks_that_do_not_fit_the_set_fail_the_registration_as_a_whole() -> None:
    node = UpstreamSet(is_dp_aware=True)
    node.start(*(f"http://u{n}:1" for n in range(1000)))
    node.activate("http://u0:1", dp_size=26)
    assert len(node.keeper.upstreams) == 1000
    node.activate("http://u0:1", dp_size=25)
    assert len({u.number for u in node.keeper.upstreams}) == 1024


def test_rank_whose_url_is_taken_fails_the_registration() -> None:
    node = UpstreamSet(is_dp_aware=True)
    node.start("http://a:1/x", "http://a:1/x@0")
    node.activate("http://a:1/x", dp_size=2)
    job = node.keeper.job(node.the("http://a:1/x"))
    assert job is not None
    assert (job.status, job.message) == ("failed", "the URL of one of its ranks is registered already")


def test_draining_upstream_is_not_activated_by_a_discovery_that_comes_late() -> None:
    node = UpstreamSet()
    node.start(A)
    node.keeper.drain([node.the(A)])
    node.activate(A, "m")
    assert node.the(A).state == "draining"
