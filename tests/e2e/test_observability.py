"""Metrics and access lines of a whole node under hostile and mixed load (metrics.md)."""

from __future__ import annotations

import http.client
import json
import os
import random
import signal
import string
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest

from tests.e2e.conftest import COMMON, DEMO_TOKENIZER
from tests.fakes.fleet import Fleet, answer
from tests.fakes.load import SteadyLoad
from tests.fakes.node import Backend, Node, running, wait_until
from tests.fakes.scripted_upstream import Script

ASK = {"model": "m1", "prompt": "one two three"}
CHAT = {"model": "m1", "messages": [{"role": "user", "content": "a b"}]}
WORDS = string.ascii_letters + string.digits
GAUGES_OF_USE = (
    "mesh_http_connections_active",
    "mesh_http_inflight_request_age_count",
    "mesh_admission_held",
    "mesh_admission_waiting",
    "mesh_body_memory_reserved_bytes",
    "mesh_prepare_queued_jobs",
    "mesh_prepare_dispatched_jobs",
    "mesh_prepare_execution_reserved",
    "mesh_prepare_busy_workers",
    "mesh_worker_requests_active",
)


@pytest.fixture(scope="module")
def shared(backends: tuple[Backend, Backend]) -> Iterator[Node]:
    flags = (*COMMON, "--policy", "prefix_hash", "--tokenizer-path", DEMO_TOKENIZER, "--disable-health-check")
    with running(*flags, "--disable-circuit-breaker", backends=backends) as node:
        yield node


def line_of(node: Node, request_id: str) -> dict[str, Any]:
    def found() -> list[dict[str, Any]]:
        return [line for line in node.access_lines() if line["request_id"] == request_id]

    wait_until(found, f"no access line of {request_id}")
    (line,) = found()
    return line


# ----------------------------------------------------------------------- behaviours 1 and 13


class Unread(Node):
    """A node whose log nobody reads once it is ready: its stderr is a pipe that fills up."""

    def _read(self) -> None:
        assert self.process.stderr is not None
        for raw in self.process.stderr:
            line = json.loads(raw)
            if line["event"] == "ready":
                self._ready.put(line)
                return


@pytest.fixture(scope="module")
def unread(backends: tuple[Backend, Backend]) -> Iterator[Node]:
    node = Unread(*COMMON, "--io-processes", "1", "--disable-health-check",
                  "--worker-urls", *(backend.url for backend in backends))  # fmt: skip
    try:
        yield node
    finally:
        node.kill()


def random_request(rng: random.Random) -> bytes:
    """Return a request with a random path, method or model, or all of them."""
    word = "".join(rng.choices(WORDS, k=12))
    kind = rng.randrange(4)
    if kind == 0:
        return f"GET /{word}/{word}?{word}={word} HTTP/1.1\r\nhost: h\r\n\r\n".encode()
    if kind == 1:
        path = rng.choice(("/health", "/v1/models", "/v1/completions", f"/{word}"))
        return f"{word.upper()} {path} HTTP/1.1\r\nhost: h\r\n\r\n".encode()
    body = json.dumps({"model": word, "prompt": word}).encode()
    path = "/v1/completions" if kind == 2 else f"/v1/responses/{word}/{word}"
    return (
        f"POST {path} HTTP/1.1\r\nhost: h\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\nx-request-id: {word}\r\n\r\n".encode()
        + body
    )


