"""Upstreams that are pods: the watch by itself, and with the official client against a server."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("kubernetes")

from meshd.config.cluster import Cluster
from meshd.controller.announcement import Announcement
from meshd.controller.discovery.kubernetes import ApiFailed, Event, Expired, KubernetesSource, PodWatch
from meshd.controller.discovery.pod_api import PodApi
from tests.fakes.discovery import Bench
from tests.fakes.kubernetes_api import KubernetesApi, kubeconfig

PATIENCE_S = 15.0


def pod(uid: str, ip: str = "10.0.0.1", version: int = 1, ready: bool = True) -> dict[str, Any]:
    conditions = [{"type": "Ready", "status": str(ready)}]
    return {
        "metadata": {"uid": uid, "resourceVersion": str(version)},
        "status": {"podIP": ip, "conditions": conditions},
    }


class PlayedApi:
    """Plays lists and watches in turn; a watch is a list of events that may end in an exception."""

    def __init__(self, *plays: object) -> None:
        self.plays = list(plays)
        self.asked: list[str] = []
        self.on_end: Callable[[], None] = lambda: None

    def __call__(self) -> PlayedApi:
        return self

    def list(self) -> tuple[list[dict[str, Any]], str]:
        return self._next("list")  # type: ignore[no-any-return]

    def watch(self, version: str, timeout_s: int) -> Iterator[Event]:
        return self._events(self._next(f"watch {version}"))

    def close(self) -> None:
        pass

    def _events(self, events: list[Event | Exception]) -> Iterator[Event]:
        for event in events:
            if isinstance(event, Exception):
                raise event
            yield event

    def _next(self, asked: str) -> Any:
        self.asked.append(asked)
        play = self.plays.pop(0)
        if not self.plays:
            self.on_end()
        if isinstance(play, Exception):
            raise play
        return play


def follow(api: PlayedApi) -> tuple[list[list[str]], list[str]]:
    """Run the watch until its plays are over, without waiting; return what it told, and its problems."""
    told: list[list[str]] = []
    problems: list[str] = []
    times = iter(range(0, 10**6, 10))
    watch = PodWatch(
        api,
        80,
        lambda pods: told.append(sorted(each.key for each in pods)),
        problems.append,
        rng=random.Random(1),
        clock=lambda: float(next(times)),
    )
    watch._stopped.wait = lambda timeout=None: watch._stopped.is_set()  # type: ignore[method-assign]
    api.on_end = watch.stop
    watch.run()
    return told, [problem for problem in problems if problem]


def event(kind: str, told: dict[str, Any]) -> Event:
    return {"type": kind, "object": told}


ONE, TWO = "u1 http://10.0.0.1:80", "u2 http://10.0.0.2:80"


def test_events_change_what_was_listed() -> None:
    api = PlayedApi(
        ([pod("u1")], "5"),
        [
            event("ADDED", pod("u2", "10.0.0.2", 6)),
            event("MODIFIED", pod("u1", version=7, ready=False)),
            event("MODIFIED", pod("u1", version=8)),
            event("DELETED", pod("u2", "10.0.0.2", 9)),
        ],
    )
    assert follow(api) == ([[ONE], [ONE, TWO], [TWO], [ONE, TWO], [ONE]], [])
    assert api.asked == ["list", "watch 5"]


def test_changes_that_do_not_matter_are_not_told() -> None:
    api = PlayedApi(([pod("u1")], "5"), [event("MODIFIED", pod("u1", version=number)) for number in (6, 7)])
    assert follow(api) == ([[ONE]], [])


def test_a_watch_that_ends_goes_on_from_the_last_version_and_bookmarks_count() -> None:
    api = PlayedApi(
        ([], "5"),
        [event("ADDED", pod("u1", version=9))],
        [event("BOOKMARK", {"metadata": {"resourceVersion": "20"}})],
        [],
    )
    assert follow(api) == ([[], [ONE]], [])
    assert api.asked == ["list", "watch 5", "watch 9", "watch 20"]


def test_a_version_that_is_gone_means_a_new_list() -> None:
    """What was deleted in between is noticed by comparing; 410 itself is no problem."""
    api = PlayedApi(
        ([pod("u1"), pod("u2", "10.0.0.2")], "5"), [Expired("too old")], ([pod("u2", "10.0.0.2")], "90"), []
    )
    assert follow(api) == ([[ONE, TWO], [TWO]], [])
    assert api.asked == ["list", "watch 5", "list", "watch 90"]


def test_a_broken_watch_is_relisted_and_removes_nothing_meanwhile() -> None:
    api = PlayedApi(
        ([pod("u1")], "5"), [ApiFailed("cut")], ApiFailed("refused"), Expired("x"), ([pod("u1")], "9"), []
    )
    assert follow(api) == ([[ONE]], ["cut", "refused"])
    assert api.asked == ["list", "watch 5", "list", "list", "list", "watch 9"]


@pytest.mark.parametrize("told", [{}, {"metadata": {}}, {"metadata": []}, pod("u1", "no-address"), pod("")])
def test_an_event_that_cannot_be_read_is_a_failure(told: dict[str, Any]) -> None:
    api = PlayedApi(([pod("u1")], "5"), [event("MODIFIED", told)], ([pod("u1")], "6"), [])
    told_keys, problems = follow(api)
    assert told_keys == [[ONE]]
    assert len(problems) == 1


class Running:
    """A source with the official client, on a loop that this test owns; ``until`` lets it run."""

    def __init__(self, server: KubernetesApi, directory: Path, bench: Bench) -> None:
        file = directory / "kubeconfig"
        file.write_text(kubeconfig(server.url))
        cluster = Cluster(kubeconfig=str(file))
        self.bench = bench
        self.loop = asyncio.new_event_loop()
        source = KubernetesSource(
            lambda: PodApi(cluster, {"app": "engine"}, ""),
            "app=engine",
            8000,
            bench.reconciler("kubernetes"),
            lambda each: Announcement(each.url, labels=each.labels),
            bench.log,
            rng=random.Random(1),
        )
        self.task = self.loop.create_task(source.run())

    def until(self, condition: Callable[[], object], what: str) -> None:
        async def poll() -> None:
            async with asyncio.timeout(PATIENCE_S):
                while not condition():
                    assert not self.task.done(), self.task
                    await asyncio.sleep(0.01)

        try:
            self.loop.run_until_complete(poll())
        except TimeoutError:
            pytest.fail(f"{what}: {self.bench.keeper.upstreams}")

    def until_urls(self, *addresses: str) -> None:
        urls = [f"http://{address}:8000" for address in addresses]
        self.until(lambda: self.bench.keeper.urls("kubernetes") == urls, f"not {urls}")

    def close(self) -> None:
        self.task.cancel()
        self.loop.run_until_complete(asyncio.gather(self.task, return_exceptions=True))
        self.loop.close()


@pytest.fixture
def server() -> Iterator[KubernetesApi]:
    with KubernetesApi() as running:
        yield running


@pytest.fixture
def running(server: KubernetesApi, tmp_path: Path) -> Iterator[Running]:
    made = Running(server, tmp_path, Bench())
    yield made
    made.close()


def test_pods_that_lose_one_drain_that_upstream_only(server: KubernetesApi, running: Running) -> None:
    """Behaviour 26 of routing.md, Kubernetes: deleted, not Ready, terminating, no longer matching."""
    for number in range(1, 6):
        server.put(f"u{number}", f"10.0.0.{number}")
    running.until_urls("10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.4", "10.0.0.5")
    server.delete("u1")
    running.until_urls("10.0.0.2", "10.0.0.3", "10.0.0.4", "10.0.0.5")
    server.put("u2", "10.0.0.2", ready=False)
    running.until_urls("10.0.0.3", "10.0.0.4", "10.0.0.5")
    server.put("u3", "10.0.0.3", terminating=True)
    running.until_urls("10.0.0.4", "10.0.0.5")
    server.put("u4", "10.0.0.4", labels={"app": "other"})
    running.until_urls("10.0.0.5")
    assert running.bench.counts("kubernetes") == (1, 5, 4)
    assert len(server.lists()) == 1


def test_an_unreachable_api_server_removes_none(server: KubernetesApi, running: Running) -> None:
    """Behaviour 26 of routing.md, Kubernetes."""
    server.put("u1", "10.0.0.1")
    running.until_urls("10.0.0.1")
    server.wait_for_watch()
    server.refuse(503)
    server.cut()
    running.until(lambda: len(running.bench.log.problems()) >= 2, "no problem was told")
    server.delete("u1")
    server.put("u2", "10.0.0.2")
    assert running.bench.keeper.urls("kubernetes") == ["http://10.0.0.1:8000"]
    server.refuse(0)
    running.until_urls("10.0.0.2")
    running.until(lambda: running.bench.log.events()[-1] == "discovery_readable", "its end was not told")


def test_a_version_that_is_gone_is_relisted(server: KubernetesApi, running: Running) -> None:
    server.put("u1", "10.0.0.1")
    running.until_urls("10.0.0.1")
    server.wait_for_watch()
    server.refuse(410)
    server.cut()
    running.until(lambda: len(server.lists()) >= 2, "not listed again")
    server.delete("u1")
    server.put("u2", "10.0.0.2")
    server.compact()
    server.refuse(0)
    running.until_urls("10.0.0.2")


def test_a_reused_pod_ip_with_a_new_uid_is_a_new_upstream(server: KubernetesApi, running: Running) -> None:
    """Behaviour 24 of routing.md: the old one is withdrawn first, so that the new one finds its URL free."""
    server.put("u1", "10.0.0.1")
    running.until_urls("10.0.0.1")
    server.delete("u1")
    server.put("u2", "10.0.0.1")
    key = "u2 http://10.0.0.1:8000"
    running.until(lambda: running.bench.keeper.keys_of("kubernetes") == [key], "not replaced")
    assert [call[0] for call in running.bench.keeper.calls] == ["announce", "withdraw", "announce"]


def test_labels_of_a_pod_become_labels_of_its_upstream(server: KubernetesApi, running: Running) -> None:
    server.put("u1", "10.0.0.1", labels={"app": "engine", "mesh.capacity": "8"})
    running.until_urls("10.0.0.1")
    (found,) = running.bench.keeper.upstreams.values()
    assert found.labels == (("mesh.capacity", "8"),)


def test_a_fault_of_the_thread_ends_the_source() -> None:
    def connect() -> PodApi:
        raise RuntimeError("not expected")

    bench = Bench()
    source = KubernetesSource(
        connect, "x", 80, bench.reconciler("kubernetes"), lambda each: Announcement(each.url), bench.log
    )
    with pytest.raises(RuntimeError, match="not expected"):
        asyncio.run(source.run())
