"""Which routes there are, who may use them, and what the process answers by itself."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from meshd.api.health import HEALTH_ROUTES, HealthFacts
from meshd.errors import MeshError
from meshd.io.routes import Answer, Routes, check_asking
from meshd.routing.registry import Registry
from meshd.routing.upstream import Upstream

READY = HealthFacts(
    is_draining=False,
    has_registry=True,
    pool_is_alive=True,
    pool_has_failed=False,
    healthy_workers=1,
    total_workers=1,
)


def make_routes(*upstreams: Upstream, is_open: bool = False) -> Routes:
    registry = Registry(1, upstreams)
    return Routes(lambda: READY, lambda: registry, lambda: {"version": "1.2.3"}, is_open)


def ask(routes: Routes, path: str, method: str = "GET") -> Answer:
    route = routes.find(path)
    assert route is not None
    return routes.answer(route, method)


def upstream(number: int, *models: str, **facts: Any) -> Upstream:
    defaults = {"state": "active", "is_healthy": True, "registered_at": 1790000000 + number}
    return Upstream(number, str(number), f"http://u{number}:1", models=models, **{**defaults, **facts})


def models_of(*upstreams: Upstream) -> list[dict[str, Any]]:
    _, body, _ = make_routes(*upstreams).models()
    answer = orjson.loads(body)
    assert list(answer) == ["object", "data"]
    return answer["data"]


@pytest.mark.parametrize(
    ("path", "label"),
    [
        ("/workers", "/workers"),
        ("/workers/abc", "/workers/{id}"),
        ("/workers/a/b", "/workers/{id}"),
        ("/list_workers", "/list_workers"),
        ("/add_worker", "/add_worker"),
        ("/remove_worker", "/remove_worker"),
        ("/flush_cache", "/flush_cache"),
        ("/get_loads", "/get_loads"),
        ("/engine_metrics", "/engine_metrics"),
        ("/v1/tokenizers", "/v1/tokenizers"),
        ("/v1/tokenizers/a%2Fb", "/v1/tokenizers/{id}"),
        ("/v1/tokenizers/a%2Fb/status", "/v1/tokenizers/{id}/status"),
        ("/v1/tokenizers/status", "/v1/tokenizers/{id}"),
    ],
)
def test_admin_routes_are_relayed_under_their_template(path: str, label: str) -> None:
    route = make_routes().find(path)
    assert route is not None
    assert (route.is_relayed, route.label) == (True, label)


@pytest.mark.parametrize("path", ["/", "/worker", "/v1/models", "/v1/tokenizers2", "/parse/x"])
def test_other_paths_are_no_routes(path: str) -> None:
    assert make_routes().find(path) is None


def test_explaining_a_route_is_this_process_and_takes_only_post() -> None:
    route = make_routes().find("/route/explain")
    assert route is not None and (route.kind, route.label) == ("explain", "/route/explain")
    check_asking("POST")
    with pytest.raises(MeshError) as caught:
        check_asking("GET")
    assert (caught.value.code, caught.value.allow) == ("method_not_allowed", ("POST",))


def test_metrics_are_404_on_the_traffic_port_whatever_is_passed_through() -> None:
    """admin.md behaviour 20."""
    with pytest.raises(MeshError) as caught:
        ask(make_routes(), "/metrics")
    assert caught.value.code == "not_found"


@pytest.mark.parametrize("path", HEALTH_ROUTES)
def test_all_aliases_answer_as_their_route(path: str) -> None:
    """admin.md behaviour 5."""
    for method in ("GET", "HEAD"):
        status, body, fields = ask(make_routes(), path, method)
        assert status == 200
        assert orjson.loads(body)["status"] in ("ok", "ready")
        assert fields == ((b"cache-control", b"no-store"),)
    with pytest.raises(MeshError) as caught:
        ask(make_routes(), path, "POST")
    assert caught.value.allow == ("GET", "HEAD")


PEERS = [
    ("127.0.0.1:5000", True),
    ("127.8.8.8:5000", True),
    ("::1:5000", True),
    ("::ffff:127.0.0.1:5000", True),
    ("", True),
    ("10.0.0.7:5000", False),
    ("::ffff:10.0.0.7:5000", False),
    ("fe80::1%eth0:5000", False),
    ("no address:1", False),
]


@pytest.mark.parametrize(("peer", "is_admitted"), PEERS)
@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
def test_only_clients_on_loopback_may_change_state(method: str, peer: str, is_admitted: bool) -> None:
    routes = make_routes()
    if is_admitted:
        routes.admit(method, peer)
        return
    with pytest.raises(MeshError) as caught:
        routes.admit(method, peer)
    assert (caught.value.code, caught.value.status) == ("admin_required", 403)
    assert "--open-admin" in caught.value.message
    assert "--open-admin" in caught.value.message


def test_reading_is_open_and_open_admin_opens_the_rest() -> None:
    for method in ("GET", "HEAD", "OPTIONS"):
        make_routes().admit(method, "10.0.0.7:5000")
    make_routes(is_open=True).admit("DELETE", "10.0.0.7:5000")


def test_server_information_has_its_members() -> None:
    status, body, _ = ask(make_routes(upstream(0, "m"), upstream(1, "m")), "/get_server_info")
    assert status == 200
    assert orjson.loads(body) == {
        "router_manager": True,
        "routers_count": 1,
        "workers_count": 2,
        "version": "1.2.3",
    }


def test_models_are_listed_once_and_sorted_both_of_an_upstream_with_two() -> None:
    """admin.md behaviour 16."""
    entry = '{"id":"m1","max_model_len":4096,"owned_by":"vllm"}'
    other = '{"id":"m1","max_model_len":1}'
    found = models_of(upstream(0, "m2", "m1", entries=(entry,)), upstream(1, "m1", entries=(other,)))
    assert found == [
        {"id": "m1", "object": "model", "created": 1790000000, "owned_by": "vllm", "max_model_len": 4096},
        {"id": "m2", "object": "model", "created": 1790000000, "owned_by": "local"},
    ]


def test_models_of_unhealthy_upstreams_are_listed_of_starting_and_draining_ones_not() -> None:
    found = models_of(
        upstream(0, "a", is_healthy=False),
        upstream(1, "b", state="starting"),
        upstream(2, "c", state="draining"),
        upstream(3, "unknown"),
    )
    assert [entry["id"] for entry in found] == ["a"]


def test_models_without_any_upstream_are_503() -> None:
    with pytest.raises(MeshError) as caught:
        make_routes().models()
    assert caught.value.code == "no_workers"