def send_random(node: Node, count: int, seed: int) -> None:
    """Send ``count`` requests over one connection, in pipelines of 20."""
    rng = random.Random(seed)
    with node.connect(30) as client:
        reader = client.makefile("rb")
        for _ in range(count // 20):
            requests = [random_request(rng) for _ in range(20)]
            client.sendall(b"".join(requests))
            for request in requests:
                status, body = read_answer(reader)
                assert status in (404, 405), (request, status, body)


def read_answer(reader: Any) -> tuple[int, bytes]:
    status = int(reader.readline().split()[1])
    length = 0
    while (line := reader.readline()) != b"\r\n":
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            length = int(value)
    return status, reader.read(length)


def settled_series(node: Node) -> set[object]:
    """Return the series of a node at rest: ended requests are counted a moment later."""
    seen: list[set[object]] = []

    def is_settled() -> bool:
        seen.append(set(node.metrics()))
        return len(seen) > 20 and all(each == seen[-1] for each in seen[-20:])

    wait_until(is_settled, "series still appear", 30)
    return seen[-1]


def test_10000_random_paths_methods_and_model_names_add_no_series_and_an_unread_log_drops_lines(unread):
    node = unread
    wait_until(lambda: node.request("GET", "/readiness")[0] == 200, "not ready")
    send_random(node, 200, seed=1)  # the series of `other` appear
    before = settled_series(node)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda seed: send_random(node, 2500, seed), range(2, 6)))
    wait_until(lambda: node.metric("mesh_http_requests_total") >= 10_200, "a request is not counted")
    assert set(node.metrics()) == before
    # Nobody was kept waiting by the log; what found no room in its queue of 10,000 is counted.
    send_random(node, 1000, seed=6)
    wait_until(lambda: node.metric("mesh_internal_drops_total", queue="log") > 0, "drops are not counted")
    assert set(node.metrics()) == before


SECRETS = ("b0dy", "qu3ry", "cr3dential", "c00kie", "h3ader")


def test_log_line_never_contains_a_body_a_query_or_a_credential_and_stays_one_line(shared):
    node = shared
    headers = {
        "authorization": "Bearer cr3dential",
        "x-api-key": "cr3dential",
        "cookie": "c00kie",
        "x-custom": "h3ader",
        "x-request-id": "secretive",
    }
    body = {"model": 'm1\n{"event":"forged"}\x1b[31m', "prompt": "b0dy b0dy"}
    assert node.request("POST", "/v1/completions?key=qu3ry", body, headers)[0] == 404
    assert node.request("POST", "/v1/completions?key=qu3ry", {**ASK, "prompt": "b0dy"}, headers)[0] == 200
    for fault in ("cut=150", "close", "status=500", "malformed-head"):
        node.request("POST", "/v1/completions?key=qu3ry", {**ASK, "prompt": "b0dy", "stream": True},
                     {**headers, "x-backend-fault": fault})  # fmt: skip
    assert node.request("POST", "/v1/completions?qu3ry", b'{"prompt": b0dy', headers)[0] == 400
    node.request("GET", "/qu3?qu3ry", headers={**headers, "x-request-id": "last"})
    assert line_of(node, "last")["path"] == "/qu3"

    def mine() -> list[dict[str, Any]]:
        return [line for line in node.access_lines() if line["request_id"] == "secretive"]

    wait_until(lambda: len(mine()) == 7, "lines are missing")
    assert body["model"] in [line.get("model") for line in mine()]  # one JSON object on one line
    for raw in node.raw_lines:
        assert raw.startswith("{") and "\x1b" not in raw and not any(word in raw for word in SECRETS), raw
    assert not any(line.get("event") == "forged" for line in node.lines)


# --------------------------------------------------------------------------------- behaviours 2, 3 and 5


ENDINGS: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("/v1/completions", ASK, ""),
    ("/v1/completions", {**ASK, "stream": True}, ""),
    ("/v1/chat/completions", CHAT, ""),
    ("/v1/chat/completions", {**CHAT, "stream": True}, ""),
    ("/v1/completions", {"model": "m1"}, ""),
    ("/v1/completions", {**ASK, "model": "nobody"}, ""),
    ("/v1/completions", ASK, "status=500"),
    ("/v1/completions", ASK, "status=404"),
    ("/v1/completions", ASK, "close"),
    ("/v1/completions", {**ASK, "stream": True}, "cut=150"),
    ("/v1/completions", {**ASK, "stream": True}, "error-event=2"),
    ("/v1/completions", {**ASK, "stream": True}, "malformed-head"),
    ("/nowhere", ASK, ""),
    ("/v1/tokenize", {"model": "m1", "prompt": "a b"}, ""),
)


