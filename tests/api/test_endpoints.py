from __future__ import annotations

import pytest

from meshd.api.endpoints import ENDPOINTS, endpoint_by_number, find_endpoint
from meshd.errors import MeshError

POSTED = [e for e in ENDPOINTS if e.methods == ("POST",)]


@pytest.mark.parametrize("endpoint", ENDPOINTS, ids=lambda e: e.name)
def test_each_method_of_each_row_finds_its_row(endpoint):
    for method in endpoint.methods:
        assert find_endpoint(method, endpoint.path) is endpoint


@pytest.mark.parametrize("method", ["GET", "PUT", "post"])
@pytest.mark.parametrize("endpoint", POSTED, ids=lambda e: e.name)
def test_another_method_of_a_post_path_is_refused_with_the_right_one(endpoint, method):
    with pytest.raises(MeshError) as refusal:
        find_endpoint(method, endpoint.path)
    assert (refusal.value.code, refusal.value.status) == ("method_not_allowed", 405)
    assert refusal.value.allow == ("POST",)


def test_models_take_get_and_head_alone():
    with pytest.raises(MeshError) as refusal:
        find_endpoint("POST", "/v1/models")
    assert refusal.value.allow == ("GET", "HEAD")


@pytest.mark.parametrize(
    "path",
    ["/v1/score", "/v1/chat/completions/", "/v1//responses", "/V1/responses", "", "/health", "/workers"],
)
def test_a_path_that_is_not_exactly_that_of_an_endpoint_is_not_found(path):
    with pytest.raises(MeshError) as refusal:
        find_endpoint("POST", path)
    assert (refusal.value.code, refusal.value.allow) == ("not_found", ())


def test_numbers_lead_back_to_the_row():
    assert [endpoint_by_number(e.number) for e in ENDPOINTS] == list(ENDPOINTS)
    for number in (-1, len(ENDPOINTS)):
        with pytest.raises(LookupError):
            endpoint_by_number(number)


def test_request_id_prefixes_follow_the_api():
    assert {e.name: e.id_prefix for e in ENDPOINTS} == {
        "chat": "chatcmpl-",
        "completions": "cmpl-",
        "generate": "gnt-",
        "messages": "msg-",
        "count_tokens": "msg-",
        "responses": "resp-",
        "embeddings": "req-",
        "models": "req-",
    }


def test_only_token_counting_borrows_the_capability_of_another_path():
    borrowed = {e.name: e.capability for e in ENDPOINTS if e.capability not in (e.path, None)}
    assert borrowed == {"count_tokens": "/v1/messages"}
