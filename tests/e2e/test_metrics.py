"""The metrics after a known load: every sum agrees, nothing stays above zero, no counter ever falls."""

from __future__ import annotations

import http.client
import math
import os
import re
import signal
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshd.control import Role
from tests.e2e.conftest import COMMON, DEMO_TOKENIZER
from tests.fakes.load import SteadyLoad
from tests.fakes.node import Backend, Node, running, wait_until

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]
FLAGS = (*COMMON, "--policy", "prefix_hash", "--tokenizer-path", DEMO_TOKENIZER, "--disable-health-check",
         "--disable-retries")  # fmt: skip
NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
LABEL = r'[a-zA-Z_][a-zA-Z0-9_]*="(?:[^"\\\n]|\\[\\"n])*"'
LINE = re.compile(
    rf"# HELP (?P<help>{NAME}) [^\n]*|# TYPE (?P<type>{NAME}) (?P<kind>counter|gauge|histogram)"
    rf"|(?P<name>{NAME})(?:\{{(?P<labels>{LABEL}(?:,{LABEL})*)\}})? (?P<value>[0-9.e+-]+|\+Inf|NaN)"
)


@pytest.fixture(scope="module")
def loaded(backends: tuple[Backend, Backend]) -> Iterator[tuple[Node, Samples, Samples]]:
    """A node with its samples before and after ``send_known_load``."""
    with running(*FLAGS, backends=backends) as node:
        before = node.metrics()
        send_known_load(node)
        wait_until(lambda: not node.held(), f"left behind: {node.held()}")
        wait_until(lambda: node.metric("mesh_http_client_disconnects_total") == 3, "a client is not missed")
        yield node, before, node.metrics()


def send_known_load(node: Node) -> None:
    """62 requests that end in every way a request can."""
    ask = {"model": "m1", "prompt": "one two three"}
    plain, chat = "/v1/completions", {"model": "m1", "messages": [{"role": "user", "content": "a b"}]}
    for number in range(20):
        assert node.request("POST", plain, {**ask, "stream": number % 2 == 1})[0] == 200
    for _ in range(10):
        assert node.request("POST", "/v1/chat/completions", chat)[0] == 200
    for _ in range(5):
        assert node.request("POST", plain, {"model": "m1"})[0] == 400
    for _ in range(4):
        assert node.request("POST", plain, {**ask, "model": "nobody"})[0] == 404
    for status in (429, 500, 503):
        assert fault(node, ask, f"status={status}") == status
    for spec in ("close", "malformed-head"):
        assert fault(node, ask, spec) == 502
    for spec in ("cut=150", "cut=200", "cut=250"):
        assert fault(node, {**ask, "stream": True}, spec) == 200
    for number in range(5):
        assert node.request("GET", f"/nowhere/{number}")[0] == 404
    for _ in range(2):
        assert node.request("PUT", plain)[0] == 405
    for path in ("/health", "/v1/models", "/workers"):
        assert node.request("GET", path)[0] == 200
    assert node.request("POST", plain, b"{}", {"content-type": "text/plain"})[0] == 415
    with node.connect() as client:
        client.sendall(b"GET / HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n")
        assert client.recv(100).startswith(b"HTTP/1.1 400")
    for _ in range(3):
        leave_before_the_head(node)


def fault(node: Node, body: dict, spec: str) -> int:
    return node.request("POST", "/v1/completions", body, {"x-backend-fault": spec})[0]


def leave_before_the_head(node: Node) -> None:
    held = node.metric("mesh_worker_requests_active")
    with socket.create_connection((node.host, node.port)) as client:
        client.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: h\r\ncontent-type: application/json\r\n"
            b"x-backend-fault: delay-head-ms=20000\r\ncontent-length: 14\r\n\r\n" + b'{"prompt":"a"}'
        )
        wait_until(lambda: node.metric("mesh_worker_requests_active") == held + 1, "not placed")


class Growth:
    """How much the samples of a name have grown, summed over the series with the labels given."""

    def __init__(self, before: Samples, after: Samples) -> None:
        self._before, self._after = before, after

    def __call__(self, name: str, **labels: str) -> float:
        return total(self._after, name, labels) - total(self._before, name, labels)

    def by(self, name: str, label: str) -> dict[str, float]:
        """The growth of a name by the values of one label, where there is any."""
        values = {dict(pairs)[label] for n, pairs in self._after if n == name}
        found = {value: self(name, **{label: value}) for value in values}
        return {value: growth for value, growth in found.items() if growth}


def total(samples: Samples, name: str, labels: dict[str, str]) -> float:
    return sum(v for (n, pairs), v in samples.items() if n == name and labels.items() <= dict(pairs).items())


@pytest.fixture(scope="module")
def grown(loaded: tuple[Node, Samples, Samples]) -> Growth:
    return Growth(loaded[1], loaded[2])