def send_mixed(node: Node, numbers: range) -> int:
    """Send requests that end in every way; return how many clients left before their answer."""
    left = 0
    for number in numbers:
        if number % 15 == 14:
            leave(node)
            left += 1
            continue
        path, body, fault = ENDINGS[number % 15]
        node.request("POST", path, body, {"x-backend-fault": fault} if fault else None)
    return left


def leave(node: Node) -> None:
    body = json.dumps(ASK).encode()
    with node.connect() as client:
        client.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: h\r\ncontent-type: application/json\r\n"
            b"x-backend-fault: delay-head-ms=20000\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
        )
        time.sleep(random.Random(len(body)).uniform(0, 0.02))


def test_after_1000_requests_that_ended_in_every_way_sums_agree_and_every_gauge_is_0(shared):
    node = shared
    names = ("mesh_http_requests_total", "mesh_http_responses_total", "mesh_http_client_disconnects_total")
    node.settle()
    before = [node.metric(name) for name in names]
    with ThreadPoolExecutor(20) as pool:
        left = sum(pool.map(lambda n: send_mixed(node, range(50 * n, 50 * n + 50)), range(20)))

    def grown() -> list[float]:
        return [node.metric(name) - start for name, start in zip(names, before, strict=True)]

    def is_whole() -> bool:
        heads, answered, gone = grown()
        return gone == left and heads == answered + gone == 1000

    wait_until(is_whole, f"heads, answers, disconnects: {grown()}, left {left}")

    def in_use() -> dict[Any, float]:
        return {key: value for key, value in node.metrics().items() if key[0] in GAUGES_OF_USE and value}

    wait_until(lambda: not in_use(), f"still in use: {in_use()}")
    assert set(GAUGES_OF_USE) <= {name for name, _ in node.metrics()}
    jobs = node.metric("mesh_prepare_jobs_total")
    assert jobs == node.metric("mesh_prepare_run_seconds_count") + node.metric("mesh_prepare_errors_total")


def test_scrape_takes_little_under_full_load_and_waits_for_no_process(shared):
    """Little: of the controller's own CPU time, which does not depend on who else runs here."""
    node = shared
    (controller,) = node.pids("controller")
    with SteadyLoad(node, connections=6) as load:
        load.wait_for_more(50)
        before = psutil.Process(controller).cpu_times()
        for _ in range(20):
            with urllib.request.urlopen(node.metrics_url, timeout=10) as scraped:
                assert scraped.read()
        after = psutil.Process(controller).cpu_times()
    assert (after.user + after.system - before.user - before.system) / 20 < 0.1
    pid = node.pids("io")[0]
    os.kill(pid, signal.SIGSTOP)
    try:
        assert node.metric("mesh_processes", kind="io") == 2
    finally:
        os.kill(pid, signal.SIGCONT)


# --------------------------------------------------------------------------------- behaviours 7, 8 and 15


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with Fleet(3) as fleet:
        yield fleet


@pytest.fixture(scope="module")
def scripted(fleet: Fleet) -> Iterator[Node]:
    flags = ("--io-processes", "1", "--prepare-workers", "1", "--disable-health-check", "--policy",
             "round_robin", "--retry-initial-backoff-ms", "5", "--retry-budget-min", "1000")  # fmt: skip
    with running(*flags, "--disable-circuit-breaker", "--worker-urls", *fleet.urls) as node:
        wait_until(lambda: node.request("GET", "/readiness")[0] == 200, "not ready")
        yield node


def test_error_code_of_an_upstream_never_becomes_a_label_value(scripted, fleet):
    for status in (400, 404, 500, 599):
        fleet.play(Script(answer(status, b"{}", b"x-mesh-error-code: from_upstream")))
        assert scripted.request("POST", "/v1/completions", ASK)[0] == status
    wait_until(lambda: scripted.metric("mesh_http_responses_total", status_code="599") == 1, "not counted")
    for name, pairs in scripted.metrics():
        assert "from_upstream" not in dict(pairs).values(), name
    scripted.settle()
    assert scripted.metric("mesh_http_responses_total", status_code="599", error_code="") == 1


