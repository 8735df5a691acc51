"""A prober against upstreams that are played, on a clock that only sleeping moves."""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from meshd.controller import prober as prober_module
from meshd.controller.announcement import Announcement
from meshd.controller.health import ProbeRules
from meshd.controller.http_client import Answer, FetchError, UpstreamClient
from meshd.controller.prober import ProbeCounters, Prober, ProbeSettings
from meshd.controller.registering import Registrations
from meshd.controller.registration import Discovered
from meshd.controller.registry_keeper import RegistryKeeper
from meshd.controller.sources import Sources
from meshd.log import Log
from meshd.memory import Segment
from meshd.metrics.catalog import build_catalog
from meshd.metrics.cells import MetricRow, segment_size
from meshd.metrics.table import MetricTable
from meshd.routing.registry import SEGMENT_BYTES, RegistryBoard, Upstream
from tests.fakes.upstream_set import quiet_log

URL = "http://u:1"
STARTUP_LIMIT_S = 1800.0
WALL_S = 1790000000.0
OK, DOWN, MOVED = 200, 0, 302


class End(Exception):
    """The play is over."""


class PlayedUpstream(UpstreamClient):
    """Answers probes from a list (0: no connection) and model lists with one model."""

    def __init__(self, statuses: list[int]) -> None:
        super().__init__()
        self.statuses: Iterator[int] = iter(statuses)
        self.paths: list[str] = []
        self.asked: list[tuple[str, str]] = []
        self.timeouts: list[float] = []
        self.before_probe: Callable[[], None] = lambda: None

    async def get(self, upstream: Upstream, path: str, timeout_s: float, max_body_bytes: int) -> Answer:
        self.paths.append(path)
        self.asked.append((upstream.url, path))
        self.timeouts.append(timeout_s)
        if path == "/v1/models":
            return Answer(200, b'{"data":[{"id":"m1"}]}')
        if path.endswith("_info"):
            return Answer(404, b"")
        self.before_probe()
        status = next(self.statuses, None)
        if status is None:
            raise End
        if status == DOWN:
            raise FetchError("Connection refused")
        return Answer(status, b"")


@dataclass
class Play:
    """One origin, its keeper and prober, and the pauses the prober made."""

    statuses: list[int]
    is_disabled: bool = False
    pauses: list[float] = field(default_factory=list)
    health: str = ""
    now_s: float = 0.0
    wall_late_s: float = 0.0
    traffic: int = 0

    def __post_init__(self) -> None:
        self.log_fd = os.memfd_create("log")
        log = Log("test", is_json=True, stream_fd=self.log_fd)
        self.keeper = RegistryKeeper(
            RegistryBoard(Segment.create("registry", SEGMENT_BYTES)),
            log,
            is_idle=lambda number: True,
            schedule=lambda delay_s, call: call(),
            ring_bells=lambda: None,
            wall_clock=lambda: WALL_S,
        )
        self.sources = Sources(self.keeper, log)
        self.registrations = Registrations(self.keeper, log)
        self.cells = Segment.create("metrics", segment_size(1))
        row = MetricRow(self.cells, 0, build_catalog())
        name = "mesh_worker_health_checks_total"
        counters = ProbeCounters(
            row.counter(name, worker_type="regular", result="success"),
            row.counter(name, worker_type="regular", result="failure"),
        )
        self.client = PlayedUpstream(self.statuses)
        self.prober = Prober(
            self.keeper,
            self.registrations,
            self.client,
            ProbeSettings("/health", 5.0, ProbeRules(60.0, 3, 2), self.is_disabled),
            counters,
            log,
            sleep=self._sleep,
            clock=lambda: self.now_s,
            wall_clock=lambda: WALL_S + self.wall_late_s,
            successes=lambda number: self.traffic,
            rng=random.Random(3),
        )

    def run(self) -> Play:
        if not self.keeper.upstreams:
            self.sources.start([Announcement(URL)])
        with pytest.raises(End):
            asyncio.run(self.prober.watch(self.upstream))
        return self

    @property
    def upstream(self) -> Upstream:
        return self.keeper.upstreams[0]

    @property
    def status(self) -> str:
        job = self.keeper.job(self.upstream)
        return "" if job is None else job.status

    @property
    def told(self) -> list[str]:
        """The problems that were logged, in order."""
        found = self.lines("upstream_unreachable")
        assert all((line["level"], line["upstream"]) == ("warn", URL) for line in found)
        return [line["problem"] for line in found]

    def lines(self, event: str) -> list[dict[str, Any]]:
        text = os.pread(self.log_fd, 1 << 20, 0)
        lines: list[dict[str, Any]] = [json.loads(line) for line in text.splitlines()]
        return [line for line in lines if line["event"] == event]

    def checks(self, result: str) -> float:
        totals = MetricTable(self.cells, 1, build_catalog()).sum_rows({0})
        return totals.value("mesh_worker_health_checks_total", "regular", result)

    async def _sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.health += "H" if self.upstream.is_healthy else "u"
        self.now_s += seconds
        await asyncio.sleep(0)


