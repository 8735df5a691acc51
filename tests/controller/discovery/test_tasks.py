"""The sources that the settings ask for, with the real set of upstreams."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from meshd.config import Settings
from meshd.config.cluster import Cluster
from meshd.controller.announcement import Announcement
from meshd.controller.discovery.tasks import Discovery
from tests.fakes.discovery import Bench
from tests.fakes.kubernetes_api import KubernetesApi, kubeconfig
from tests.fakes.upstream_set import UpstreamSet

PATIENCE_S = 15.0


class Running:
    """Discovery on a loop that this test owns; ``until`` lets it run."""

    def __init__(self, node: UpstreamSet, settings: Settings, cluster: Cluster | None = None) -> None:
        self.node = node
        self.bench = Bench()
        self.loop = asyncio.new_event_loop()
        cluster = cluster or Cluster()
        discovery = Discovery(settings, cluster, node.sources, self.bench.row, self.bench.log)
        self.task = self.loop.create_task(discovery.run())

    def until(self, condition: Callable[[], object]) -> None:
        async def poll() -> None:
            async with asyncio.timeout(PATIENCE_S):
                while not condition():
                    assert not self.task.done() or self.task.exception() is None
                    await asyncio.sleep(0.01)
                    self.node.pass_time(0.01)

        try:
            self.loop.run_until_complete(poll())
        except TimeoutError:
            pytest.fail(f"still {self.node.keeper}")

    def close(self) -> None:
        self.task.cancel()
        self.loop.run_until_complete(asyncio.gather(self.task, return_exceptions=True))
        self.loop.close()


@pytest.fixture
def start() -> Iterator[Callable[..., Running]]:
    made: list[Running] = []

    def make(node: UpstreamSet, settings: Settings, cluster: Cluster | None = None) -> Running:
        made.append(Running(node, settings, cluster))
        return made[-1]

    yield make
    for running in made:
        running.close()


def settings_of(path: Path) -> Settings:
    return replace(Settings(), discovery_file=str(path), discovery_check_interval_secs=0.01, api_key="sk-1")


def states(node: UpstreamSet) -> list[tuple[str, str]]:
    return [(upstream.url, upstream.state) for upstream in node.keeper.upstreams]


def test_a_file_adds_and_drains_only_its_own(start: Callable[..., Running], tmp_path: Path) -> None:
    """Behaviour 26 of routing.md: beside upstreams of the settings and of the API."""
    file = tmp_path / "workers.json"
    file.write_text('{"workers": [{"url": "http://a"}, {"url": "http://b"}, {"url": "http://given"}]}')
    node = UpstreamSet(is_prompt=True)
    node.start("http://given")
    node.keeper.register(Announcement("http://posted"))
    running = start(node, settings_of(file))
    running.until(lambda: len(states(node)) == 4)
    assert node.the("http://a").api_key == "sk-1"
    node.busy.add(node.the("http://a").number)
    file.write_text('{"workers": [{"url": "http://b"}]}')
    running.until(lambda: node.the("http://a").state == "draining")
    assert states(node) == [
        ("http://given", "starting"),
        ("http://posted", "starting"),
        ("http://a", "draining"),
        ("http://b", "starting"),
    ]
    node.busy.clear()
    running.until(lambda: len(states(node)) == 3)


def test_a_killed_controller_is_followed_by_one_that_compares(
    start: Callable[..., Running], tmp_path: Path
) -> None:
    file = tmp_path / "workers.toml"
    file.write_text('[[workers]]\nurl = "http://a"\n[[workers]]\nurl = "http://b"\n')
    node = UpstreamSet(is_prompt=True)
    node.start()
    first = start(node, settings_of(file))
    first.until(lambda: len(states(node)) == 2)
    kept = node.the("http://b").id
    file.write_text('[[workers]]\nurl = "http://b"\n[[workers]]\nurl = "http://c"\n')
    node.restart()
    node.start()
    second = start(node, settings_of(file))
    second.until(lambda: node.urls() == ["http://b", "http://c"])
    assert node.the("http://b").id == kept


def test_what_a_source_of_former_settings_left_is_drained_at_start(start: Callable[..., Running]) -> None:
    node = UpstreamSet(is_prompt=True)
    node.start("http://given")
    for source in ("file", "dns", "kubernetes"):
        node.sources.announce(source, "key", Announcement(f"http://{source}"))
    start(node, Settings()).until(lambda: node.urls() == ["http://given"])


def test_a_reused_pod_ip_with_a_new_uid_starts_unhealthy_and_anew(
    start: Callable[..., Running], tmp_path: Path
) -> None:
    """Behaviour 24 of routing.md: another id and number, so nothing that is kept by number is inherited."""
    pytest.importorskip("kubernetes")
    file = tmp_path / "kubeconfig"
    settings = replace(
        Settings(), service_discovery=True, selector=(("app", "engine"),), service_discovery_port=8000
    )
    with KubernetesApi() as server:
        file.write_text(kubeconfig(server.url))
        server.put("u1", "10.0.0.1", labels={"app": "engine", "mesh.capacity": "8"})
        node = UpstreamSet(is_prompt=True)
        node.start()
        running = start(node, settings, Cluster(kubeconfig=str(file)))
        running.until(node.urls)
        node.activate("http://10.0.0.1:8000", "m")
        (old,) = node.keeper.upstreams
        assert (old.is_healthy, old.labels, old.source) == (True, {"mesh.capacity": "8"}, "kubernetes")
        node.busy.add(old.number)
        server.delete("u1")
        server.put("u2", "10.0.0.1")
        running.until(lambda: node.keeper.upstreams[0].state == "draining")
        assert len(node.keeper.upstreams) == 1  # its URL is taken until the last request of the old pod ends
        node.busy.clear()
        running.until(lambda: node.keeper.upstreams and node.keeper.upstreams[0].id != old.id)
        (new,) = node.keeper.upstreams
        assert (new.url, new.state, new.is_healthy, new.labels) == (old.url, "starting", False, {})
        assert new.number != old.number


def test_the_packages_of_extras_are_imported_only_when_they_are_asked_for() -> None:
    code = "import sys, meshd.controller.process; print({'dns', 'kubernetes'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
