"""429 and 503 of an upstream: de-ranked, left alone as long as it asks, waited for, or told to the client."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.fakes.fleet import Fleet, answer
from tests.fakes.node import Backend, Node, running, wait_until
from tests.fakes.scripted_upstream import Script

CHAT = {"model": "m1", "messages": [{"role": "user", "content": "hello"}]}
FLAGS = (
    "--io-processes", "2", "--prepare-workers", "1", "--disable-health-check", "--policy", "round_robin",
    "--retry-initial-backoff-ms", "5", "--route-headers",
)  # fmt: skip


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Node, Fleet]]:
    with Fleet(2) as fleet, running(*FLAGS, "--worker-urls", *fleet.urls) as node:
        wait_until(
            lambda: json.loads(node.request("GET", "/readiness")[2])["healthy_workers"] == 2, "not ready"
        )
        yield node, fleet


@pytest.fixture(scope="module")
def alone() -> Iterator[tuple[Node, Fleet]]:
    flags = (*FLAGS, "--retry-max-backoff-ms", "3000", "--worker-urls")
    with Fleet(1) as fleet, running(*flags, *fleet.urls) as node:
        wait_until(lambda: node.request("GET", "/readiness")[0] == 200, "not ready")
        yield node, fleet


def ask(node: Node) -> tuple[int, dict[str, str], bytes]:
    return node.request("POST", "/v1/chat/completions", CHAT)


def test_upstream_that_says_retry_after_gets_nothing_from_any_process_until_then(pair):
    node, fleet = pair
    fleet.play(Script(answer(429, b"{}", b"retry-after: 2")), Script(answer(200)))
    wait_until(lambda: ask(node)[0] == 200 and fleet.counts()[0] == 1, "it was never asked")
    asked_at = time.monotonic()
    with ThreadPoolExecutor(8) as pool:
        statuses = [pool.submit(ask, node).result()[0] for _ in range(40)]
    assert time.monotonic() - asked_at < 1.9, "too slow to see anything"
    assert statuses == [200] * 40
    assert fleet.counts() == [0, 40]
    status, _, body = node.request("GET", "/readiness")
    assert (status, json.loads(body)["healthy_workers"]) == (200, 1)
    fleet.play(Script(answer(200)))
    wait_until(lambda: ask(node)[0] == 200 and fleet.counts()[0] > 0, "it is never asked again")
    assert time.monotonic() - asked_at > 1.5
    node.settle()
    assert node.metric("mesh_worker_backpressure_total", worker=fleet.urls[0], kind="cooldown") == 1


def test_busy_upstream_without_advice_is_used_less_and_not_ejected(pair):
    node, fleet = pair
    for status in (429, 503):
        fleet.play(Script(answer(status)), Script(answer(200)))
        wait_until(lambda: ask(node)[0] == 200 and fleet.counts()[0] >= 1, "it was never asked")
        assert [ask(node)[0] for _ in range(10)] == [200] * 10
        assert fleet.counts() == [0, 10]
        ready, _, body = node.request("GET", "/readiness")
        assert (ready, json.loads(body)["healthy_workers"]) == (200, 2)
        fleet.play(Script(answer(200)))
        wait_until(lambda: ask(node)[0] == 200 and fleet.counts()[0] >= 1, "it stays out")
    assert node.metric("mesh_worker_cb_state") == 0


def test_deranked_upstream_serves_when_there_is_no_other(alone):
    node, fleet = alone
    replies = iter([answer(503), answer(200)])
    fleet.play(Script(lambda seen: next(replies)))
    status, headers, _ = ask(node)
    assert (status, headers["x-mesh-attempts"]) == (200, "2")


def test_upstream_that_is_alone_is_waited_for_within_the_longest_back_off(alone):
    node, fleet = alone
    replies = iter([answer(503, b"{}", b"retry-after: 1"), answer(200)])
    fleet.play(Script(lambda seen: next(replies)))
    began_at = time.monotonic()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(ask, node)
        wait_until(lambda: node.metric("mesh_worker_backpressure_total", kind="cooldown") >= 1, "not asked")
        ready, _, body = node.request("GET", "/readiness")
        assert (ready, json.loads(body)["healthy_workers"]) == (200, 0)  # a short one is waited for
        assert node.metric("mesh_worker_requests_active") == 0  # the load of the failed attempt is given back
        status, headers, _ = first.result()
    assert (status, headers["x-mesh-attempts"]) == (200, "2")
    assert time.monotonic() - began_at >= 1.0


def test_request_that_comes_during_a_short_cool_down_waits_and_is_served(alone):
    node, fleet = alone
    replies = iter([answer(429, b"{}", b"retry-after: 1"), answer(200), answer(200)])
    fleet.play(Script(lambda seen: next(replies)))
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(ask, node)
        fleet.members[0].take()
        second = pool.submit(ask, node)
        assert (first.result()[0], second.result()[0]) == (200, 200)
    assert second.result()[1]["x-mesh-attempts"] == "1"


def test_long_advice_of_the_only_upstream_is_relayed_at_once_and_then_told_by_us(alone):
    node, fleet = alone
    fleet.play(Script(answer(429, b'{"busy":true}', b"retry-after: 120")))
    began_at = time.monotonic()
    status, headers, body = ask(node)
    assert (status, headers["retry-after"], body) == (429, "120", b'{"busy":true}')
    assert "x-mesh-error-code" not in headers and headers["x-mesh-attempts"] == "1"
    status, headers, _ = ask(node)
    assert (status, headers["x-mesh-error-code"], headers["retry-after"]) == (
        503,
        "no_available_workers",
        "60",
    )
    assert time.monotonic() - began_at < 2.5
    assert sum(fleet.counts()) == 1
    ready, _, body = node.request("GET", "/readiness")
    assert (ready, json.loads(body)["reason"]) == (503, "no_available_workers")


def test_at_four_times_capacity_what_fits_is_served_and_the_excess_is_told_when_to_come_again():
    """Two upstreams that take two requests at a time, for 50 ms each; sixteen clients for two seconds."""
    backends = [Backend("--model", "m1", "--capacity", "2") for _ in range(2)]
    flags = (*FLAGS, "--policy", "least_load", "--max-concurrent-requests", "4", "--queue-size", "4")
    fault = {"x-backend-fault": "delay-head-ms=50"}
    try:
        with running(*flags, backends=backends) as node:
            wait_until(
                lambda: json.loads(node.request("GET", "/readiness")[2])["healthy_workers"] == 2, "ready"
            )
            began = time.monotonic()
            served: list[int] = []

            def is_over() -> bool:
                took_s = time.monotonic() - began
                return (took_s > 2 and len(served) > 60) or took_s > 60  # the machine may be busy

            def client(_: int) -> list[tuple[int, int]]:
                found = []
                while not is_over():
                    status, headers, _body = node.request("POST", "/v1/chat/completions", CHAT, fault)
                    found.append((status, int(headers.get("retry-after", 0))))
                    if status == 200:
                        served.append(status)
                    time.sleep(0.0 if status == 200 else 0.02)
                return found

            with ThreadPoolExecutor(16) as pool:
                answers = [each for found in pool.map(client, range(16)) for each in found]
            excess = [(status, advice) for status, advice in answers if status != 200]
            assert all(status in (429, 503) and advice >= 1 for status, advice in excess)
            assert len(excess) > len(served) / 4, "it was not overloaded"
            assert len(served) > 60  # of 160 that four places could serve in 2 s
            wait_until(lambda: not node.held(), f"left behind: {node.held()}")
    finally:
        for backend in backends:
            backend.stop()
