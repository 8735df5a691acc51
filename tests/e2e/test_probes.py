"""Health probes of a running node: how often, with what, and what they decide (upstream.md §2)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import pairwise

import pytest

from tests.fakes.node import Node, running, wait_until
from tests.fakes.probed_server import ProbedServer
from tests.fakes.workers import add, call, chat, remove_all, workers

INTERVAL_S = 0.4
FLAGS = (
    "--io-processes", "2",
    "--prepare-workers", "1",
    "--health-check-interval-secs", str(INTERVAL_S),
    "--health-check-timeout-secs", "0.3",
    "--worker-startup-timeout-secs", "5",
    "--worker-startup-check-interval", "1",
)  # fmt: skip


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    with running(*FLAGS) as running_node:
        yield running_node


@pytest.fixture
def server(node: Node) -> Iterator[ProbedServer]:
    with ProbedServer() as probed:
        yield probed
        remove_all(node)


def is_healthy(node: Node, url: str) -> bool:
    return bool(workers(node)[url]["is_healthy"])


def wait_for_probes(server: ProbedServer, count: int) -> None:
    """Wait until ``count`` more probes have arrived, and the last has been answered."""
    wanted = len(server.of("/health")) + count
    wait_until(lambda: len(server.of("/health")) >= wanted, "no probes")


def test_one_probe_per_interval_with_the_key_however_many_front_doors(
    node: Node, server: ProbedServer
) -> None:
    """upstream.md behaviour 5, its first half."""
    add(node, server.url, api_key="sk-1")
    wait_for_probes(server, 6)
    probes = server.of("/health")
    assert {probe.headers.get("authorization") for probe in probes} == {"Bearer sk-1"}
    assert {(probe.method, probe.headers["connection"]) for probe in probes} == {("GET", "close")}
    pauses = [after.at - before.at for before, after in pairwise(probes)]
    assert min(pauses) >= 0.9 * INTERVAL_S - 0.05  # never closer, whatever the machine is busy with


def test_until_its_first_success_an_upstream_is_probed_every_second(node: Node, server: ProbedServer) -> None:
    """upstream.md behaviour 5, its second half: more often than its interval of 60 s says."""
    server.answers["/health"] = (503, b"")
    call(node, "POST", "/workers", {"url": server.url, "health_check_interval_secs": 60})
    wait_for_probes(server, 3)
    pauses = [after.at - before.at for before, after in pairwise(server.of("/health"))]
    assert min(pauses) >= 0.95
    assert not server.of("/v1/models")
    server.answers["/health"] = (200, b"")
    wait_until(lambda: is_healthy(node, server.url), "not healthy")


def test_first_failures_do_not_eject_three_do_and_two_successes_bring_back(
    node: Node, server: ProbedServer
) -> None:
    """upstream.md behaviour 6."""
    add(node, server.url)
    for status in (500, 302):
        server.answers["/health"] = (status, b"")
        seen = len(server.of("/health"))
        wait_until(lambda: not is_healthy(node, server.url), "not ejected")
        assert len(server.of("/health")) - seen >= 3
        assert call(node, "GET", "/readiness")[1]["reason"] == "no_available_workers"
        assert chat(node)[0] == 503
        server.answers["/health"] = (200, b"")
        seen = len(server.of("/health"))
        wait_until(lambda: is_healthy(node, server.url), "not brought back")
        assert len(server.of("/health")) - seen >= 2
        assert chat(node)[0] == 200


def test_busy_upstream_with_failing_probes_and_successful_traffic_stays_healthy(
    node: Node, server: ProbedServer
) -> None:
    """upstream.md behaviour 7."""
    add(node, server.url)
    server.answers["/health"] = (500, b"")
    wanted = len(server.of("/health")) + 6
    while len(server.of("/health")) < wanted:
        assert chat(node)[0] == 200
        time.sleep(0.02)  # the pace of the traffic, not a wait
    assert is_healthy(node, server.url)
    wait_until(lambda: not is_healthy(node, server.url), "not ejected once the traffic has stopped")


def test_removed_upstream_is_not_probed_and_one_registered_anew_is_probed_by_its_new_settings(
    node: Node, server: ProbedServer
) -> None:
    """upstream.md behaviour 8."""
    worker = add(node, server.url)
    call(node, "DELETE", f"/workers/{worker}")
    wait_until(lambda: not workers(node), "not removed")
    seen = len(server.of("/health"))
    with ProbedServer() as other:
        add(node, other.url)
        wait_for_probes(other, 4)  # time has passed for probes of the removed one
        assert len(server.of("/health")) == seen
    add(node, server.url, health_check_interval_secs=60)
    seen = len(server.of("/health"))
    with ProbedServer() as other:
        add(node, other.url)
        wait_for_probes(other, 4)
        assert len(server.of("/health")) == seen


def test_changed_settings_of_probes_act_at_once(node: Node, server: ProbedServer) -> None:
    worker = add(node, server.url, health_check_interval_secs=60)
    call(node, "PUT", f"/workers/{worker}", {"health_check_interval_secs": 0.2})
    wait_for_probes(server, 3)
    call(node, "PUT", f"/workers/{worker}", {"disable_health_check": True})
    server.answers["/health"] = (500, b"")
    seen = len(server.of("/health"))
    with ProbedServer() as other:
        add(node, other.url)
        wait_for_probes(other, 4)
    assert len(server.of("/health")) <= seen + 1  # one may have been under way
    assert is_healthy(node, server.url)


def test_upstream_without_probes_is_in_use_at_once(node: Node, server: ProbedServer) -> None:
    add(node, server.url, disable_health_check=True)
    assert chat(node)[0] == 200
    assert not server.of("/health")


def test_upstream_that_never_starts_is_logged_and_has_failed_and_stays(
    node: Node, server: ProbedServer
) -> None:
    server.answers["/health"] = (503, b"")
    call(node, "POST", "/workers", {"url": server.url})
    wait_until(lambda: workers(node)[server.url]["job_status"]["status"] == "failed", "not given up")
    assert workers(node)[server.url]["job_status"]["message"].endswith("/health answered 503")
    told = [line for line in node.lines if line.get("upstream") == server.url]
    assert {"upstream_starting", "upstream_not_started"} <= {line["event"] for line in told}
    server.answers["/health"] = (200, b"")
    wait_until(lambda: is_healthy(node, server.url), "not used although it has started")
    assert workers(node)[server.url]["job_status"]["status"] == "completed"
