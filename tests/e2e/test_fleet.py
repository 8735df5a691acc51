"""What is asked of all upstreams, and of one about itself (admin.md §5, §6)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.conftest import COMMON
from tests.fakes.node import Backend, Node, running, wait_until
from tests.fakes.probed_server import ProbedServer
from tests.fakes.workers import add, call, remove_all, workers


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    with running(*COMMON) as running_node:
        yield running_node


@pytest.fixture
def server(node: Node) -> Iterator[ProbedServer]:
    with ProbedServer() as played:
        yield played
        remove_all(node)


def test_flush_with_one_failing_upstream_of_three_names_it_and_carries_each_key(
    node: Node, server: ProbedServer, backends: tuple[Backend, Backend]
) -> None:
    """admin.md behaviour 13."""
    assert call(node, "POST", "/flush_cache")[1]["workers_flushed"] == 0
    for backend in backends:
        add(node, backend.url)
    add(node, server.url, api_key="sk-9")
    server.answers["/flush_cache"] = (500, b"")
    status, body = call(node, "POST", "/flush_cache")
    assert (status, body["status"]) == (206, "partial_success")
    assert body["successful"] == [backend.url for backend in backends]
    assert body["failed"] == [{"worker": server.url, "error": "HTTP 500"}]
    (asked,) = server.of("/flush_cache")
    assert (asked.method, asked.headers["authorization"]) == ("POST", "Bearer sk-9")
    server.answers["/flush_cache"] = (200, b"")
    assert call(node, "POST", "/flush_cache")[0] == 200


def test_loads_are_those_of_the_servers_and_in_flight_is_our_own_count(
    node: Node, server: ProbedServer, backends: tuple[Backend, Backend]
) -> None:
    """admin.md behaviour 14."""
    add(node, backends[0].url)
    with node.connect() as held:
        body = b'{"model":"m1","messages":[{"role":"user","content":"x"}]}'
        held.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"x-backend-fault: delay-head-ms=30000\r\ncontent-length: %d\r\n\r\n" % len(body) + body
        )
        wait_until(lambda: workers(node)[backends[0].url]["load"] == 1, "not in flight")
        add(node, server.url)
        found = {each["worker"]: each for each in call(node, "GET", "/get_loads")[1]["workers"]}
        assert found[backends[0].url]["in_flight"] == 1
        assert found[backends[0].url]["load"] >= 0
        assert found[server.url] == {"worker": server.url, "load": -1, "in_flight": 0}
        server.answers["/get_load"] = (200, b'[{"num_tokens":1000},{"num_tokens":830}]')
        found = {each["worker"]: each for each in call(node, "GET", "/get_loads")[1]["workers"]}
        assert found[server.url]["load"] == 1830
    wait_until(lambda: not node.held(), "something is still held")


def test_engine_metrics_merge_and_garbage_is_left_out_with_a_comment(
    node: Node, server: ProbedServer, backends: tuple[Backend, Backend]
) -> None:
    """admin.md behaviour 15."""
    assert call(node, "GET", "/engine_metrics")[1]["error"]["code"] == "no_workers"
    for backend in backends:
        add(node, backend.url)
    add(node, server.url)
    server.answers["/metrics"] = (200, b"<html>what?</html>")
    status, headers, data = node.request("GET", "/engine_metrics")
    assert (status, headers["content-type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
    text = data.decode()
    assert f"# left out: worker {server.url}: " in text
    found = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    assert {sample.labels["worker_addr"] for sample in found} == {backend.url for backend in backends}
    assert not any(":" in sample.name for sample in found)


def test_models_keep_what_their_upstream_told_and_show_each_once(
    node: Node, server: ProbedServer, backends: tuple[Backend, Backend]
) -> None:
    """admin.md behaviour 16."""
    assert call(node, "GET", "/v1/models")[1]["error"]["code"] == "no_workers"
    server.answers["/v1/models"] = (
        200,
        b'{"data":[{"id":"m2","max_model_len":4096,"owned_by":"vllm"},{"id":"m1","max_model_len":1}]}',
    )
    add(node, server.url)
    add(node, backends[0].url)
    body = call(node, "GET", "/v1/models")[1]
    assert [entry["id"] for entry in body["data"]] == ["m1", "m2"]
    assert body["data"][0]["max_model_len"] == 1
    assert (body["data"][1]["max_model_len"], body["data"][1]["owned_by"]) == (4096, "vllm")
    assert all(entry["object"] == "model" and entry["created"] > 0 for entry in body["data"])
    call(node, "DELETE", f"/workers/{workers(node)[server.url]['id']}")
    assert [entry["id"] for entry in call(node, "GET", "/v1/models")[1]["data"]] == ["m1"]


@pytest.mark.parametrize("path", ["/get_model_info", "/model_info"])
def test_model_information_comes_from_the_first_upstream_with_its_host_and_key(
    node: Node, server: ProbedServer, backends: tuple[Backend, Backend], path: str
) -> None:
    """admin.md behaviour 17."""
    assert call(node, "GET", path)[1]["error"]["code"] == "no_workers"
    server.answers[path] = (200, b'{"model_path":"/m"}')
    add(node, server.url, api_key="sk-up")
    add(node, backends[0].url)
    server.asked.clear()
    headers = {"authorization": "Bearer sk-client", "x-api-key": "sk-client", "host": "gateway.example"}
    status, _, data = node.request("GET", f"{path}?detail=1", headers=headers)
    assert (status, data) == (200, b'{"model_path":"/m"}')
    (asked,) = server.of(path)
    assert asked.path == f"{path}?detail=1"
    assert asked.headers["host"] == server.url.removeprefix("http://")
    assert asked.headers["authorization"] == "Bearer sk-up"
    assert "x-api-key" not in asked.headers
    assert node.request("HEAD", path)[0] == 200
    assert node.request("POST", path)[0] == 405
    call(node, "PUT", f"/workers/{workers(node)[server.url]['id']}", {"api_key": None})
    node.request("GET", path, headers=headers)
    assert server.of(path)[-1].headers["authorization"] == "Bearer sk-client"
    wait_until(lambda: not node.held(), "load is still held")


def test_server_information_tells_the_node(node: Node) -> None:
    body = call(node, "GET", "/get_server_info")[1]
    assert list(body) == [
        "router_manager", "routers_count", "workers_count", "version", "uptime_secs",
        "policy", "topology", "io_processes", "prepare_workers", "prepare_groups",
    ]  # fmt: skip
    assert (body["router_manager"], body["routers_count"], body["io_processes"]) == (True, 1, 2)
    assert body["uptime_secs"] > 0


@pytest.mark.parametrize("path", ["/abort_request", "/parse/function_call", "/v1/conversations"])
def test_routes_that_are_not_served_are_404(node: Node, path: str) -> None:
    assert node.request("POST", path, {})[0] == 404
