"""POST, PUT and DELETE below /workers, and their legacy forms."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import orjson
import pytest

from meshd.config.sources import load_settings
from meshd.controller import worker_changes
from meshd.controller.admin import AdminRoute
from meshd.controller.http_server import Response
from meshd.controller.worker_changes import WorkerChanges
from meshd.routing.upstream import Upstream
from tests.fakes.admin import ask
from tests.fakes.upstream_set import UpstreamSet, quiet_log

A, B = "http://a:1", "http://b:1"
SETTINGS = replace(load_settings([], {}).settings, backend="vllm")


def make_set(*urls: str, is_dp_aware: bool = False) -> UpstreamSet:
    node = UpstreamSet(is_prompt=True, is_dp_aware=is_dp_aware)
    node.start(*urls)
    return node


def routes_of(node: UpstreamSet) -> list[AdminRoute]:
    return WorkerChanges(node.keeper, SETTINGS, quiet_log()).routes()


def send(node: UpstreamSet, method: str, target: str, body: Any = None) -> Response:
    return ask(routes_of(node), method, target, body)


def code_of(answer: Response) -> tuple[int, str]:
    body = orjson.loads(answer.body)
    assert list(body) == ["error", "code"]
    return answer.status, body["code"]


def test_post_answers_202_before_the_upstream_is_ready_with_its_location() -> None:
    """admin.md behaviour 6, its first part."""
    node = make_set()
    answer = send(node, "POST", "/workers", {"url": "HTTP://A:1/", "api_key": "sk-secret"})
    upstream = node.the(A)
    assert answer.status == 202
    assert dict(answer.headers)["location"] == f"/workers/{upstream.id}"
    body = orjson.loads(answer.body)
    assert list(body) == ["status", "worker_id", "url", "location", "message"]
    assert (body["status"], body["worker_id"], body["url"]) == ("accepted", upstream.id, A)
    assert b"sk-secret" not in answer.body
    assert (upstream.state, upstream.source, upstream.runtime) == ("starting", "api", "vllm")


def test_post_is_answered_when_it_is_published() -> None:
    node = make_set()
    send(node, "POST", "/workers", {"url": A})
    assert [u.url for u in node.published().upstreams] == [A]


def test_post_takes_every_member() -> None:
    node = make_set()
    body = {
        "url": A,
        "api_key": "k",
        "model_id": "m1",
        "priority": 7,
        "cost": 2.5,
        "worker_type": "regular",
        "bootstrap_port": None,
        "runtime": "atom",
        "labels": {"x": "1"},
        "tokenizer_path": "/t",
        "health_check_interval_secs": 3,
        "disable_health_check": True,
        "reasoning_parser": "ignored",
        "dp_aware": True,
    }
    assert send(node, "POST", "/workers", body).status == 202
    u = node.the(A)
    assert (u.api_key, u.models, u.priority, u.cost, u.runtime) == ("k", ("m1",), 7, 2.5, "atom")
    assert u.labels == {"x": "1", "tokenizer_path": "/t"}
    assert u.probing == {"health_check_interval_secs": 3.0, "disable_health_check": True}


@pytest.mark.parametrize("url", [A, f"{A}/", "HTTP://A:1"])
def test_same_url_twice_is_409_and_never_counted_twice(url: str) -> None:
    """admin.md behaviour 7, routing.md behaviour 20."""
    node = make_set(A)
    assert code_of(send(node, "POST", "/workers", {"url": url})) == (409, "WORKER_ALREADY_EXISTS")
    assert code_of(send(node, "POST", f"/add_worker?url={url}")) == (409, "WORKER_ALREADY_EXISTS")
    assert node.urls() == [A]


def test_url_of_a_draining_upstream_is_taken() -> None:
    node = make_set(A)
    node.keeper.drain([node.the(A)])
    assert code_of(send(node, "POST", "/workers", {"url": A})) == (409, "WORKER_ALREADY_EXISTS")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "The body is empty"),
        (b"[]", "must be a JSON object"),
        (b'{"url":', "not valid JSON"),
        ({}, "needs a url"),
        ({"url": "grpc://a"}, "not gRPC"),
        ({"url": B, "lables": {}}, "unknown member lables: did you mean labels?"),
        ({"url": B, "priority": "high"}, "priority: must be a whole number"),
        ({"url": B, "api_key": "a\nb"}, "api_key: "),
        ({"url": B, "worker_type": "decode"}, "worker_type: decode needs prefill/decode topology"),
        ({"url": B, "bootstrap_port": 70000}, "bootstrap_port: must be a number from 1 to 65535"),
        ({"url": B, "labels": {"x": "y" * 9000}}, "may have at most 8192 bytes"),
    ],
)
def test_bad_post_is_400_and_registers_nothing(body: Any, words: str) -> None:
    node = make_set(A)
    answer = send(node, "POST", "/workers", body)
    assert code_of(answer) == (400, "BAD_REQUEST")
    assert words in orjson.loads(answer.body)["error"]
    assert node.urls() == [A]


def test_full_set_and_too_many_pending_registrations_are_503(monkeypatch: pytest.MonkeyPatch) -> None:
    node = make_set(*(f"http://u{n}:1" for n in range(1024)))
    full = send(node, "POST", "/workers", {"url": A})
    assert code_of(full) == (503, "SERVICE_UNAVAILABLE")
    assert dict(full.headers)["retry-after"] == "5"
    node = make_set(A, B)
    monkeypatch.setattr(worker_changes, "MAX_PENDING", 1)
    assert code_of(send(node, "POST", "/workers", {"url": "http://c:1"})) == (503, "SERVICE_UNAVAILABLE")
    node.activate(A, "m")
    assert send(node, "POST", "/workers", {"url": "http://c:1"}).status == 202


def active(node: UpstreamSet) -> Upstream:
    node.activate(A, "m")
    return node.the(A)


def test_put_of_a_label_keeps_state_and_health() -> None:
    """admin.md behaviour 8, as far as the set is concerned."""
    node = make_set(A)
    before = active(node)
    answer = send(node, "PUT", f"/workers/{before.id}", {"labels": {"mesh.apis": "/generate"}})
    assert answer.status == 202
    assert list(orjson.loads(answer.body)) == ["status", "worker_id", "message"]
    assert node.the(A) == replace(before, labels={"mesh.apis": "/generate"})


def test_put_merges_labels_and_null_removes_one() -> None:
    node = make_set(A)
    path = f"/workers/{active(node).id}"
    send(node, "PUT", path, {"labels": {"a": "1", "b": "2", "priority": "3"}})
    send(node, "PUT", path, {"labels": {"a": None, "c": "4", "never": None}})
    assert (node.the(A).labels, node.the(A).priority) == ({"b": "2", "c": "4", "priority": "3"}, 3)


def test_put_sets_and_removes_the_key_and_sets_the_rest() -> None:
    node = make_set(A)
    path = f"/workers/{active(node).id}"
    body = {"api_key": "k", "priority": 1, "cost": 3, "health_failure_threshold": 9}
    answer = send(node, "PUT", path, body)
    assert b'"k"' not in answer.body
    u = node.the(A)
    assert (u.api_key, u.priority, u.cost, u.probing) == ("k", 1, 3.0, {"health_failure_threshold": 9})
    send(node, "PUT", path, {"api_key": None, "health_success_threshold": 4})
    u = node.the(A)
    assert u.api_key is None
    assert u.probing == {"health_failure_threshold": 9, "health_success_threshold": 4}


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"url": B}, "unknown member url"),
        ({"labels": {"a": 1}}, "labels: must be a table of strings"),
        ({"labels": {"a": "x" * 9000}}, "labels: may have at most"),
        ({"priority": None}, "priority: must be a whole number"),
        ({"health_check_interval_secs": -1}, "health_check_interval_secs: "),
        (b"{", "not valid JSON"),
    ],
)
def test_bad_put_is_400_and_changes_nothing(body: Any, words: str) -> None:
    node = make_set(A)
    before = active(node)
    answer = send(node, "PUT", f"/workers/{before.id}", body)
    assert code_of(answer) == (400, "BAD_REQUEST")
    assert words in orjson.loads(answer.body)["error"]
    assert node.the(A) == before


@pytest.mark.parametrize("method", ["PUT", "DELETE"])
@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("not-a-uuid", (400, "BAD_REQUEST")),
        ("6f0c2a1e-4d57-4b52-9b0e-0a4a3c1d77e2", (404, "WORKER_NOT_FOUND")),
    ],
)
def test_bad_and_unknown_ids_are_errors(method: str, text: str, answer: tuple[int, str]) -> None:
    assert code_of(send(make_set(A), method, f"/workers/{text}", {})) == answer


def test_delete_drains_and_the_id_is_404_after_the_last_request_ended() -> None:
    """admin.md behaviour 9."""
    node = make_set(A, B)
    upstream = active(node)
    node.busy = {upstream.number}
    answer = send(node, "DELETE", f"/workers/{upstream.id}")
    assert (answer.status, orjson.loads(answer.body)["worker_id"]) == (202, upstream.id)
    assert node.the(A).state == "draining"
    node.pass_time(10)
    assert node.urls() == [A, B]
    node.busy = set()
    node.pass_time(1)
    assert code_of(send(node, "DELETE", f"/workers/{upstream.id}")) == (404, "WORKER_NOT_FOUND")


def test_delete_by_force_removes_at_once_also_what_drains_already() -> None:
    node = make_set(A, B)
    upstream = active(node)
    node.busy = {upstream.number}
    send(node, "DELETE", f"/workers/{upstream.id}")
    assert code_of(send(node, "DELETE", f"/workers/{upstream.id}?force=maybe")) == (400, "BAD_REQUEST")
    assert send(node, "DELETE", f"/workers/{upstream.id}?force=true").status == 202
    assert node.urls() == [B]
    assert node.published().cut == (upstream.id,)
    assert send(node, "POST", "/workers", {"url": A}).status == 202


def test_id_of_a_dp_aware_origin_covers_all_its_ranks_for_put_and_delete() -> None:
    """admin.md behaviour 10; GET is in test_worker_info."""
    node = make_set(A, is_dp_aware=True)
    origin = node.the(A)
    node.activate(A, "m", dp_size=2)
    send(node, "PUT", f"/workers/{origin.id}", {"priority": 3})
    assert [u.priority for u in node.keeper.upstreams] == [3, 3]
    first, second = node.keeper.upstreams
    send(node, "PUT", f"/workers/{second.id}", {"priority": 4})
    assert [u.priority for u in node.keeper.upstreams] == [3, 4]
    send(node, "DELETE", f"/workers/{first.id}")
    assert [u.state for u in node.keeper.upstreams] == ["draining", "active"]
    send(node, "DELETE", f"/workers/{origin.id}")
    node.pass_time(1)
    assert node.urls() == []


def test_legacy_forms_add_and_drain() -> None:
    """admin.md behaviour 23; listing is in test_worker_info."""
    node = make_set()
    answer = send(node, "POST", "/add_worker?url=http%3A%2F%2Fa%3A1%2F")
    assert (answer.status, node.urls()) == (202, [A])
    assert code_of(send(node, "POST", "/add_worker")) == (400, "BAD_REQUEST")
    assert code_of(send(node, "POST", f"/remove_worker?url={B}")) == (404, "WORKER_NOT_FOUND")
    answer = send(node, "POST", f"/remove_worker?url={A}")
    assert answer.status == 202
    assert orjson.loads(answer.body)["worker_id"] == node.the(A).id
    assert node.the(A).state == "draining"
