from __future__ import annotations

from collections.abc import Callable

import pytest

from meshd.api.endpoints import ENDPOINTS
from meshd.errors import MeshError
from meshd.routing.origins import first_available, origins_of
from meshd.routing.registry import Registry
from meshd.routing.upstream import Upstream

MakeUpstream = Callable[..., Upstream]

GET = next(endpoint for endpoint in ENDPOINTS if endpoint.name == "responses_get")


def _refusal(*upstreams: Upstream) -> MeshError:
    with pytest.raises(MeshError) as caught:
        origins_of(Registry(1, upstreams), GET)
    return caught.value


def test_each_origin_is_asked_once_in_url_order_however_many_ranks_it_has(
    make_upstream: MakeUpstream,
) -> None:
    ranks = [make_upstream(n, base_url="http://b:1", dp_rank=n, api_key="k") for n in range(4)]
    registry = Registry(
        1, [make_upstream(4, base_url="http://c:1"), *ranks, make_upstream(5, base_url="http://a:1")]
    )
    asked = origins_of(registry, GET)
    assert [(upstream.base_url, upstream.number) for upstream in asked] == [
        ("http://a:1", 5),
        ("http://b:1", 0),
        ("http://c:1", 4),
    ]


def test_unhealthy_starting_and_draining_origins_are_asked_too(make_upstream: MakeUpstream) -> None:
    upstreams = [
        make_upstream(0, is_healthy=False),
        make_upstream(1, state="draining"),
        make_upstream(2, state="starting", is_healthy=False),
    ]
    assert origins_of(Registry(1, upstreams), GET) == tuple(upstreams)


def test_only_regular_upstreams_that_list_responses_are_asked(make_upstream: MakeUpstream) -> None:
    able = make_upstream(0, labels={"mesh.apis": "/v1/responses"})
    others = [
        make_upstream(1, labels={"mesh.apis": "/v1/chat/completions"}),
        make_upstream(2, worker_type="prefill"),
    ]
    assert origins_of(Registry(1, [*others, able]), GET) == (able,)
    assert (_refusal(*others).code, _refusal(*others).status) == ("unsupported_api", 501)


def test_without_any_upstream_it_is_no_workers() -> None:
    assert (_refusal().code, _refusal().status) == ("no_workers", 503)


def test_ranks_of_one_origin_with_different_keys_conflict(make_upstream: MakeUpstream) -> None:
    for keys in (("a", "b"), ("a", None)):
        ranks = [
            make_upstream(n, base_url="http://h:1", dp_rank=n, api_key=key) for n, key in enumerate(keys)
        ]
        error = _refusal(*ranks)
        assert (error.code, error.status, error.retry_after_s) == (
            "conflicting_backend_credentials",
            503,
            60,
        )
        assert "h:1" not in error.message


def test_first_available_upstream_is_that_registered_first_and_never_a_decode_one() -> None:
    upstreams = [
        Upstream(0, "0", "http://d:1", worker_type="decode"),
        Upstream(1, "1", "http://a:1"),
        Upstream(2, "2", "http://b:1"),
    ]
    registry = Registry(1, upstreams)
    assert first_available(registry, lambda upstream: True).number == 1
    assert first_available(registry, lambda upstream: upstream.number == 2).number == 2
    with pytest.raises(MeshError) as caught:
        first_available(registry, lambda upstream: False)
    assert caught.value.code == "no_workers"
