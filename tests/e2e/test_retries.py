"""Attempts, back-off and the retry budget, over upstreams that refuse, reset and answer every status."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.fakes.fleet import Fleet, answer
from tests.fakes.node import Node, running, wait_until
from tests.fakes.scripted_upstream import Script, Seen

CHAT = {"model": "m1", "messages": [{"role": "user", "content": "hello"}]}
QUICK = (
    "--prepare-workers", "1", "--disable-health-check", "--policy", "round_robin", "--route-headers",
    "--retry-initial-backoff-ms", "5",
)  # fmt: skip
UNBOUNDED = ("--retry-budget-min", "1000000", "--disable-circuit-breaker")


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with Fleet(5) as fleet:
        yield fleet


@pytest.fixture(scope="module")
def node(fleet: Fleet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """Five upstreams, each with a key of its own."""
    file = tmp_path_factory.mktemp("keys") / "meshd.toml"
    file.write_text(
        "".join(f'[[workers]]\nurl = "{u}"\napi_key = "key-{n}"\n' for n, u in enumerate(fleet.urls))
    )
    with running(*QUICK, *UNBOUNDED, "--io-processes", "1", "--config", str(file)) as node:
        wait_until(lambda: node.request("GET", "/readiness")[0] == 200, "not ready")
        yield node


def ask(
    node: Node, path: str = "/v1/chat/completions", body: object = CHAT
) -> tuple[int, dict[str, str], bytes]:
    return node.request("POST", path, body)


def wait_for_upstreams(node: Node, count: int) -> None:
    """Wait until so many are taken in: before that, they are asked what a script would answer wrongly."""

    def healthy() -> int:
        listed = json.loads(node.request("GET", "/workers")[2])["workers"]
        return sum(1 for upstream in listed if upstream["is_healthy"])

    wait_until(lambda: healthy() == count, "not all were taken in")


def silence(seen: Seen) -> Iterator[bytes]:
    """Answer nothing, for longer than anybody waits."""
    time.sleep(3)
    yield b""


@pytest.mark.parametrize("status", [408, 429, 502, 503, 504])
def test_retried_status_is_attempted_five_times_over_distinct_upstreams(node, fleet, status):
    fleet.play(*(Script(answer(status, b'{"n":%d}' % n, b"x-which: %d" % n)) for n in range(5)))
    got, headers, body = ask(node)
    assert fleet.counts() == [1] * 5
    # the client gets the last answer unchanged
    assert (got, json.loads(body)["n"], headers["x-mesh-attempts"]) == (status, int(headers["x-which"]), "5")
    assert "x-mesh-error-code" not in headers


@pytest.mark.parametrize("status", [400, 404, 500, 501, 529])
def test_other_errors_are_relayed_at_once(node, fleet, status):
    fleet.play(Script(answer(status)))
    assert ask(node)[0] == status
    assert sum(fleet.counts()) == 1


def test_retry_sends_the_same_id_and_bytes_with_the_key_of_its_upstream(node, fleet):
    fleet.play(Script(answer(503)))
    body = b'{"model":"m1", "messages":[{"role":"user","content":"' + b"h" * 100_000 + b'"}]}'
    ask(node, body=body)
    visits = fleet.visits()
    assert len(visits) == 5
    for place, seen in visits:
        assert seen.body == body
        assert seen.values("authorization") == [b"Bearer key-%d" % place]
    assert len({seen.values("x-request-id")[0] for _, seen in visits}) == 1


def test_success_after_failures_is_one_request_in_the_records(node, fleet):
    node.settle()
    retries = node.metric("mesh_worker_retries_total", endpoint="chat")
    requests = node.metric("mesh_router_requests_total")
    usage = b'{"usage":{"prompt_tokens":3,"completion_tokens":4}}'
    fleet.play(*(Script(answer(503) if n != 2 else answer(200, usage)) for n in range(5)))
    status, headers, _ = ask(node)
    visited = sum(fleet.counts())
    assert status == 200 and headers["x-mesh-attempts"] == str(visited)

    def lines() -> list[dict[str, Any]]:
        return [line for line in node.access_lines() if line["request_id"] == headers["x-request-id"]]

    wait_until(lines, "no access line")
    (line,) = lines()
    assert (line["attempts"], line["outcome"], line["output_tokens"]) == (visited, "completed", 4)
    node.settle()
    assert node.metric("mesh_worker_retries_total", endpoint="chat") == retries + visited - 1
    assert node.metric("mesh_router_requests_total") == requests + 1


def test_request_that_kills_its_server_visits_two(node, fleet):
    for ending in ("reset", "close"):
        fleet.play(Script(b"", ending))
        status, headers, body = ask(node)
        counts = fleet.counts()
        # a connection that was idle before is replaced once, which is no attempt
        assert sum(map(bool, counts)) == 2 and sum(counts) <= 3
        assert (status, headers["x-mesh-error-code"]) == (502, "upstream_connection_failed")
        assert headers["x-mesh-attempts"] == "2"
        assert b"127.0.0.1" not in body and json.loads(body)["error"]["code"] == "upstream_connection_failed"


def test_malformed_head_is_attempted_elsewhere(node, fleet):
    fleet.play(Script(b"HTTP/1.1 abc\r\n\r\n", "close"))
    status, headers, _ = ask(node)
    assert (status, headers["x-mesh-error-code"]) == (502, "upstream_protocol_error")
    assert fleet.counts() == [1] * 5


def test_stored_response_is_submitted_once_and_an_unstored_one_again(node, fleet):
    fleet.play(Script(b"", "close"))
    assert ask(node, "/v1/responses", {"model": "m1", "input": "a"})[0] == 502
    assert sum(fleet.counts()) == 1
    assert ask(node, "/v1/responses", {"model": "m1", "input": "a", "store": False})[0] == 502
    assert sum(fleet.counts()) == 2
    fleet.play(Script(answer(503)))
    assert ask(node, "/v1/responses", {"model": "m1", "input": "a"})[0] == 503
    assert sum(fleet.counts()) == 1


def test_connection_of_a_retried_answer_is_used_again_and_one_with_a_long_body_is_not(node, fleet):
    fleet.play(Script(answer(503, b'"%b"' % (b"x" * 60_000))))
    ask(node)
    first = {place: seen.connection for place, seen in fleet.visits()}
    ask(node)
    again = {place: seen.connection for place, seen in fleet.visits()}
    assert sum(first[place] == again[place] for place in range(5)) >= 4  # all but the last one may be in use
    wait_until(lambda: not node.held(), f"left behind: {node.held()}")


def test_client_that_leaves_between_attempts_leaves_nothing():
    flags = (*QUICK, "--io-processes", "1", "--retry-initial-backoff-ms", "20000", "--worker-urls")
    with Fleet(2) as fleet, running(*flags, *fleet.urls) as node:
        wait_for_upstreams(node, 2)
        fleet.play(Script(answer(502, b'"%b"' % (b"x" * 500_000))))
        body = json.dumps(CHAT).encode()
        with node.connect() as client:
            client.sendall(
                b"POST /v1/chat/completions HTTP/1.1\r\nhost: h\r\ncontent-type: application/json\r\n"
                b"content-length: %d\r\n\r\n%b" % (len(body), body)
            )
            wait_until(lambda: node.metric("mesh_worker_retry_backoff_seconds_count") == 1, "no back-off")
            assert node.held().keys() == {"mesh_admission_held", "mesh_body_memory_reserved_bytes"}
        wait_until(lambda: not node.held(), f"left behind: {node.held()}")
        wait_until(lambda: node.metric("mesh_worker_connections_active") == 0, "a connection stays")
        assert sum(fleet.counts()) == 1


def test_500_is_attempted_five_times_with_the_flag():
    with (
        Fleet(5) as fleet,
        running(
            *QUICK, *UNBOUNDED, "--io-processes", "1", "--retry-on-500", "--worker-urls", *fleet.urls
        ) as node,
    ):
        wait_for_upstreams(node, 5)
        fleet.play(Script(answer(500)))
        assert ask(node)[0] == 500
        assert fleet.counts() == [1] * 5


def test_refused_connect_makes_five_attempts():
    flags = (*QUICK, *UNBOUNDED, "--io-processes", "1", "--worker-urls")
    with socket.socket() as unheard:
        unheard.bind(("127.0.0.1", 0))  # and does not listen
        with running(*flags, f"http://127.0.0.1:{unheard.getsockname()[1]}") as node:
            wait_until(lambda: node.request("GET", "/readiness")[0] == 200, "not ready")
            status, headers, _ = ask(node)
            assert (status, headers["x-mesh-error-code"]) == (502, "upstream_connection_failed")
            assert headers["x-mesh-attempts"] == "5"
            node.settle()
            assert node.metric("mesh_worker_errors_total", error_type="connect") == 5
            assert node.metric("mesh_worker_retries_exhausted_total", endpoint="chat") == 1


def test_request_timer_spans_all_attempts():
    flags = (*QUICK, *UNBOUNDED, "--io-processes", "1", "--request-timeout-secs", "0.5", "--worker-urls")
    with Fleet(2) as fleet, running(*flags, *fleet.urls, "--first-byte-timeout-secs", "0.2") as node:
        wait_for_upstreams(node, 2)
        fleet.play(Script(silence))
        status, headers, _ = ask(node)
        assert (status, headers["x-mesh-error-code"]) == (504, "upstream_timeout")
        assert 2 <= sum(fleet.counts()) <= 3


def test_with_every_upstream_failing_retries_stay_within_the_budget_of_both_processes():
    flags = (*QUICK, "--io-processes", "2", "--disable-circuit-breaker", "--worker-urls")
    with Fleet(2) as fleet, running(*flags, *fleet.urls) as node:
        wait_for_upstreams(node, 2)
        fleet.play(Script(answer(503, b'{"who":"the upstream"}', b"retry-after: 0")))
        requests = 100
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda _: ask(node), range(requests)))
        attempts = sum(fleet.counts())
        assert requests < attempts <= requests + max(10, 0.2 * requests)
        for status, headers, body in answers:
            assert (status, body, headers["retry-after"]) == (503, b'{"who":"the upstream"}', "0")
        node.settle()
        assert node.metric("mesh_retry_budget_exhausted_total") > 0
        assert node.metric("mesh_worker_retries_total") == attempts - requests
        wait_until(lambda: not node.held(), f"left behind: {node.held()}")


def test_no_budget_means_no_retry():
    flags = (*QUICK, "--io-processes", "1", "--retry-budget-ratio", "0", "--retry-budget-min", "0")
    with Fleet(2) as fleet, running(*flags, "--worker-urls", *fleet.urls) as node:
        wait_for_upstreams(node, 2)
        fleet.play(Script(answer(503)))
        assert ask(node)[0] == 503
        assert sum(fleet.counts()) == 1