def test_probes_at_once_and_each_second_until_the_first_success_then_at_the_interval() -> None:
    play = Play([DOWN, DOWN, MOVED, OK, OK]).run()
    assert play.pauses[:3] == [1.0, 1.0, 1.0]
    assert all(54.0 <= pause <= 66.0 for pause in play.pauses[3:])
    assert play.health == "uuuHH"


def test_first_success_registers_the_models_once() -> None:
    play = Play([DOWN, OK, OK, OK]).run()
    assert play.client.paths.count("/v1/models") == 1
    assert play.upstream.state == "active"
    assert play.upstream.models == ("m1",)


def test_redirect_and_server_error_are_failures_and_every_probe_is_counted() -> None:
    play = Play([OK, MOVED, 500, DOWN, OK]).run()
    assert play.health == "HHHuu"
    assert (play.checks("success"), play.checks("failure")) == (2, 3)


def test_two_successes_bring_an_ejected_upstream_back() -> None:
    assert Play([OK, DOWN, DOWN, DOWN, OK, OK]).run().health == "HHHuuH"


def test_upstream_that_never_starts_fails_its_job_and_is_probed_on_at_the_interval() -> None:
    play = Play([DOWN] * 1900 + [OK]).run()
    limit = int(STARTUP_LIMIT_S)
    assert set(play.pauses[:limit]) == {1.0}
    assert all(54.0 <= pause <= 66.0 for pause in play.pauses[limit:])
    assert play.upstream.is_healthy


def test_job_of_an_upstream_that_never_starts_says_failed() -> None:
    play = Play([DOWN] * 1900).run()
    job = play.keeper.job(play.upstream)
    assert job is not None
    assert job.status == "failed"
    assert job.message == f"no successful probe within {STARTUP_LIMIT_S:g} s: Connection refused"


def test_problem_is_told_when_it_begins_and_when_it_changes() -> None:
    play = Play([DOWN, DOWN, 503, 503, OK, DOWN, OK]).run()
    assert play.told == ["Connection refused", "/health answered 503", "Connection refused"]


def test_job_of_an_upstream_that_has_not_answered_says_why() -> None:
    play = Play([DOWN, DOWN]).run()
    job = play.keeper.job(play.upstream)
    assert job is not None
    assert (job.status, job.message) == ("processing", "Connection refused")
    play.client.statuses = iter([OK])
    play.run()
    job = play.keeper.job(play.upstream)
    assert job is not None
    assert (job.status, job.message) == ("completed", "")


def test_disabled_health_check_activates_at_once_and_never_probes() -> None:
    play = Play([], is_disabled=True)
    play.sources.start([Announcement(URL)])
    asyncio.run(play.prober.watch(play.upstream))
    assert play.upstream.is_healthy
    assert play.upstream.models == ("m1",)
    assert "/health" not in play.client.paths
    assert play.client.paths.count("/v1/models") == 1


class SilentUpstream(PlayedUpstream):
    """Tells its models when ``may_tell`` is set."""

    def __init__(self) -> None:
        super().__init__([])
        self.may_tell = asyncio.Event()

    async def get(self, upstream: Upstream, path: str, timeout_s: float, max_body_bytes: int) -> Answer:
        await self.may_tell.wait()
        return await super().get(upstream, path, timeout_s, max_body_bytes)


@pytest.mark.parametrize(("model", "serves"), [("", ("unknown",)), ("own", ("own",))])
def test_unprobed_upstream_is_used_at_once_though_it_is_silent_and_its_facts_come_later(
    monkeypatch: pytest.MonkeyPatch, model: str, serves: tuple[str, ...]
) -> None:
    monkeypatch.setattr(prober_module, "FACTS_WAIT_S", 0.01)
    play = Play([], is_disabled=True)
    play.prober._client = play.client = client = SilentUpstream()
    play.sources.start([Announcement(URL, model_id=model, labels=(("model_path", "/p"),))])

    async def story() -> None:
        watching = asyncio.create_task(play.prober.watch(play.upstream))
        while play.upstream.state != "active":
            await asyncio.sleep(0)
        assert (play.upstream.is_healthy, play.upstream.models) == (True, serves)
        assert play.status == "processing"
        client.may_tell.set()
        await watching
        assert play.upstream.models == tuple(filter(None, (model, "m1")))
        assert play.status == "completed"

    asyncio.run(story())


def test_facts_that_a_former_controller_did_not_wait_for_are_asked_for_by_the_next() -> None:
    play = Play([], is_disabled=True)
    play.sources.start([Announcement(URL)])
    play.registrations.activate_without_facts(URL)
    asyncio.run(play.prober.watch(play.upstream))
    assert play.upstream.models == ("m1",)