def test_first_token_usage_and_outcome_are_recorded_once_for_a_request_of_three_attempts(scripted, fleet):
    names = (
        "mesh_router_ttft_seconds_count",
        "mesh_router_generation_duration_seconds_count",
        "mesh_router_requests_total",
        "mesh_router_request_duration_seconds_count",
        "mesh_router_request_errors_total",
        "mesh_worker_retries_total",
    )
    scripted.settle()
    before = {name: scripted.metric(name) for name in names}
    tokens = {
        kind: scripted.metric("mesh_router_tokens_total", token_type=kind) for kind in ("input", "output")
    }
    events = (
        b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'
        b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":4}}\n\ndata: [DONE]\n\n'
    )
    stream = (
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        b"%x\r\n%b\r\n0\r\n\r\n" % (len(events), events)
    )
    asked: list[int] = []

    def third_answers(_: object) -> bytes:
        asked.append(1)
        return stream if len(asked) == 3 else answer(503)

    fleet.play(Script(third_answers))
    body = {**CHAT, "stream": True}
    status, headers, _ = scripted.request("POST", "/v1/chat/completions", body)
    assert status == 200 and len(asked) == 3
    line = line_of(scripted, headers["x-request-id"])
    assert (line["attempts"], line["outcome"], line["output_tokens"]) == (3, "completed", 4)

    def grown() -> list[float]:
        return [scripted.metric(name) - before[name] for name in names]

    wait_until(lambda: grown() == [1, 1, 1, 1, 0, 2], f"{dict(zip(names, grown(), strict=True))}")
    for kind, count in (("input", 3), ("output", 4)):
        assert scripted.metric("mesh_router_tokens_total", token_type=kind) - tokens[kind] == count


def test_probe_scrape_and_admin_call_are_not_in_the_metrics_of_endpoints(backends):
    with running(*COMMON, backends=backends) as node:
        wait_until(lambda: node.request("GET", "/readiness")[0] == 200, "not ready")
        probes = "mesh_worker_health_checks_total"
        wait_until(lambda: node.metric(probes) >= 4, "no probes")
        for _ in range(5):
            assert node.request("GET", "/workers")[0] == 200
            assert node.request("GET", "/health")[0] == 200
        wait_until(lambda: node.metric("mesh_http_requests_total", path="/workers") == 5, "not counted")
        samples = node.metrics()
        for (name, pairs), value in samples.items():
            if name.startswith("mesh_router_"):
                assert value == 0, (name, pairs)
        paths = {dict(pairs)["path"] for name, pairs in samples if name == "mesh_http_requests_total"}
        assert not paths & {"/metrics", "other"}


# ----------------------------------------------------------------------------- access lines, behaviour 14


def test_access_line_has_every_field_with_its_value(shared):
    node = shared
    headers = {"x-request-id": "whole", "x-backend-fault": "delay-head-ms=60"}
    body = {**CHAT, "stream": True, "stream_options": {"include_usage": True}}
    started = time.time()
    _, _, stream = node.request("POST", "/v1/chat/completions?a=b", body, headers)
    line = line_of(node, "whole")
    assert line.pop("ts").endswith("Z")
    assert line.pop("client").startswith("127.0.0.1:")
    assert line.pop("upstream").startswith("http://127.0.0.1:")
    assert line.pop("io_process") in (0, 1)
    assert line.pop("reused") in (True, False)
    times = {name: line.pop(name) for name in (
        "admission_ms", "body_ms", "prepare_queue_ms", "prepare_run_ms", "upstream_head_ms", "ttft_ms",
        "total_ms", "overhead_ms",
    )}  # fmt: skip
    assert line.pop("input_tokens") > 0 and line.pop("output_tokens") > 0
    assert line.pop("reason")
    assert line == {
        "level": "info", "event": "access", "request_id": "whole", "method": "POST",
        "path": "/v1/chat/completions", "endpoint": "chat", "http": "1.1", "model": "m1", "stream": True,
        "backend_type": "regular", "status": 200, "outcome": "completed", "attempts": 1,
        "bytes_in": len(json.dumps(body).encode()), "bytes_out": len(stream),
    }  # fmt: skip
    assert all(value >= 0 for value in times.values())
    assert 60 <= times["upstream_head_ms"] <= times["ttft_ms"] <= times["total_ms"]
    assert times["total_ms"] <= (time.time() - started) * 1e3


