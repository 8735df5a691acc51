"""The official client against a server that speaks its protocol."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("kubernetes")

import trustme

from meshd.config.cluster import Cluster
from meshd.controller.discovery import pod_api
from meshd.controller.discovery.kubernetes import ApiFailed, Event, Expired
from meshd.controller.discovery.pod_api import PodApi
from tests.fakes.kubernetes_api import KubernetesApi, kubeconfig


@pytest.fixture
def server() -> Iterator[KubernetesApi]:
    with KubernetesApi() as running:
        yield running


@pytest.fixture
def cluster(server: KubernetesApi, tmp_path: Path) -> Cluster:
    file = tmp_path / "kubeconfig"
    file.write_text(kubeconfig(server.url))
    return Cluster(kubeconfig=str(file))


@pytest.fixture
def api(cluster: Cluster) -> PodApi:
    return PodApi(cluster, {"app": "engine"}, "")


def uids(pods: list[dict[str, dict[str, str]]]) -> list[str]:
    return [pod["metadata"]["uid"] for pod in pods]


class Taker:
    """Takes the events of a watch in a thread; last comes what ended it, None for a plain end."""

    def __init__(self, events: Iterator[Event]) -> None:
        self._taken: queue.Queue[Event | Exception | None] = queue.Queue()
        threading.Thread(target=self._run, args=(events,), daemon=True).start()

    def _run(self, events: Iterator[Event]) -> None:
        try:
            for event in events:
                self._taken.put(event)
        except (ApiFailed, Expired) as end:
            self._taken.put(end)
        else:
            self._taken.put(None)

    def next(self) -> tuple[str, str]:
        """Return kind and UID of the next event."""
        event = self._taken.get(timeout=10)
        assert isinstance(event, dict), event
        return event["type"], event["object"]["metadata"].get("uid", "")

    def end(self) -> Exception | None:
        end = self._taken.get(timeout=10)
        assert not isinstance(end, dict), end
        return end


def test_pods_of_the_selector_are_listed_in_all_namespaces_or_in_one(
    server: KubernetesApi, cluster: Cluster
) -> None:
    server.put("u1", "10.0.0.1", namespace="blue")
    server.put("u2", "10.0.0.2", namespace="green")
    server.put("u3", "10.0.0.3", namespace="green", labels={"app": "other"})
    pods, version = PodApi(cluster, {"app": "engine"}, "").list()
    assert uids(pods) == ["u1", "u2"]
    assert version == "103"
    assert uids(PodApi(cluster, {"app": "engine"}, "green").list()[0]) == ["u2"]
    assert server.lists()[-1].path == "/api/v1/namespaces/green/pods"
    PodApi(cluster, {"app": "engine", "a/b": ""}, "").list()
    assert server.lists()[-1].query["labelSelector"] == "app=engine,a/b="


def test_a_long_list_comes_in_pages_of_one_version(
    server: KubernetesApi, api: PodApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pod_api, "PAGE", 3)
    for number in range(8):
        server.put(f"u{number}", "10.0.0.1")
    pods, version = api.list()
    assert (len(pods), version) == (8, "108")
    assert [seen.query.get("continue") for seen in server.lists()] == [None, "108/3", "108/6"]


def test_a_watch_tells_every_change_after_its_version(server: KubernetesApi, api: PodApi) -> None:
    server.put("u1", "10.0.0.1")
    _, version = api.list()
    server.put("u2", "10.0.0.2")
    taker = Taker(api.watch(version, 60))
    assert taker.next() == ("ADDED", "u2")
    server.put("u1", "10.0.0.1", ready=False)
    assert taker.next() == ("MODIFIED", "u1")
    server.put("u1", "10.0.0.1", labels={"app": "other"})
    assert taker.next() == ("DELETED", "u1")
    server.delete("u2")
    assert taker.next() == ("DELETED", "u2")
    server.wait_for_watch()
    server.bookmark()
    assert taker.next() == ("BOOKMARK", "")


def test_a_watch_ends_when_its_time_is_over(server: KubernetesApi, api: PodApi) -> None:
    assert Taker(api.watch("100", 1)).end() is None
    assert server.watches()[0].query["timeoutSeconds"] == "1"


def test_a_version_that_is_gone_is_told_by_the_watch_and_by_the_list(
    server: KubernetesApi, api: PodApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.put("u1", "10.0.0.1")
    server.compact()
    assert isinstance(Taker(api.watch("100", 60)).end(), Expired)
    server.refuse(410)
    with pytest.raises(Expired):
        api.watch("101", 60)
    with pytest.raises(Expired):
        api.list()


def test_a_watch_that_is_cut_has_failed(server: KubernetesApi, api: PodApi) -> None:
    taker = Taker(api.watch("100", 60))
    server.wait_for_watch()
    server.cut()
    end = taker.end()
    assert isinstance(end, ApiFailed)
    assert "the watch broke" in str(end)


@pytest.mark.parametrize("status", [401, 403, 500, 503])
def test_a_refusal_says_what_the_server_said(server: KubernetesApi, api: PodApi, status: int) -> None:
    server.refuse(status)
    for ask in (api.list, lambda: api.watch("100", 60)):
        with pytest.raises(ApiFailed, match=f"refuses: HTTP {status} refused for a test"):
            ask()
    assert len(server.state.seen) == 2  # the client tries nothing again by itself


def test_a_server_that_is_not_there_is_a_failure(server: KubernetesApi, api: PodApi) -> None:
    server.__exit__()
    with pytest.raises(ApiFailed, match="Connection refused"):
        api.list()


def test_the_service_account_brings_address_authority_and_token(tmp_path: Path) -> None:
    authority = trustme.CA()
    chain = tmp_path / "server.pem"
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(str(chain))
    authority.cert_pem.write_to_path(str(tmp_path / "ca.crt"))
    token = tmp_path / "token"
    token.write_text("t0ken")
    with KubernetesApi(chain, "t0ken") as server:
        server.put("u1", "10.0.0.1")
        cluster = Cluster(host="127.0.0.1", port=str(server.port))
        assert uids(PodApi(cluster, {"app": "engine"}, "", str(tmp_path)).list()[0]) == ["u1"]
        token.write_text("other")
        with pytest.raises(ApiFailed, match="HTTP 401 Unauthorized"):
            PodApi(cluster, {"app": "engine"}, "", str(tmp_path)).list()
        trustme.CA().cert_pem.write_to_path(str(tmp_path / "ca.crt"))
        with pytest.raises(ApiFailed, match="certificate verify failed"):
            PodApi(cluster, {"app": "engine"}, "", str(tmp_path)).list()


def test_outside_of_a_cluster_the_problem_names_both_ways_in(tmp_path: Path) -> None:
    with pytest.raises(ApiFailed, match="no KUBECONFIG, and no service account in"):
        PodApi(Cluster(), {"app": "engine"}, "", str(tmp_path))


@pytest.mark.parametrize("text", [None, "", "a: [", "{}", "[]", '"x"'])
def test_a_kubeconfig_that_cannot_be_used_is_named(tmp_path: Path, text: str | None) -> None:
    file = tmp_path / "kubeconfig"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ApiFailed, match=str(file)):
        PodApi(Cluster(kubeconfig=str(file)), {"app": "engine"}, "")
