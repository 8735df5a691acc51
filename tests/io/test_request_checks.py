"""The checks on an endpoint's head, each with its code, in their order."""

from __future__ import annotations

import pytest

from meshd.api.endpoints import Endpoint, EndpointRegistry
from meshd.errors import MeshError
from meshd.io.http1 import RequestHead, parse_request_head
from meshd.io.request_checks import check_endpoint_head, content_length_of

ROWS = EndpointRegistry()
CHAT = ROWS.find("POST", "/v1/chat/completions").endpoint
MODELS = ROWS.find("GET", "/v1/models").endpoint
JSON = "Content-Type: application/json"
MOST = 1000


def head(*fields: str, version: str = "1.1") -> RequestHead:
    lines = [f"POST /v1/chat/completions HTTP/{version}", "Host: h", *fields, "", ""]
    return parse_request_head("\r\n".join(lines).encode("latin-1"), 65536, 256)


def code_of(*fields: str, endpoint: Endpoint = CHAT, version: str = "1.1") -> str:
    """Return the code of the refusal, or "" if the head passes."""
    try:
        check_endpoint_head(endpoint, head(*fields, version=version), MOST)
    except MeshError as error:
        return error.code
    return ""


@pytest.mark.parametrize(
    "media_type",
    [
        "application/json",
        "Application/JSON",
        "application/json; charset=utf-8",
        "application/json ;charset=utf-8",
        "application/json;",
        "application/vnd.api+json",
        "application/a+b+JSON; v=1",
    ],
)
def test_json_media_type_passes(media_type):
    assert code_of(f"Content-Type: {media_type}") == ""


@pytest.mark.parametrize(
    "fields",
    [
        (),
        ("Content-Type:",),
        ("Content-Type: text/plain",),
        ("Content-Type: text/json",),
        ("Content-Type: application/jsonl",),
        ("Content-Type: application/+json",),
        ("Content-Type: application/x+json2",),
        ("Content-Type: application/json, application/json",),
        ("Content-Type: application/x-www-form-urlencoded",),
        (JSON, JSON),
        (JSON, "content-type: text/plain"),
    ],
)
def test_other_missing_or_repeated_media_type_is_unsupported(fields):
    assert code_of(*fields) == "unsupported_content_type"


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        (("Content-Encoding: identity",), ""),
        (("Content-Encoding: Identity",), ""),
        (("Content-Encoding: gzip",), "unsupported_encoding"),
        (("Content-Encoding: identity, gzip",), "unsupported_encoding"),
        (("Content-Encoding: identity", "Content-Encoding: gzip"), "unsupported_encoding"),
        (("Content-Encoding:",), "unsupported_encoding"),
    ],
)
def test_only_the_identity_encoding_passes(fields, code):
    assert code_of(JSON, *fields) == code


@pytest.mark.parametrize(("length", "code"), [(0, ""), (MOST, ""), (MOST + 1, "body_too_large")])
def test_length_is_checked_against_the_limit(length, code):
    assert code_of(JSON, f"Content-Length: {length}") == code


@pytest.mark.parametrize(
    ("fields", "version", "code"),
    [
        (("Expect: 100-continue",), "1.1", ""),
        (("Expect: 100-Continue",), "1.1", ""),
        (("Expect: 200-ok",), "1.1", "expectation_failed"),
        (("Expect:",), "1.1", "expectation_failed"),
        (("Expect: 100-continue, x",), "1.1", "expectation_failed"),
        (("Expect: 100-continue", "Expect: x"), "1.1", "expectation_failed"),
        (("Expect: 100-continue",), "1.0", ""),
    ],
)
def test_only_100_continue_is_an_expectation_that_can_be_met(fields, version, code):
    assert code_of(JSON, *fields, version=version) == code


def test_first_failing_check_answers():
    everything = ("Content-Encoding: gzip", "Content-Length: 9999", "Expect: x")
    assert code_of(*everything) == "unsupported_encoding"
    assert code_of(*everything[1:]) == "unsupported_content_type"
    assert code_of(JSON, *everything[1:]) == "body_too_large"
    assert code_of(JSON, everything[2]) == "expectation_failed"


def test_endpoint_without_a_json_body_asks_for_no_media_type():
    assert code_of(endpoint=MODELS) == ""
    assert code_of("Content-Encoding: gzip", endpoint=MODELS) == ""
    assert code_of("Content-Length: 9999", endpoint=MODELS) == "body_too_large"


def test_length_of_a_body_is_unknown_only_when_chunked():
    assert content_length_of(head()) == 0
    assert content_length_of(head("Content-Length: 5")) == 5
    assert content_length_of(head("Transfer-Encoding: chunked")) is None