# ------------------------------------------------------------------------------------------- arithmetic


def test_every_head_got_one_response_or_its_client_left_before(grown):
    assert grown("mesh_http_requests_total") == 62
    assert grown("mesh_http_client_disconnects_total") == 3
    assert grown("mesh_http_responses_total") == 62 - 3
    assert grown.by("mesh_http_responses_total", "status_code") == {
        "200": 36, "400": 6, "404": 9, "405": 2, "415": 1, "429": 1, "500": 1, "502": 2, "503": 1,
    }  # fmt: skip
    assert grown.by("mesh_http_responses_total", "error_code") == {
        "": 39, "invalid_request": 5, "malformed_request": 1, "method_not_allowed": 2, "model_not_found": 4,
        "not_found": 5, "unsupported_content_type": 1, "upstream_connection_failed": 1,
        "upstream_protocol_error": 1,
    }  # fmt: skip
    assert grown("mesh_http_malformed_requests_total") == 1


def test_jobs_submitted_are_the_sum_of_their_outcomes(grown):
    jobs = grown("mesh_prepare_jobs_total")
    assert jobs == 50  # of the 62, those to an endpoint that passed the checks on the head
    assert jobs == grown("mesh_prepare_run_seconds_count") + grown("mesh_prepare_errors_total")
    assert jobs == grown("mesh_http_rate_limit_total", result="allowed")
    assert grown.by("mesh_prepare_rejections_total", "reason") == {"invalid_request": 5}
    views = jobs - grown("mesh_prepare_rejections_total")
    assert grown("mesh_router_requests_total") == grown("mesh_router_request_duration_seconds_count") == views
    assert grown("mesh_prepare_stage_seconds_count", stage="json_parse") == jobs  # refused ones ended it too
    for stage in ("view", "encode"):
        assert grown("mesh_prepare_stage_seconds_count", stage=stage) == views
    assert grown("mesh_prepare_stage_seconds_count", stage="template") == 10


def test_placements_are_views_but_those_of_unknown_models(grown):
    placed = grown("mesh_router_requests_total") - 4
    assert grown("mesh_worker_selection_total") == placed == 41
    # After a 429 or 503 its server is used last for a second: the ten requests behind may have one candidate,
    # which is no decision. A client that has just left may still be counted as load when the next is placed.
    branches = grown.by("mesh_prefix_hash_policy_branch_total", "branch")
    assert branches.keys() <= {"ring_hit", "load_balance_walk"}
    assert placed - 10 <= sum(branches.values()) <= placed and branches["ring_hit"] >= placed - 10 - 3
    # All placed ones got a head from their upstream, but 2 that broke and 3 whose client left.
    assert grown("mesh_router_upstream_responses_total") == placed - 2 - 3
    assert grown.by("mesh_router_upstream_responses_total", "status_code") == {
        "200": 33, "429": 1, "500": 1, "503": 1,
    }  # fmt: skip


def test_outcomes_are_counted_once_each(grown):
    assert grown.by("mesh_router_request_errors_total", "error_type") == {
        "backend_error": 4,  # 500, 503, and two upstreams that broke before their head
        "body_error": 3,
        "canceled": 3,
        "no_workers": 4,
        "rate_limited": 1,
        "validation_error": 6,
    }
    assert grown("mesh_router_generation_duration_seconds_count") == 30
    assert grown("mesh_stream_failures_total", reason="cut") == 3
    # Words of the prompts that were answered; the streams were sent without asking for usage.
    assert grown("mesh_router_tokens_total", endpoint="chat", token_type="input") == 10 * 2
    assert grown("mesh_router_tokens_total", endpoint="completions", token_type="input") == 10 * 3


def test_model_names_of_clients_are_no_labels(loaded):
    _, _, after = loaded
    models = {dict(pairs)["model"] for _, pairs in after if "model" in dict(pairs)}
    assert models <= {"m1", "other", "unknown"}
    paths = {dict(pairs)["path"] for _, pairs in after if "path" in dict(pairs)}
    assert not any(path.startswith("/nowhere") for path in paths)


def test_histograms_are_cumulative_and_end_with_their_count(loaded):
    _, _, after = loaded
    series: dict[tuple[str, tuple[tuple[str, str], ...]], list[tuple[float, float]]] = {}
    for (name, pairs), value in after.items():
        if name.endswith("_bucket"):
            rest = tuple(pair for pair in pairs if pair[0] != "le")
            series.setdefault((name.removesuffix("_bucket"), rest), []).append(
                (float(dict(pairs)["le"]), value)
            )
    assert series
    for (name, rest), buckets in series.items():
        counts = [count for _, count in sorted(buckets)]
        assert counts == sorted(counts)
        assert max(buckets)[0] == math.inf
        assert counts[-1] == after[f"{name}_count", rest]


