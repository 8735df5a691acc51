"""Upstreams that come and go by a file and by Kubernetes pods, on one node, while requests flow."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

pytest.importorskip("kubernetes")

from tests.e2e.conftest import COMMON
from tests.fakes.kubernetes_api import KubernetesApi, kubeconfig
from tests.fakes.node import Backend, Node, running, wait_until

CHAT = "/v1/chat/completions"


@dataclass
class Setup:
    """``one`` and ``two`` are for the file, ``pod`` is the server in pods, on every address of loopback."""

    node: Node
    file: Path
    cluster: KubernetesApi
    one: Backend
    two: Backend
    pod: Backend
    pod_port: int

    def write(self, *urls: str) -> None:
        fresh = self.file.with_suffix(".new")
        fresh.write_text("workers = [\n" + "".join(f'  {{ url = "{url}" }},\n' for url in urls) + "]\n")
        os.replace(fresh, self.file)

    def pod_url(self, ip: str) -> str:
        return f"http://{ip}:{self.pod_port}"

    def workers(self) -> list[dict[str, Any]]:
        status, _, body = self.node.request("GET", "/workers")
        return json.loads(body)["workers"] if status == 200 else []

    def wait_for(self, *urls: str) -> None:
        """Wait until exactly these upstreams are there and available."""
        wait_until(
            lambda: (
                sorted(each["url"] for each in self.workers() if each["available"]) == sorted(urls)
                and len(self.workers()) == len(urls)
            ),
            f"not {urls}",
        )


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    directory = tmp_path_factory.mktemp("discovery")
    one, two, pod = (
        Backend("--model", "m1"),
        Backend("--model", "m1"),
        Backend("--model", "p1", "--host", "0.0.0.0"),
    )
    port = urlsplit(pod.url).port or 0
    with KubernetesApi() as cluster:
        (directory / "kubeconfig").write_text(kubeconfig(cluster.url))
        file = directory / "workers.toml"
        flags = (
            *COMMON, "--policy", "round_robin",
            "--discovery-file", str(file), "--discovery-check-interval-secs", "0.1",
            "--service-discovery", "--selector", "app=engine", "--service-discovery-port", str(port),
        )  # fmt: skip
        try:
            with running(*flags, env={"KUBECONFIG": str(directory / "kubeconfig")}) as node:
                yield Setup(node, file, cluster, one, two, pod, port)
        finally:
            for backend in (one, two, pod):
                backend.stop()


def ask(node: Node, model: str) -> int:
    body = {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    return node.request("POST", CHAT, body)[0]


@dataclass
class Traffic:
    """Asks without pause, and keeps the statuses."""

    node: Node
    model: str
    statuses: list[int] = field(default_factory=list)
    is_over: bool = False

    def __enter__(self) -> Traffic:
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.is_over = True
        self._thread.join(30)

    def more(self, count: int) -> None:
        """Wait for so many more answers."""
        target = len(self.statuses) + count
        wait_until(lambda: len(self.statuses) >= target, "no traffic")

    def _run(self) -> None:
        while not self.is_over:
            self.statuses.append(ask(self.node, self.model))


def test_a_changing_file_is_followed_under_traffic_and_costs_no_request(setup: Setup) -> None:
    one, two = setup.one, setup.two
    setup.write(one.url)
    setup.wait_for(one.url)
    with Traffic(setup.node, "m1") as traffic:
        traffic.more(5)
        setup.write(one.url, two.url)
        setup.wait_for(one.url, two.url)
        two.control("DELETE", "/_backend/requests")
        traffic.more(20)
        assert two.requests()
        setup.write(two.url)
        setup.wait_for(two.url)
        one.control("DELETE", "/_backend/requests")
        traffic.more(20)
        assert [seen for seen in one.requests() if seen["path"] == CHAT] == []
        setup.file.write_text("workers = [")
        wait_until(
            lambda: any(line.get("event") == "discovery_refused" for line in setup.node.lines), "not refused"
        )
        traffic.more(20)
    assert set(traffic.statuses) == {200}
    setup.wait_for(two.url)
    setup.write()
    setup.wait_for()


def test_pods_come_go_and_are_replaced_on_their_address(setup: Setup) -> None:
    first, second = setup.pod_url("127.0.0.1"), setup.pod_url("127.0.0.2")
    setup.cluster.put("u1", "127.0.0.1", labels={"app": "engine", "mesh.capacity": "8"})
    setup.cluster.put("u2", "127.0.0.2", ready=False)
    setup.wait_for(first)
    (found,) = setup.workers()
    assert (found["models"], found["metadata"]["mesh.capacity"]) == (["p1"], "8")
    assert ask(setup.node, "p1") == 200
    setup.cluster.put("u2", "127.0.0.2")
    setup.wait_for(first, second)
    setup.cluster.delete("u1")
    setup.wait_for(second)
    setup.cluster.put("u3", "127.0.0.1")
    setup.wait_for(first, second)
    again = next(each for each in setup.workers() if each["url"] == first)
    assert again["id"] != found["id"]
    assert "mesh.capacity" not in again["metadata"]
    setup.cluster.delete("u2")
    setup.cluster.delete("u3")
    setup.wait_for()
    assert ask(setup.node, "p1") in (404, 503)


def test_a_killed_controller_is_followed_by_one_that_compares(setup: Setup) -> None:
    pod = setup.pod_url("127.0.0.1")
    setup.cluster.put("u4", "127.0.0.1")
    setup.write(setup.one.url)
    setup.wait_for(setup.one.url, pod)
    before = {each["url"]: each["id"] for each in setup.workers()}
    setup.cluster.refuse(503)
    (killed,) = setup.node.pids("controller")
    os.kill(killed, signal.SIGKILL)
    setup.write(setup.two.url)
    setup.wait_for(setup.two.url, pod)  # the pods cannot be read, so they stay
    after = {each["url"]: each["id"] for each in setup.workers()}
    assert after[pod] == before[pod]
    setup.cluster.delete("u4")
    setup.cluster.refuse(0)
    setup.wait_for(setup.two.url)
    setup.write()
    setup.wait_for()


def test_the_metrics_tell_what_each_source_lists(setup: Setup) -> None:
    setup.write(setup.one.url, setup.two.url)
    setup.wait_for(setup.one.url, setup.two.url)
    metric = setup.node.metric
    assert metric("mesh_discovery_workers_discovered", source="file") == 2
    added = metric("mesh_discovery_registrations_total", source="file")
    removed = metric("mesh_discovery_deregistrations_total", source="file")
    assert added - removed == 2
    setup.write()
    setup.wait_for()
    assert metric("mesh_discovery_deregistrations_total", source="file") == removed + 2
    assert metric("mesh_discovery_workers_discovered", source="dns") == 0
