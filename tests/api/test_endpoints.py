from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshd.api.dialects import StreamDialect
from meshd.api.endpoints import (
    ENDPOINTS,
    EndpointRegistry,
    endpoint_by_number,
)
from meshd.errors import MeshError

ONE_PATH = [e for e in ENDPOINTS if "{id}" not in e.path]
RESOURCES = [e for e in ENDPOINTS if "{id}" in e.path]
POSTED = [e for e in ONE_PATH if e.methods == ("POST",)]
BY_NAME = {e.name: e for e in ENDPOINTS}


def refusal(find, *arguments) -> MeshError:
    with pytest.raises(MeshError) as caught:
        find(*arguments)
    return caught.value


@pytest.mark.parametrize("endpoint", ONE_PATH, ids=lambda e: e.name)
def test_each_method_of_each_row_finds_its_row(endpoint):
    for method in endpoint.methods:
        assert EndpointRegistry().find(method, endpoint.path) == (endpoint, "")


@pytest.mark.parametrize("find", [EndpointRegistry().find, EndpointRegistry(["/v1/*", "/generate"]).find])
@pytest.mark.parametrize("method", ["GET", "PUT", "post"])
@pytest.mark.parametrize("endpoint", POSTED, ids=lambda e: e.name)
def test_another_method_of_a_post_path_is_refused_with_the_right_one(endpoint, method, find):
    error = refusal(find, method, endpoint.path)
    assert (error.code, error.status) == ("method_not_allowed", 405)
    assert error.allow == ("POST",)


def test_models_take_get_and_head_alone():
    assert refusal(EndpointRegistry().find, "POST", "/v1/models").allow == ("GET", "HEAD")


@pytest.mark.parametrize(
    "path",
    [
        "/v1/score",
        "/v1/chat/completions/",
        "/v1//responses",
        "/V1/responses",
        "",
        "/health",
        "/workers",
        "/v1/responses/",
        "/v1/responses//cancel",
        "/v1/responses/a/",
        "/v1/responses/a/cancel/",
        "/v1/responses/a/Cancel",
        "/v1/responses/{id}/b/cancel",
    ],
)
def test_a_path_that_is_not_exactly_that_of_an_endpoint_is_not_found(path):
    error = refusal(EndpointRegistry().find, "POST", path)
    assert (error.code, error.allow) == ("not_found", ())


def test_numbers_lead_back_to_the_row():
    assert [endpoint_by_number(e.number) for e in ENDPOINTS] == list(ENDPOINTS)
    for number in (-1, len(ENDPOINTS)):
        with pytest.raises(LookupError):
            endpoint_by_number(number)


def test_request_id_prefixes_follow_the_api():
    assert {e.name: e.id_prefix for e in ONE_PATH} == {
        "chat": "chatcmpl-",
        "completions": "cmpl-",
        "generate": "gnt-",
        "messages": "msg-",
        "count_tokens": "msg-",
        "responses": "resp-",
        "embeddings": "req-",
        "tokenize": "req-",
        "detokenize": "req-",
        "models": "req-",
    }
    assert {e.id_prefix for e in RESOURCES} == {"resp-"}


def test_only_token_counting_and_resource_operations_borrow_the_capability_of_another_path():
    borrowed = {e.name: e.capability for e in ENDPOINTS if e.capability not in (e.path, None)}
    assert borrowed == {"count_tokens": "/v1/messages"} | {e.name: "/v1/responses" for e in RESOURCES}


def test_each_row_says_how_its_upstream_is_chosen_and_whether_its_body_is_prepared():
    assert {e.name: e.picks_by for e in ENDPOINTS if e.picks_by != "policy"} == {
        "count_tokens": "least_load",
        "tokenize": "local",
        "detokenize": "local",
        "models": "local",
    } | {e.name: "fan_out" for e in RESOURCES}
    for endpoint in ENDPOINTS:
        is_placed = endpoint.picks_by in ("policy", "least_load")
        is_answered_by_a_worker = endpoint.name in ("tokenize", "detokenize")
        assert endpoint.has_prepare_job == (is_placed or is_answered_by_a_worker)
    assert [e.name for e in ENDPOINTS if e.takes_rank] == ["chat", "completions", "generate"]


def test_each_row_says_whose_events_its_streams_are_made_of():
    assert {e.name: e.stream_api for e in ENDPOINTS if e.stream_api} == {
        "chat": "openai",
        "completions": "openai",
        "generate": "openai",
        "messages": "messages",
        "responses": "responses",
    }
    assert {e.stream_api for e in ENDPOINTS} - {""} <= set(get_args(StreamDialect))
    assert [e.name for e in ENDPOINTS if e.ends_with_marker] == [
        "chat", "completions", "messages", "responses",
    ]  # fmt: skip


# --------------------------------------------------------------------------------- resource operations