def test_line_of_a_request_without_an_upstream_leaves_out_what_has_no_value(shared):
    node = shared
    node.request("GET", "/nowhere", headers={"x-request-id": "none"})
    line = line_of(node, "none")
    assert set(line) == {
        "ts", "level", "event", "request_id", "client", "io_process", "method", "path", "http", "status",
        "error_code", "outcome", "bytes_in", "bytes_out", "total_ms",
    }  # fmt: skip
    assert (line["status"], line["error_code"], line["outcome"]) == (404, "not_found", "no_workers")


def test_stream_that_was_cut_and_client_that_left_are_told_by_their_codes(shared):
    node = shared
    node.request("POST", "/v1/completions", {**ASK, "stream": True},
                 {"x-backend-fault": "cut=150", "x-request-id": "cut"})  # fmt: skip
    line = line_of(node, "cut")
    assert (line["status"], line["error_code"], line["outcome"]) == (
        200, "upstream_connection_failed", "body_error",
    )  # fmt: skip
    with node.connect() as client:
        client.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: h\r\ncontent-type: application/json\r\n"
            b"x-request-id: gone\r\nx-backend-fault: delay-head-ms=20000\r\ncontent-length: 14\r\n\r\n"
            b'{"prompt":"a"}'
        )
        wait_until(lambda: node.metric("mesh_worker_requests_active") == 1, "not placed")
    line = line_of(node, "gone")
    assert (line["status"], line["outcome"]) == (499, "canceled")


def test_health_requests_are_logged_at_debug_alone(shared, backends):
    shared.request("GET", "/health", headers={"x-request-id": "healthy"})
    shared.request("GET", "/nowhere", headers={"x-request-id": "after"})
    line_of(shared, "after")
    assert not [line for line in shared.access_lines() if line["request_id"] == "healthy"]
    with running(*COMMON, "--io-processes", "1", "--log-level", "debug", backends=backends) as node:
        node.request("GET", "/health", headers={"x-request-id": "healthy"})
        assert line_of(node, "healthy")["level"] == "debug"


def test_overhead_stays_small_while_the_upstream_the_client_or_the_queue_is_slow(backends):
    flags = (*COMMON, "--io-processes", "1", "--disable-health-check", "--max-concurrent-requests", "1",
             "--queue-size", "10")  # fmt: skip
    with running(*flags, backends=backends) as node:
        wait_until(lambda: node.request("POST", "/v1/completions", ASK)[0] == 200, "not ready")
        with ThreadPoolExecutor(3) as pool:
            slow = {"x-backend-fault": "delay-head-ms=400"}
            for name in ("first", "second", "third"):  # each waits for those before it
                pool.submit(node.request, "POST", "/v1/completions", ASK, {**slow, "x-request-id": name})
        slow_client(node, "slow")
        lines = [line_of(node, name) for name in ("first", "second", "third", "slow")]
    assert all(line["status"] == 200 for line in lines)
    assert all(line["upstream_head_ms"] >= 400 for line in lines[:3])
    assert max(line["admission_ms"] for line in lines) >= 400
    assert lines[3]["body_ms"] >= 300
    for line in lines:
        assert line["total_ms"] >= 300 and line["overhead_ms"] < 100, line


def slow_client(node: Node, name: str) -> None:
    """Send a body in two parts, 300 ms apart."""
    body = json.dumps(ASK).encode()
    client = http.client.HTTPConnection(node.host, node.port, timeout=10)
    client.putrequest("POST", "/v1/completions")
    for field, value in (("content-type", "application/json"), ("x-request-id", name)):
        client.putheader(field, value)
    client.putheader("content-length", str(len(body)))
    client.endheaders(body[:5])
    time.sleep(0.35)
    client.send(body[5:])
    assert client.getresponse().status == 200
    client.close()
