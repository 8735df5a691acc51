"""Spans of requests, from records as exchanges leave them."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from meshd.io.account import Record
from meshd.io.http1 import parse_request_head, parse_response_head
from meshd.io.relay import Relay
from meshd.io.traceparent import TraceIds
from meshd.io.tracing import NO_TRACE, Span, Tracing
from meshd.io.upstream import UpstreamConnection, UpstreamFailure
from tests.fakes.played_client import PlayedClient
from tests.fakes.transport import FakeClock

URL = "https://engine.example:8443/base"


class Sink:
    def __init__(self) -> None:
        self.requests: list[list[Span]] = []

    def put(self, spans: list[Span]) -> None:
        self.requests.append(spans)


class Scene:
    def __init__(self, *lines: str, method: str = "POST") -> None:
        self.sink, self.clock = Sink(), FakeClock(100.0)
        self.tracing = Tracing(self.sink, self.clock, is_tls=True, ids=TraceIds(b"seed"))
        raw = "\r\n".join((f"{method} /v1/chat/completions?q=1 HTTP/1.1", "host: h", *lines, "", ""))
        self.head = parse_request_head(raw.encode(), 65536, 256)
        record = self.record = Record(100.0)
        record.head, record.label, record.endpoint = self.head, "/v1/chat/completions", "chat"
        record.client, record.request_id, record.outcome, record.status = "::1:99", "r1", "completed", 200

    def ask(self, status: int = 200, error: str = "", url: str = URL, seconds: float = 1.0) -> bytes:
        leg, lines = self.tracing.leg(self.record, self.head, url)
        self.record.attempts += 1
        self.record.upstream = url
        self.clock.advance(seconds)
        if leg is not None:
            head = b"HTTP/1.1 %d X\r\ncontent-length: 0\r\n\r\n" % status
            response = parse_response_head(head, "POST") if status else None
            leg.end(self.clock(), SimpleNamespace(response=response, is_reused=True))
            if error:
                assert self.record.trace is not None
                self.record.trace.failed(error)
        return lines

    def spans(self) -> list[Span]:
        self.record.finished_at = self.clock()
        self.tracing.ended([self.record])
        (spans,) = self.sink.requests
        return spans


def relay(ended_at: float, failure: str = "") -> Any:
    async def make() -> Relay:
        upstream = UpstreamConnection("u", asyncio.get_running_loop(), lambda _: None, FakeClock())
        client = PlayedClient().connection
        return Relay(client, upstream, framing="none", event_dialect=None, sse=None, observes_body=False)

    relay = asyncio.run(make())
    relay.ended_at = ended_at
    relay.failure = UpstreamFailure(failure, "", True, True) if failure else None
    return relay


def test_stages_and_attempt_are_children_of_the_server_span():
    it = Scene()
    it.record.ticket_at, it.record.body_at, it.record.prepared_at = 100.1, 100.2, 100.5
    it.clock.now = 100.6
    assert it.ask().startswith(b"traceparent: 00-")
    it.record.head_at = it.clock()
    it.clock.advance(2)
    it.record.relay = relay(103.0)
    server, *rest = it.spans()
    assert [(span.name, span.kind) for span in rest] == [
        ("admission", "internal"), ("body", "internal"), ("prepare", "internal"), ("relay", "internal"),
        ("POST", "client"),
    ]  # fmt: skip
    assert {span.parent_id for span in rest} == {server.span_id} and server.parent_id == 0
    assert len({span.span_id for span in (server, *rest)}) == 6
    assert (server.start_s, server.end_s) == (100.0, 103.6)
    assert [(span.start_s, span.end_s) for span in rest] == [
        (100.0, 100.1), (100.1, 100.2), (100.2, 100.5), (101.6, 103.6), (100.6, 103.0)
    ]  # fmt: skip


def test_attributes_have_the_names_of_the_conventions():
    it = Scene()
    it.record.model = "m" * 500
    it.ask()
    server, client = it.spans()
    assert server.name == "POST /v1/chat/completions" and server.error == client.error == ""
    assert server.attributes == {
        "http.request.method": "POST",
        "url.path": "/v1/chat/completions",
        "url.scheme": "https",
        "network.protocol.version": "1.1",
        "mesh.request_id": "r1",
        "mesh.outcome": "completed",
        "http.route": "/v1/chat/completions",
        "client.address": "::1",
        "client.port": 99,
        "http.response.status_code": 200,
        "mesh.endpoint": "chat",
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "m" * 128,
        "mesh.attempts": 1,
        "mesh.route_reason": "",
    }
    assert client.attributes == {
        "http.request.method": "POST",
        "server.address": "engine.example",
        "server.port": 8443,
        "url.scheme": "https",
        "mesh.connection_reused": True,
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "m" * 128,
        "http.response.status_code": 200,
    }


def test_only_the_last_attempt_lasts_as_long_as_the_response():
    it = Scene()
    it.ask(503)
    it.ask(0, error="reset")
    it.ask(200)
    it.record.relay = relay(150.0)
    it.clock.now = 151.0
    _, *legs = it.spans()
    assert [(leg.start_s, leg.end_s, leg.error) for leg in legs] == [
        (100.0, 101.0, "503"), (101.0, 102.0, "reset"), (102.0, 150.0, ""),
    ]  # fmt: skip
    assert [leg.attributes.get("http.request.resend_count") for leg in legs] == [None, 1, 2]


def test_stream_that_was_cut_is_an_error_of_both():
    it = Scene()
    it.ask()
    it.record.relay, it.record.outcome = relay(105.0, "upstream_timeout"), "body_error"
    server, client = it.spans()
    assert server.error == "body_error" and client.error == "upstream_timeout"


@pytest.mark.parametrize(("status", "error"), [(404, ""), (499, ""), (503, "admission_full")])
def test_answer_of_meshd_itself_has_one_span_and_is_an_error_from_500_on(status, error):
    it = Scene(method="BREW")
    it.record.status, it.record.error_code, it.record.label = status, "admission_full", "other"
    (server,) = it.spans()
    assert (server.name, server.error) == ("HTTP", error)
    assert server.attributes["http.request.method"] == "_OTHER" and "http.route" not in server.attributes


def test_attempt_that_the_client_did_not_wait_for_ends_with_the_request():
    it = Scene()
    it.tracing.leg(it.record, it.head, "http://u")
    it.clock.advance(3)
    _, client = it.spans()
    assert client.end_s == 103.0 and client.attributes["server.port"] == 80


def test_unsampled_request_and_health_leave_nothing():
    it = Scene(f"traceparent: 00-{'a' * 32}-{'b' * 16}-00")
    assert it.tracing.leg(it.record, it.head, URL) == NO_TRACE
    healthy = Record(1.0)
    healthy.head, healthy.is_routine = it.head, True
    it.tracing.ended([it.record, healthy])
    assert it.sink.requests == [] and it.record.trace is None


def test_sampled_request_keeps_its_trace_in_every_span():
    it = Scene(f"traceparent: 00-{'a' * 32}-{'b' * 16}-01")
    it.ask()
    server, client = it.spans()
    assert {server.trace_id, client.trace_id} == {int("a" * 32, 16)}
    assert (server.parent_id, server.is_remote_parent) == (int("b" * 16, 16), True)
    assert not client.is_remote_parent
