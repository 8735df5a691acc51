"""The /workers routes and what else the controller's socket answers."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

import orjson
import pytest

from meshd.controller.admin import AdminRoutes
from meshd.controller.announcement import Announcement
from meshd.controller.http_server import Request, Response
from meshd.controller.worker_info import WorkerInfo
from meshd.log import Log
from meshd.memory import Segment
from meshd.routing.load import LoadTable, segment_bytes
from tests.fakes.upstream_set import UpstreamSet


def make_set(is_dp_aware: bool = False) -> UpstreamSet:
    node = UpstreamSet(is_dp_aware=is_dp_aware, is_prompt=True)
    node.start(
        Announcement("http://a:1", api_key="sk-secret", labels=(("mesh.apis", "/generate"),)),
        Announcement("http://b:1", model_id="configured"),
    )
    node.activate("http://a:1", "m1", "m2")
    return node


def ask(node: UpstreamSet, path: str, method: str = "GET") -> Response:
    segment = Segment.create("load", segment_bytes(1))
    LoadTable(segment, 0, 1).add(0)
    info = WorkerInfo(node.keeper, LoadTable(segment, None, 1), is_probing_disabled=False)
    routes = AdminRoutes(info.routes(), Log("test", "error", stream_fd=-1))
    return asyncio.run(routes.handle(Request(method, path, "", {"x-request-id": "req-1"})))


def test_workers_are_listed_in_registration_order_with_their_counts() -> None:
    answer = ask(make_set(), "/workers")
    body = orjson.loads(answer.body)
    assert answer.status == 200
    assert [info["url"] for info in body["workers"]] == ["http://a:1", "http://b:1"]
    assert body["total"] == 2
    assert body["stats"] == {"prefill_count": 0, "decode_count": 0, "regular_count": 2}


def test_info_has_the_documented_members() -> None:
    node = make_set()
    upstream = node.keeper.upstreams[0]
    expected: dict[str, Any] = {
        "id": upstream.id,
        "url": "http://a:1",
        "model_id": "m1",
        "models": ["m1", "m2"],
        "priority": 50,
        "cost": 1.0,
        "worker_type": "regular",
        "is_healthy": True,
        "load": 1,
        "connection_mode": "HTTP",
        "runtime_type": "sglang",
        "bootstrap_port": None,
        "metadata": {"mesh.apis": "/generate"},
        "disable_health_check": False,
        "state": "active",
        "available": True,
        "breaker": "closed",
        "cooldown_secs": 0.0,
        "dp_rank": None,
        "dp_size": None,
        "job_status": {
            "job_type": "register",
            "worker_url": "http://a:1",
            "status": "completed",
            "message": "",
            "timestamp": 1790000000,
        },
    }
    body = ask(node, f"/workers/{upstream.id}").body
    assert orjson.loads(body) == expected
    assert list(orjson.loads(body)) == list(expected)


def test_pending_registration_shows_no_model_yet() -> None:
    node = make_set()
    info = orjson.loads(ask(node, f"/workers/{node.keeper.upstreams[1].id}").body)
    assert (info["model_id"], info["models"], info["state"]) == ("unknown", [], "starting")
    assert info["job_status"]["status"] == "pending"


def test_no_answer_contains_a_key() -> None:
    node = make_set()
    for path in ("/workers", f"/workers/{node.keeper.upstreams[0].id}"):
        assert b"sk-secret" not in ask(node, path).body


@pytest.mark.parametrize(
    ("path", "status", "code"),
    [
        ("/workers/not-a-uuid", 400, "BAD_REQUEST"),
        (f"/workers/{uuid.UUID(int=7)}", 404, "WORKER_NOT_FOUND"),
    ],
)
def test_bad_and_unknown_ids_are_errors_in_the_shape_of_the_route(path: str, status: int, code: str) -> None:
    answer = ask(make_set(), path)
    body = orjson.loads(answer.body)
    assert (answer.status, body["code"], list(body)) == (status, code, ["error", "code"])
    assert dict(answer.headers) == {"x-request-id": "req-1", "x-mesh-error-code": code}


@pytest.mark.parametrize("path", ["/", "/workers/", "/workers/a/b", "/v1/tokenizers", "/flush_cache"])
def test_other_paths_are_404_json(path: str) -> None:
    answer = ask(make_set(), path)
    assert answer.status == 404
    assert orjson.loads(answer.body)["error"]["code"] == "not_found"


def test_other_methods_are_405_with_allow() -> None:
    answer = ask(make_set(), "/workers", "DELETE")
    assert answer.status == 405
    assert dict(answer.headers)["allow"] == "GET, HEAD"


def test_id_of_an_origin_resolves_to_all_its_ranks_and_each_rank_to_itself() -> None:
    node = make_set(is_dp_aware=True)
    origin = node.keeper.upstreams[0]
    node.activate("http://a:1", "m1", dp_size=2)
    body = orjson.loads(ask(node, f"/workers/{origin.id}").body)
    assert (body["id"], body["url"]) == (origin.id, "http://a:1")
    assert [(info["url"], info["dp_rank"], info["dp_size"]) for info in body["ranks"]] == [
        ("http://a:1@0", 0, 2),
        ("http://a:1@1", 1, 2),
    ]
    for rank in node.keeper.upstreams[:2]:
        assert orjson.loads(ask(node, f"/workers/{rank.id}").body)["url"] == rank.url