@pytest.mark.parametrize("endpoint", RESOURCES, ids=lambda e: e.name)
def test_each_resource_operation_is_found_by_method_and_shape_of_path(endpoint):
    path = endpoint.path.replace("{id}", "resp_A-9")
    assert EndpointRegistry().find(endpoint.methods[0], path) == (endpoint, "resp_A-9")


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("POST", "/v1/responses/a", ("GET", "DELETE")),
        ("HEAD", "/v1/responses/a", ("GET", "DELETE")),
        ("GET", "/v1/responses/a/cancel", ("POST",)),
        ("POST", "/v1/responses/a/input_items", ("GET",)),
    ],
)
def test_another_method_of_a_resource_is_refused_with_the_right_ones(method, path, allow):
    assert refusal(EndpointRegistry().find, method, path).allow == allow


@pytest.mark.parametrize(
    "encoded",
    ["a" * 257, "a%2Fb", "a.b", "..", "a%20b", "a b", "a%", "a%zz", "resp%255F1", "%C3%A9", "é", "a%0A"],
)
def test_a_resource_id_of_other_characters_or_length_is_invalid(encoded):
    for method, suffix in (("GET", ""), ("POST", "/cancel")):
        error = refusal(EndpointRegistry().find, method, f"/v1/responses/{encoded}{suffix}")
        assert (error.code, error.status) == ("invalid_request", 400)


@given(st.from_regex(r"[A-Za-z0-9_-]{1,256}", fullmatch=True), st.data())
def test_a_resource_id_is_decoded_once_and_checked_after_that(resource_id, data):
    encoded = "".join(f"%{ord(char):02x}" if data.draw(st.booleans()) else char for char in resource_id)
    assert EndpointRegistry().find("GET", f"/v1/responses/{encoded}").resource_id == resource_id


# ----------------------------------------------------------------------------------------- passthrough


def test_passthrough_is_off_by_default():
    assert refusal(EndpointRegistry().find, "POST", "/v1/score").code == "not_found"


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_passthrough_takes_any_method_and_asks_for_the_capability_of_the_path(method):
    registry = EndpointRegistry(["/v1/score", "/v1/audio/*"])
    for path, pattern in (("/v1/score", "/v1/score"), ("/v1/audio/speech", "/v1/audio/*")):
        endpoint, resource_id = registry.find(method, path)
        assert (endpoint.name, endpoint.path, endpoint.capability) == ("passthrough", pattern, path)
        assert (endpoint.label, endpoint.picks_by, resource_id) == ("other", "least_load", "")
        assert (endpoint.has_prepare_job, endpoint.is_repeatable) == (False, False)


@pytest.mark.parametrize(
    "path",
    [
        "/v1/scores",
        "/v1/score/",
        "/V1/score",
        "/v1/audio",
        "/v1/audio/../chat/completions",
        "/v1/audio/%2e%2E/chat/completions",
        "/v1/audio/x%2f..%2fy",
        "/v1/audio/..\\x",
        "/v1/audio/.",
    ],
)
def test_passthrough_reaches_neither_beside_its_paths_nor_out_of_them(path):
    registry = EndpointRegistry(["/v1/score", "/v1/audio/*"])
    assert refusal(registry.find, "POST", path).code == "not_found"


def test_dots_that_are_no_segment_of_their_own_pass_below_a_prefix():
    registry = EndpointRegistry(["/v1/audio/*"])
    assert registry.find("GET", "/v1/audio/a..b/...%2e").endpoint.name == "passthrough"


def test_rows_win_over_passthrough():
    registry = EndpointRegistry(["/*"])
    assert registry.find("POST", "/v1/responses").endpoint is BY_NAME["responses"]
    assert registry.find("GET", "/v1/responses/a").endpoint is BY_NAME["responses_get"]
    assert refusal(registry.find, "GET", "/v1/responses/a.b").code == "invalid_request"
    assert refusal(registry.find, "PUT", "/v1/responses/a").code == "method_not_allowed"
    assert registry.find("GET", "/v1/responses/a/other").endpoint.name == "passthrough"


def test_longest_prefix_is_what_a_path_is_counted_under():
    registry = EndpointRegistry(["/v1/*", "/v1/audio/*", "/*"])
    assert registry.find("GET", "/v1/audio/x").endpoint.path == "/v1/audio/*"
    assert registry.find("GET", "/v1/x").endpoint.path == "/v1/*"


def test_passthrough_rows_are_told_apart_by_number_and_do_not_grow_memory():
    registry = EndpointRegistry(["/x/*"])
    numbers = {registry.find("GET", f"/x/{n}").endpoint.number for n in range(5000)}
    assert len(numbers) == 5000 and min(numbers) == len(ENDPOINTS)
    assert registry.find("GET", "/x/4999") is registry.find("PUT", "/x/4999")
    assert len(registry._kept) <= 1024