def test_everything_is_at_rest(loaded):
    node, _, _ = loaded
    assert node.held() == {}
    assert node.metric("mesh_http_connections_active") == 0
    wait_until(
        lambda: node.metric("mesh_http_inflight_request_age_count") == 0, "ages are refreshed each second"
    )
    assert node.metric("mesh_tokenizer_info") == 1
    for name, value in (("io", 2), ("prepare", 2), ("leader", 1), ("controller", 1)):
        assert node.metric("mesh_processes", kind=name) == value
    assert node.metric("mesh_prepare_live_workers") == 2
    assert node.metric("mesh_body_memory_limit_bytes") > 0


# ------------------------------------------------------------------------------------------- exposition


def test_exposition_is_strict(loaded):
    """Every line has one of three forms; families are whole, declared before their samples, and unique."""
    node, _, _ = loaded
    with urllib.request.urlopen(node.metrics_url, timeout=10) as answer:
        assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
        text = answer.read().decode()
    assert text.endswith("\n")
    kinds: dict[str, str] = {}
    helps: list[str] = []
    seen: set[tuple[str, str | None]] = set()
    family = ""
    for line in text.splitlines():
        match = LINE.fullmatch(line)
        assert match, line
        if match["help"]:
            helps.append(match["help"])
        elif match["type"]:
            assert match["type"] not in kinds and helps[-1] == match["type"], line
            family = match["type"]
            kinds[family] = match["kind"]
        else:
            suffixes = ("_bucket", "_sum", "_count") if kinds[family] == "histogram" else ("",)
            assert match["name"] in [family + suffix for suffix in suffixes], line
            assert (match["name"], match["labels"]) not in seen, line
            seen.add((match["name"], match["labels"]))
            assert kinds[family] == "gauge" or float(match["value"]) >= 0, line
    assert len(helps) == len(set(helps)) == len(kinds)
    assert all(name.startswith("mesh_") for name in kinds)
    assert all(name.endswith("_total") == (kind == "counter") for name, kind in kinds.items())


def test_names_and_types_are_stable_and_documented(loaded):
    node, _, _ = loaded
    families = [set(re.findall(r"^# TYPE (\w+ \w+)$", scrape(node), re.M)) for _ in range(2)]
    assert families[0] == families[1]
    documented = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    assert {name.split()[0] for name in families[0]} == set(re.findall(r"`(mesh_\w+)`", documented))


def scrape(node: Node) -> str:
    with urllib.request.urlopen(node.metrics_url, timeout=10) as answer:
        return answer.read().decode()


def test_metrics_are_not_on_the_traffic_port(loaded):
    node, _, _ = loaded
    assert node.request("GET", "/metrics")[0] == 404
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(node.metrics_url + "x", timeout=10)
    assert caught.value.code == 404


# ------------------------------------------------------------------------------------------------ deaths


@pytest.mark.parametrize("role", [Role.IO, Role.PREPARE, Role.CONTROLLER])
def test_no_counter_falls_when_a_process_is_killed_under_load(loaded, role):
    node, _, _ = loaded
    # A seat whose process is being renewed has pid 0, and a signal to that would be one to this test.
    row = next(row for row in node.board().rows() if row.role is role and row.is_alive and row.pid)
    restarts = node.metric("mesh_process_restarts_total", kind=role.value)
    with SteadyLoad(node, connections=6) as load:
        load.wait_for_more(50)
        before, dead = counters(node.metrics()), row.pid
        os.kill(dead, signal.SIGKILL)
        wait_until(lambda: row.pid not in (0, dead), "not replaced")
        for _ in range(5):
            after = counters(scraped(node))
            fallen = {
                key: (value, after.get(key)) for key, value in before.items() if after.get(key, -1) < value
            }
            assert not fallen
            before = after
            load.wait_for_more(10)
    wait_until(lambda: not node.held(), f"left behind: {node.held()}")
    wait_until(
        lambda: node.metric("mesh_http_connections_active") == 0, "connections of the dead are counted"
    )
    assert node.metric("mesh_process_restarts_total", kind=role.value) == restarts + 1


def scraped(node: Node) -> Samples:
    """Scrape, also while the controller is being replaced: its listener stays, the scrape waits or is cut."""
    while True:
        try:
            return node.metrics()
        except (OSError, http.client.HTTPException):
            continue


def counters(samples: Samples) -> Samples:
    """The samples that may only grow; CPU time of processes is read from the kernel and left out.

    Ages of requests in flight are gauges, for all that their name ends as a histogram's does.
    """
    others = ("mesh_process_cpu", "mesh_http_inflight_request_age_count")
    return {
        (name, pairs): value
        for (name, pairs), value in samples.items()
        if name.endswith(("_total", "_bucket", "_count", "_sum")) and not name.startswith(others)
    }