def test_unprobed_server_of_ranks_is_not_used_before_their_number_is_known() -> None:
    play = Play([], is_disabled=True)
    play.registrations = Registrations(play.keeper, quiet_log(), is_dp_aware=True)
    play.sources.start([Announcement(URL)])
    play.registrations.activate_without_facts(URL)
    assert play.upstream.state == "starting"


def test_after_a_restart_a_healthy_upstream_stays_so_and_its_probe_waits_its_turn() -> None:
    play = Play([DOWN, OK])
    play.sources.start([Announcement(URL)])
    play.registrations.activate(URL, Discovered(("m1",)))
    play.run()
    assert 0.0 <= play.pauses[0] < 60.0
    assert play.health == "HHH"
    assert "/v1/models" not in play.client.paths


def test_ranks_of_one_origin_share_one_watch() -> None:
    play = Play([])
    play.sources.start([Announcement(URL), Announcement("http://v:1")])
    assert play.keeper.origins() == [URL, "http://v:1"]


def test_all_origins_are_watched_and_a_broken_one_ends_the_run() -> None:
    play = Play([OK])
    play.sources.start([Announcement(URL), Announcement("http://v:1")])
    with pytest.raises(ExceptionGroup):
        asyncio.run(play.prober.run())


def test_busy_upstream_with_failing_probes_and_successful_traffic_stays_healthy() -> None:
    """upstream.md behaviour 7."""
    play = Play([OK, DOWN, DOWN, DOWN, DOWN, DOWN])

    def serve() -> None:
        play.traffic += 1

    play.client.before_probe = serve
    assert play.run().health == "HHHHHH"


def test_traffic_that_stopped_no_longer_speaks_for_the_upstream() -> None:
    play = Play([OK, DOWN, DOWN, DOWN, DOWN])
    play.client.before_probe = lambda: setattr(play, "traffic", min(play.traffic + 1, 2))
    assert play.run().health == "HHHHu"


def test_one_failed_probe_does_not_eject_three_do_two_successes_bring_back() -> None:
    """upstream.md behaviour 6."""
    assert Play([OK, DOWN, OK, DOWN, DOWN, OK, DOWN, DOWN, DOWN, OK, OK]).run().health == "HHHHHHHHuuH"


def test_upstream_with_probing_of_its_own_is_probed_by_that() -> None:
    play = Play([OK, DOWN, OK, OK])
    probing = (("health_check_interval_secs", 2.0), ("health_failure_threshold", 1))
    play.sources.start([Announcement(URL, probing=probing)])
    play.run()
    assert play.health == "HuuH"
    assert all(1.8 <= pause <= 2.2 for pause in play.pauses)
    assert play.client.timeouts.count(2.0) == 5  # the last probe ends the play


def test_upstream_that_disables_its_probes_is_active_without_any() -> None:
    play = Play([])
    play.sources.start([Announcement(URL, probing=(("disable_health_check", True),))])
    asyncio.run(play.prober.watch(play.upstream))
    assert play.upstream.is_healthy
    assert "/health" not in play.client.paths


def test_time_before_a_restart_of_the_controller_counts_towards_the_startup_limit() -> None:
    play = Play([DOWN, DOWN], wall_late_s=STARTUP_LIMIT_S)
    play.run()
    job = play.keeper.job(play.upstream)
    assert job is not None
    assert job.status == "failed"
    assert all(54.0 <= pause <= 66.0 for pause in play.pauses)


def test_starting_upstream_is_logged_at_its_interval() -> None:
    play = Play([DOWN] * 70).run()
    assert [line["waited_s"] for line in play.lines("upstream_starting")] == [30.0, 60.0]


def test_set_is_followed_while_it_changes() -> None:
    """upstream.md behaviour 8: only current upstreams are probed, by their settings of now."""

    async def play_out() -> tuple[list[str], list[str]]:
        play = Play([OK] * 1000)
        play.sources.start([Announcement(URL)])
        running = asyncio.create_task(play.prober.run())
        await until(lambda: "/health" in play.client.paths)
        play.keeper.register(Announcement("http://v:1"))
        await until(lambda: ("http://v:1", "/health") in play.client.asked)
        play.keeper.drain(play.keeper.of_origin(URL))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        play.client.asked.clear()
        await until(lambda: len(play.client.asked) > 5)
        after_removal = {url for url, _ in play.client.asked}
        play.keeper.change(play.keeper.of_origin("http://v:1")[0], probing={"disable_health_check": True})
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        play.client.asked.clear()
        for _ in range(20):
            await asyncio.sleep(0)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        return sorted(after_removal), [path for _, path in play.client.asked]

    after_removal, after_disabling = asyncio.run(play_out())
    assert after_removal == ["http://v:1"]
    assert after_disabling == []


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(10_000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("it did not come about")
