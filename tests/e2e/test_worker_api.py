"""The set of upstreams changed while traffic flows: registration, changes, who may, and what survives."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from meshd.control import Role
from tests.e2e.conftest import COMMON
from tests.fakes.load import SteadyLoad
from tests.fakes.node import Backend, Node, running, wait_until
from tests.fakes.workers import ABSENT, add, call, chat, front_doors, remove_all, served_by, workers

FLAGS = (
    *COMMON,
    "--route-headers",
    "--policy", "round_robin",
    "--max-concurrent-requests", "8",
    "--queue-size", "0",
    "--passthrough-paths", "/*",
)  # fmt: skip


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    with running(*FLAGS, "--host", "0.0.0.0") as running_node:
        yield running_node


@pytest.fixture(autouse=True)
def empty(node: Node) -> Iterator[None]:
    yield
    remove_all(node)


def controller_pids(node: Node) -> list[int]:
    return [row.pid for row in node.board().rows() if row.role is Role.CONTROLLER and row.is_alive]


def kill_controller(node: Node) -> None:
    (former,) = controller_pids(node)
    os.kill(former, signal.SIGKILL)
    wait_until(
        lambda: any(
            r.role is Role.CONTROLLER and r.is_alive and r.pid != former for r in node.board().rows()
        ),
        "no new controller",
    )


def test_registration_goes_on_in_the_background_and_ends_in_use(
    node: Node, backends: tuple[Backend, Backend]
) -> None:
    """admin.md behaviour 6; routing.md behaviour 21."""
    url = backends[0].url
    assert call(node, "GET", "/readiness")[1]["reason"] == "no_available_workers"
    assert chat(node)[0] == 503
    status, body = call(node, "POST", "/workers", {"url": url + "/"})
    assert (status, body["status"], body["url"]) == (202, "accepted", url)
    assert call(node, "GET", body["location"])[0] == 200
    wait_until(lambda: workers(node)[url]["job_status"]["status"] == "completed", "not registered")
    assert served_by(node) == url
    info = workers(node)[url]
    assert (info["model_id"], info["state"], info["is_healthy"]) == ("m1", "active", True)
    assert call(node, "GET", "/v1/models")[1]["data"][0]["id"] == "m1"
    assert call(node, "GET", "/readiness")[0] == 200


def test_upstream_that_does_not_answer_waits_and_is_used_after_its_first_success(node: Node) -> None:
    with socket.create_server(("127.0.0.1", 0)) as placeholder:
        port = placeholder.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    assert call(node, "POST", "/workers", {"url": url})[0] == 202
    wait_until(lambda: workers(node)[url]["job_status"]["message"], "no reason told")
    info = workers(node)[url]
    assert (info["state"], info["models"], info["model_id"]) == ("starting", [], "unknown")
    assert chat(node)[0] == 503
    backend = Backend("--model", "m1", "--port", str(port))
    try:
        wait_until(lambda: chat(node)[0] == 200, "not used")
    finally:
        backend.stop()


def test_same_url_is_409_in_every_spelling_and_listed_once(
    node: Node, backends: tuple[Backend, Backend]
) -> None:
    """admin.md behaviour 7."""
    url = backends[0].url
    add(node, url)
    for spelling in (url, url + "/", url.replace("http", "HTTP")):
        status, body = call(node, "POST", "/workers", {"url": spelling})
        assert (status, body["code"]) == (409, "WORKER_ALREADY_EXISTS")
    assert call(node, "GET", "/list_workers")[1] == {"urls": [url]}
    body = call(node, "GET", "/workers")[1]
    assert (body["total"], body["stats"]["regular_count"]) == (1, 1)
    assert call(node, "GET", "/get_server_info")[1]["workers_count"] == 1


def test_put_of_a_label_keeps_health_and_decides_the_next_placement(
    node: Node, backends: tuple[Backend, Backend]
) -> None:
    """admin.md behaviour 8."""
    first, second = (backend.url for backend in backends)
    ids = {url: add(node, url) for url in (first, second)}
    assert {served_by(node) for _ in range(8)} == {first, second}
    before = workers(node)[first]
    status, _ = call(node, "PUT", f"/workers/{ids[first]}", {"labels": {"mesh.apis": "/generate"}})
    assert status == 202
    assert {served_by(node) for _ in range(8)} == {second}
    after = workers(node)[first]
    assert after["metadata"] == {**before["metadata"], "mesh.apis": "/generate"}
    assert {k: v for k, v in after.items() if k != "metadata"} == {
        k: v for k, v in before.items() if k != "metadata"
    }
    assert call(node, "PUT", f"/workers/{ids[first]}", {"labels": {"mesh.apis": None}})[0] == 202
    assert {served_by(node) for _ in range(8)} == {first, second}


def test_both_front_doors_use_a_change_once_it_is_answered(
    node: Node, backends: tuple[Backend, Backend]
) -> None:
    """admin.md behaviour 21: the registry is in force before the answer, for every placement."""
    with front_doors(node) as doors:
        for backend, count in zip(backends, (1, 2), strict=True):
            assert call(node, "POST", "/workers", {"url": backend.url})[0] == 202
            for connection in doors.values():
                connection.request("GET", "/get_server_info")
                assert json.loads(connection.getresponse().read())["workers_count"] == count
        wait_until(lambda: all(w["available"] for w in workers(node).values()), "not in use")
        first, second = (workers(node)[backend.url] for backend in backends)
        assert call(node, "DELETE", f"/workers/{first['id']}")[0] == 202
        for connection in doors.values():
            for _ in range(4):
                body = {"model": "m1", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
                connection.request("POST", "/v1/chat/completions", json.dumps(body),
                                   {"content-type": "application/json"})  # fmt: skip
                answer = connection.getresponse()
                answer.read()
                assert answer.getheader("x-mesh-upstream") == second["url"]


def test_set_and_health_are_as_before_after_the_controller_was_killed_and_traffic_flows(
    node: Node, backends: tuple[Backend, Backend]
) -> None:
    """admin.md behaviour 12, but for the 503: the admin socket outlives a controller."""
    for backend in backends:
        add(node, backend.url, priority=7)
    before = workers(node)
    with SteadyLoad(node, connections=4) as load:
        kill_controller(node)
        assert workers(node).keys() == before.keys()
        done = load.completed
        wait_until(lambda: load.completed > done + 20, "no traffic")
    assert not load.failures
    kept = ("id", "url", "models", "priority", "is_healthy", "state", "metadata", "available")
    after = workers(node)
    assert {url: [info[k] for k in kept] for url, info in after.items()} == {
        url: [info[k] for k in kept] for url, info in before.items()
    }


def test_registration_that_was_answered_survives_a_controller_that_is_killed_at_once(
    node: Node, backends: tuple[Backend, Backend]
) -> None:
    status, body = call(node, "POST", "/workers", {"url": backends[0].url})
    kill_controller(node)
    assert status == 202
    wait_until(lambda: workers(node)[backends[0].url]["available"], "not in use")
    assert workers(node)[backends[0].url]["id"] == body["worker_id"]


def test_silent_controller_is_503_while_the_front_doors_serve(
    node: Node, backends: tuple[Backend, Backend]
) -> None:
    """admin.md behaviour 12, its 503. The supervisor stands still too: else it would replace a controller
    that gives no sign of life.
    """
    add(node, backends[0].url)
    (pid,) = controller_pids(node)
    os.kill(node.process.pid, signal.SIGSTOP)
    os.kill(pid, signal.SIGSTOP)
    answers: list[tuple[int, dict[str, str], bytes]] = []
    thread = threading.Thread(target=lambda: answers.append(node.request("GET", "/workers")))
    try:
        thread.start()
        for path in ("/liveness", "/readiness", "/get_server_info", "/v1/models", "/get_model_info"):
            answer = node.request("GET", path)
            assert answer[0] == 200, (path, answer)
        assert chat(node)[0] == 200
        thread.join(30)
    finally:
        row = next(row for row in node.board().rows() if row.pid == pid)
        silent_since = row.heartbeat_ns
        os.kill(pid, signal.SIGCONT)
        wait_until(lambda: row.heartbeat_ns > silent_since, "the controller does not go on")
        os.kill(node.process.pid, signal.SIGCONT)
    ((status, headers, _),) = answers
    assert (status, headers["x-mesh-error-code"]) == (503, "controller_unavailable")
    assert workers(node)[backends[0].url]["available"]


def test_no_answer_of_any_route_has_a_key(node: Node) -> None:
    """admin.md behaviour 11."""
    backend = Backend("--model", "m1", "--api-key", "sk-hidden")
    try:
        worker = add(node, backend.url, api_key="sk-hidden")
        paths = ["/workers", f"/workers/{worker}", "/list_workers", "/get_server_info", "/v1/models",
                 "/get_loads", "/engine_metrics", "/get_model_info", "/model_info", "/readiness",
                 "/v1/tokenizers"]  # fmt: skip
        for path in paths:
            assert b"sk-hidden" not in node.request("GET", path)[2], path
        answers = [
            node.request("PUT", f"/workers/{worker}", {"api_key": "sk-hidden"}),
            node.request("POST", "/workers", {"url": backend.url, "api_key": "sk-hidden"}),
            node.request("POST", "/workers", {"url": "http://x:1", "api_key": "sk-hidden\n"}),
            node.request("POST", "/flush_cache"),
        ]
        assert not any(b"sk-hidden" in data for _, _, data in answers)
        assert chat(node)[0] == 200
        assert call(node, "PUT", f"/workers/{worker}", {"api_key": None})[0] == 202
        assert chat(node)[0] == 401
    finally:
        backend.stop()
    assert not any("sk-hidden" in line for line in node.raw_lines)


def test_changes_from_elsewhere_are_403_and_reading_is_open(node: Node) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing: it only finds the address of this host
        address = probe.getsockname()[0]
    if address.startswith("127."):
        pytest.skip("this host has no address but loopback")
    former, node.host = node.host, address
    try:
        changes = (
            ("POST", "/workers"),
            ("PUT", f"/workers/{ABSENT}"),
            ("DELETE", f"/workers/{ABSENT}"),
            ("POST", "/add_worker?url=http://a:1"),
            ("POST", "/remove_worker?url=http://a:1"),
            ("POST", "/flush_cache"),
            ("POST", "/v1/tokenizers"),
            ("DELETE", "/v1/tokenizers/x"),
        )
        for method, path in changes:
            status, headers, data = node.request(method, path)
            assert (status, headers["x-mesh-error-code"]) == (403, "admin_required"), path
            assert b"--open-admin" in data
        for path in ("/workers", "/list_workers", "/get_loads", "/v1/tokenizers", "/get_server_info"):
            assert node.request("GET", path)[0] == 200
    finally:
        node.host = former


def test_admin_routes_answer_while_every_ticket_is_held_and_the_queue_is_full(
    node: Node, backends: tuple[Backend, Backend]
) -> None:
    """admin.md behaviour 18."""
    add(node, backends[0].url)
    holders = [node.connect() for _ in range(8)]
    body = json.dumps({"model": "m1", "messages": [{"role": "user", "content": "x"}]}).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    head += b"x-backend-fault: delay-head-ms=60000\r\n"
    try:
        for holder in holders:
            holder.sendall(head + b"content-length: %d\r\n\r\n" % len(body) + body)
        wait_until(lambda: workers(node)[backends[0].url]["load"] == 8, "the tickets are not held")
        assert chat(node)[0] == 429
        paths = ("/workers", "/get_loads", "/engine_metrics", "/v1/models", "/get_server_info", "/readiness")
        for path in paths:
            assert node.request("GET", path, timeout=5)[0] == 200, path
        assert node.request("POST", "/workers", {"url": backends[1].url}, timeout=5)[0] == 202
    finally:
        for holder in holders:
            holder.close()
    wait_until(lambda: not node.held(), "something is still held")


def test_legacy_forms_add_list_and_drain(node: Node, backends: tuple[Backend, Backend]) -> None:
    """admin.md behaviour 23."""
    url = backends[0].url
    assert call(node, "POST", f"/add_worker?url={url}")[0] == 202
    wait_until(lambda: chat(node)[0] == 200, "not used")
    assert call(node, "GET", "/list_workers")[1] == {"urls": [url]}
    assert call(node, "POST", f"/remove_worker?url={url}/")[0] == 202
    wait_until(lambda: call(node, "GET", "/list_workers")[1] == {"urls": []}, "not removed")
    assert call(node, "POST", f"/remove_worker?url={url}")[0] == 404


def test_ranks_of_a_dp_aware_server_have_ids_of_their_own_and_one_together() -> None:
    """admin.md behaviour 10."""
    backend = Backend("--model", "m1", "--ranks", "2")
    try:
        with running(*COMMON, "--dp-aware") as node:
            _, body = call(node, "POST", "/workers", {"url": backend.url})
            origin = body["worker_id"]
            wait_until(lambda: len(workers(node)) == 2, "no ranks")
            told = call(node, "GET", f"/workers/{origin}")[1]
            assert [rank["url"] for rank in told["ranks"]] == [f"{backend.url}@0", f"{backend.url}@1"]
            assert call(node, "GET", f"/workers/{told['ranks'][1]['id']}")[1]["dp_rank"] == 1
            assert call(node, "PUT", f"/workers/{origin}", {"priority": 3})[0] == 202
            assert {info["priority"] for info in workers(node).values()} == {3}
            assert call(node, "DELETE", f"/workers/{origin}")[0] == 202
            wait_until(lambda: not workers(node), "ranks are left")
            assert call(node, "GET", f"/workers/{origin}")[0] == 404
    finally:
        backend.stop()


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/workers/x", 400, "BAD_REQUEST"),
        ("GET", f"/workers/{ABSENT}", 404, "WORKER_NOT_FOUND"),
        ("PUT", f"/workers/{ABSENT}", 404, "WORKER_NOT_FOUND"),
        ("DELETE", f"/workers/{ABSENT}", 404, "WORKER_NOT_FOUND"),
    ],
)
def test_errors_of_the_worker_routes_have_their_envelope(
    node: Node, method: str, path: str, status: int, code: str
) -> None:
    answer, headers, data = node.request(method, path, {})
    assert (answer, headers["x-mesh-error-code"]) == (status, code)
    assert json.loads(data)["code"] == code


def test_wrong_method_on_the_worker_routes_is_405_in_the_common_envelope(node: Node) -> None:
    answer, headers, data = node.request("PATCH", "/workers", {})
    assert (answer, headers["allow"]) == (405, "GET, HEAD, POST")
    assert headers["x-mesh-error-code"] == json.loads(data)["error"]["code"] == "method_not_allowed"


def test_metrics_of_meshd_are_404_on_the_traffic_port_and_never_forwarded(
    node: Node, backends: tuple[Backend, Backend]
) -> None:
    """admin.md behaviour 20; this node passes every path through."""
    add(node, backends[0].url)
    assert node.request("GET", "/metrics")[0] == 404
    assert node.request("HEAD", "/metrics")[0] == 404


def test_body_over_a_mebibyte_is_413(node: Node) -> None:
    body = b'{"url":"http://a:1","labels":{"x":"' + b"y" * (1 << 20) + b'"}}'
    assert node.request("POST", "/workers", body)[0] == 413


def test_many_changes_at_once_are_all_answered(node: Node) -> None:
    """More than the controller takes connections: those of changes that have ended must not stay open."""
    with ThreadPoolExecutor(50) as clients:
        found = list(clients.map(lambda n: call(node, "DELETE", f"/workers/{ABSENT}")[0], range(400)))
    assert found == [404] * 400
