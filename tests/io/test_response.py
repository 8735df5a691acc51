"""How a response goes on to the client, and whether it is observed, from its head alone."""

from __future__ import annotations

import asyncio

import pytest

from meshd.api.endpoints import Endpoint, EndpointRegistry
from meshd.io import response as response_module
from meshd.io.account import Record
from meshd.io.http1 import parse_request_head, parse_response_head
from meshd.io.relay import Relay
from meshd.io.response import downstream_framing, make_relay
from meshd.io.upstream import UpstreamConnection
from tests.fakes.played_client import PlayedClient
from tests.fakes.transport import FakeClock

CHAT = EndpointRegistry().find("POST", "/v1/chat/completions").endpoint
SSE = "content-type: text/event-stream"
JSON = "content-type: application/json"
CHUNKED = "transfer-encoding: chunked"

stands_in = pytest.mark.skipif(
    not response_module.__file__.endswith(".py"), reason="compiled code takes no stand-in for a connection"
)


def response_bytes(status: int, *fields: str) -> bytes:
    return "\r\n".join([f"HTTP/1.1 {status} X", *fields, "", ""]).encode()


@pytest.mark.parametrize(
    ("method", "version", "status", "field", "framing"),
    [
        ("GET", "1.1", 200, "content-length: 7", ("length", "content-length: 7\r\n")),
        ("GET", "1.1", 200, CHUNKED, ("chunked", "transfer-encoding: chunked\r\n")),
        ("GET", "1.1", 200, "server: x", ("chunked", "transfer-encoding: chunked\r\n")),
        ("GET", "1.0", 200, CHUNKED, ("close", "")),
        ("GET", "1.1", 204, "server: x", ("none", "")),
        ("HEAD", "1.1", 200, "content-length: 7", ("none", "content-length: 7\r\n")),
    ],
)
def test_framing_follows_what_the_client_understands(method, version, status, field, framing):
    request = parse_request_head(f"{method} / HTTP/{version}\r\nHost: h\r\n\r\n".encode(), 65536, 256)
    response = parse_response_head(response_bytes(status, field), method)
    assert downstream_framing(request, response) == framing


def relayed(endpoint: Endpoint | None, status: int, *fields: str) -> tuple[Relay, Record]:
    async def make() -> tuple[Relay, Record]:
        upstream = UpstreamConnection("u", asyncio.get_running_loop(), lambda _: None, FakeClock())
        record = Record(0.0)
        client = PlayedClient().connection
        response = parse_response_head(response_bytes(status, *fields), "POST")
        return make_relay(endpoint, response, record, client, upstream, "chunked"), record

    return asyncio.run(make())


@stands_in
def test_a_plain_answer_is_observed_whole():
    relay, record = relayed(CHAT, 200, JSON, CHUNKED)
    assert relay.observes_body and relay.usage is None and not record.skipped_observation


@stands_in
def test_events_are_observed_as_they_pass():
    relay, _ = relayed(CHAT, 200, SSE, CHUNKED)
    assert relay.usage is not None and not relay.observes_body


@stands_in
def test_errors_and_admin_answers_are_not_observed():
    assert not relayed(CHAT, 500, JSON, CHUNKED)[0].observes_body
    assert not relayed(None, 200, JSON, CHUNKED)[0].observes_body


@stands_in
def test_an_encoded_answer_is_relayed_unobserved_and_the_record_says_why():
    relay, record = relayed(CHAT, 200, JSON, CHUNKED, "content-encoding: gzip")
    assert not relay.observes_body and record.skipped_observation == "content_encoding"
