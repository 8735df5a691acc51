"""Traces of a whole node: what upstreams get as their parent, and what a collector gets."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from tests.fakes.collector import Collector, SeenSpan
from tests.fakes.fleet import Fleet, answer
from tests.fakes.node import Node, running, wait_until
from tests.fakes.scripted_upstream import Script, Seen

CHAT = {"model": "m1", "messages": [{"role": "user", "content": "hello"}]}
FLAGS = (
    "--io-processes", "1", "--prepare-workers", "1", "--disable-health-check", "--policy", "round_robin",
    "--retry-initial-backoff-ms", "5", "--retry-budget-min", "1000",
)  # fmt: skip
USAGE = b'{"usage":{"prompt_tokens":3,"completion_tokens":4}}'
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
VALID = f"00-{TRACE}-{PARENT}-01"
FORM = re.compile(rb"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with Fleet(3) as fleet:
        yield fleet


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with Collector() as collector:
        yield collector


@pytest.fixture(scope="module")
def node(fleet: Fleet, collector: Collector) -> Iterator[Node]:
    flags = (*FLAGS, "--enable-trace", "--otlp-traces-endpoint", collector.endpoint, "--worker-urls")
    with running(*flags, *fleet.urls) as node:
        wait_until(lambda: node.request("GET", "/readiness")[0] == 200, "not ready")
        yield node


def ask(node: Node, headers: dict[str, str]) -> dict[str, str]:
    return node.request("POST", "/v1/chat/completions", CHAT, headers)[1]


def spans_of(collector: Collector, request_id: str) -> list[SeenSpan]:
    wait_until(lambda: collector.of(request_id), "no span arrives")
    return collector.of(request_id)


def only_visit(fleet: Fleet) -> Seen:
    ((_, seen),) = fleet.visits()
    return seen


def test_upstream_sees_a_span_of_the_clients_trace_as_its_parent(node, fleet, collector):
    fleet.play(Script(answer(200, USAGE)))
    headers = ask(node, {"traceparent": VALID, "tracestate": "a=1,b=2"})
    seen = only_visit(fleet)
    (value,) = seen.values("traceparent")
    found = FORM.fullmatch(value)
    assert found is not None and found[1].decode() == TRACE and found[3] == b"01"
    assert seen.values("tracestate") == [b"a=1,b=2"]
    spans = spans_of(collector, headers["x-request-id"])
    assert spans[0].kind == "server" and (spans[0].trace_id, spans[0].parent_id) == (TRACE, PARENT)
    (client,) = [span for span in spans if span.kind == "client"]
    assert client.span_id == found[2].decode() and client.parent_id == spans[0].span_id
    assert all(span.parent_id == spans[0].span_id for span in spans[1:])


def test_missing_traceparent_is_created_and_a_bad_one_replaced(node, fleet, collector):
    bad = VALID.replace("00-", "ff-", 1)
    for given in ({}, {"traceparent": bad, "tracestate": "a=1"}):
        fleet.play(Script(answer(200)))
        headers = ask(node, given)
        seen = only_visit(fleet)
        (value,) = seen.values("traceparent")
        found = FORM.fullmatch(value)
        assert found is not None and found[1].decode() != TRACE and found[3] == b"01"
        assert seen.values("tracestate") == []  # it belongs to another trace
        server, *_ = spans_of(collector, headers["x-request-id"])
        assert (server.trace_id, server.parent_id) == (found[1].decode(), "")


def test_request_that_is_not_sampled_goes_on_untouched_and_has_no_span(node, fleet, collector):
    fleet.play(Script(answer(200)))
    value = VALID[:-2] + "00"
    headers = ask(node, {"traceparent": value, "tracestate": "a=1"})
    seen = only_visit(fleet)
    assert seen.values("traceparent") == [value.encode()] and seen.values("tracestate") == [b"a=1"]
    later = ask(node, {})
    spans_of(collector, later["x-request-id"])  # those before it have been sent by then
    assert collector.of(headers["x-request-id"]) == []


def test_spans_tell_where_the_time_of_a_request_went(node, fleet, collector):
    fleet.play(Script(answer(200, USAGE)))
    headers = ask(node, {"authorization": "Bearer s3cret", "cookie": "c00kie"})
    server, *rest = spans_of(collector, headers["x-request-id"])
    assert server.name == "POST /v1/chat/completions" and not server.is_error
    assert server.resource["service.name"] == "meshd"
    told = server.attributes
    assert told["http.request.method"] == "POST" and told["http.route"] == told["url.path"]
    assert told["http.response.status_code"] == 200 and told["mesh.outcome"] == "completed"
    assert told["gen_ai.request.model"] == "m1" and told["gen_ai.operation.name"] == "chat"
    assert (told["gen_ai.usage.input_tokens"], told["gen_ai.usage.output_tokens"]) == (3, 4)
    assert [span.name for span in rest] == ["admission", "body", "prepare", "POST", "relay"]
    times = [server.start_ns, *(span.start_ns for span in rest), server.end_ns]
    assert times == sorted(times) and all(span.start_ns <= span.end_ns <= server.end_ns for span in rest)
    assert abs(server.end_ns - time.time_ns()) < 60e9
    client = rest[3].attributes
    assert client["server.address"] == "127.0.0.1" and f":{client['server.port']}" in "".join(fleet.urls)
    assert "s3cret" not in repr(collector.spans) and "c00kie" not in repr(collector.spans)


def test_each_attempt_has_a_span_and_is_the_parent_of_what_it_caused(node, fleet, collector):
    failing = Script(answer(503))
    fleet.play(failing, failing, Script(answer(200)))
    headers = ask(node, {"traceparent": VALID[:-3].replace(TRACE, "a" * 32) + "-01"})
    parents = {FORM.fullmatch(seen.values("traceparent")[0])[2].decode() for _, seen in fleet.visits()}
    server, *rest = spans_of(collector, headers["x-request-id"])
    attempts = [span for span in rest if span.kind == "client"]
    assert {span.span_id for span in attempts} == parents
    assert len(attempts) == server.attributes["mesh.attempts"]
    *failed, last = attempts
    assert all(span.is_error and span.attributes["error.type"] == "503" for span in failed)
    assert last.attributes["http.response.status_code"] == 200 and not last.is_error
    resends = [span.attributes.get("http.request.resend_count", 0) for span in attempts]
    assert resends == list(range(len(attempts)))


def test_upstream_that_resets_is_an_error_of_its_span_and_of_the_request(node, fleet, collector):
    fleet.play(Script(b"", ending="reset"))
    headers = ask(node, {})
    server, *rest = spans_of(collector, headers["x-request-id"])
    assert server.is_error and server.attributes["http.response.status_code"] == 502
    attempts = [span for span in rest if span.kind == "client"]
    assert len(attempts) == 2
    assert all(span.is_error and span.attributes["error.type"] == "reset" for span in attempts)


def test_requests_without_an_upstream_have_a_span_and_health_has_none(node, collector):
    node.request("GET", "/no/such/path?key=s3cret", headers={"x-request-id": "nowhere"})
    assert node.request("GET", "/health", headers={"x-request-id": "healthy"})[0] == 200
    node.request("GET", "/v1/models", headers={"x-request-id": "models"})
    (span,) = spans_of(collector, "nowhere")
    assert span.name == "GET" and span.attributes["http.response.status_code"] == 404 and not span.is_error
    assert span.attributes["url.path"] == "/no/such/path" and "s3cret" not in repr(collector.spans)
    assert spans_of(collector, "models")[0].name == "GET /v1/models"
    assert collector.of("healthy") == []


def test_stored_response_asked_of_all_origins_has_a_span_for_each(node, fleet, collector):
    headers = node.request("GET", "/v1/responses/resp_1")[1]  # all answer GET with 404
    server, *rest = spans_of(collector, headers["x-request-id"])
    assert server.name == "GET /v1/responses/{id}"
    asked = [span for span in rest if span.kind == "client"]
    assert len(asked) == 3 and len({span.attributes["server.port"] for span in asked}) == 3


@pytest.mark.parametrize("how", ["refuse", "silent", "missing"])
def test_collector_in_trouble_costs_spans_that_are_counted_and_no_request(fleet, how):
    with Collector("silent" if how == "missing" else how) as collector:
        endpoint = "127.0.0.1:1" if how == "missing" else collector.endpoint
        flags = (*FLAGS, "--enable-trace", "--otlp-traces-endpoint", endpoint, "--worker-urls")
        fleet.play(Script(answer(200)))
        with running(*flags, *fleet.urls) as node:
            wait_until(lambda: node.request("GET", "/readiness")[0] == 200, "not ready")
            for _ in range(20):
                assert node.request("POST", "/v1/chat/completions", CHAT)[0] == 200
            if how == "refuse":
                dropped = "mesh_internal_drops_total"
                wait_until(lambda: node.metric(dropped, queue="trace") >= 20, "drops are not counted")
                line = next(line for line in node.lines if line["event"] == "spans_not_taken")
                assert line["level"] == "warn" and "INVALID_ARGUMENT" in line["cause"]
            started = time.monotonic()
            assert node.stop() == 0
            assert time.monotonic() - started < 10  # it does not wait for the collector
            assert all(line.startswith("{") for line in node.raw_lines)


def test_without_the_flag_trace_fields_pass_as_they_came_and_none_is_made(fleet):
    odd = {"TraceParent": "anything at all", "tracestate": "x=,,"}
    with running(*FLAGS, "--worker-urls", *fleet.urls) as node:
        wait_until(lambda: node.request("GET", "/readiness")[0] == 200, "not ready")
        for given in (odd, {"traceparent": VALID}, {}):
            fleet.play(Script(answer(200)))
            ask(node, given)
            lines = only_visit(fleet).head.split(b"\r\n")
            sent = [line for line in lines if line.lower().startswith(b"trace")]
            assert sent == [f"{name}: {value}".encode() for name, value in given.items()]


def test_missing_extra_is_a_startup_error_that_says_what_to_install(tmp_path):
    (tmp_path / "opentelemetry").mkdir()  # found first, and without the exporter
    (tmp_path / "opentelemetry" / "__init__.py").touch()
    done = subprocess.run(
        [sys.executable, "-m", "meshd", "launch", "--enable-trace", "--worker-urls", "http://127.0.0.1:1"],
        capture_output=True,
        text=True,
        timeout=60,
        env={"PYTHONPATH": str(tmp_path), "PATH": ""},
    )
    assert done.returncode != 0 and "pip install 'meshd[tracing]'" in done.stderr
