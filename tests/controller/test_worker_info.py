"""What is told of upstreams."""

from __future__ import annotations

import time
import uuid
from typing import Any

import orjson
import pytest

from meshd.controller.admin import AdminRoute
from meshd.controller.announcement import Announcement
from meshd.controller.http_server import Response
from meshd.controller.worker_info import WorkerInfo
from meshd.memory import Segment
from meshd.routing.conditions import Conditions
from meshd.routing.conditions import segment_bytes as conditions_bytes
from meshd.routing.load import LoadTable, segment_bytes
from tests.fakes.admin import ask
from tests.fakes.upstream_set import UpstreamSet


def make_set(is_dp_aware: bool = False) -> UpstreamSet:
    node = UpstreamSet(is_dp_aware=is_dp_aware, is_prompt=True)
    node.start(
        Announcement("http://a:1", api_key="sk-secret", labels=(("mesh.apis", "/generate"),)),
        Announcement("http://b:1", model_id="configured"),
    )
    node.activate("http://a:1", "m1", "m2")
    return node


def routes_of(node: UpstreamSet, is_probing_disabled: bool = False) -> list[AdminRoute]:
    segment = Segment.create("load", segment_bytes(1))
    LoadTable(segment, 0, 1).add(0)
    conditions = Conditions(Segment.create("conditions", conditions_bytes(1)), 0, 1, owner=1)
    conditions.cool_down(1, time.monotonic() + 100)
    return WorkerInfo(node.keeper, LoadTable(segment, None, 1), conditions, is_probing_disabled).routes()


def get(node: UpstreamSet, path: str) -> Response:
    return ask(routes_of(node), "GET", path)


def test_workers_are_listed_in_registration_order_with_their_counts() -> None:
    answer = get(make_set(), "/workers")
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
    body = get(node, f"/workers/{upstream.id}").body
    assert orjson.loads(body) == expected
    assert list(orjson.loads(body)) == list(expected)


def test_pending_registration_shows_no_model_yet() -> None:
    node = make_set()
    info = orjson.loads(get(node, f"/workers/{node.keeper.upstreams[1].id}").body)
    assert (info["model_id"], info["models"], info["state"]) == ("unknown", [], "starting")
    assert info["job_status"]["status"] == "pending"


def test_no_answer_contains_a_key() -> None:
    node = make_set()
    for path in ("/workers", f"/workers/{node.keeper.upstreams[0].id}"):
        assert b"sk-secret" not in get(node, path).body


@pytest.mark.parametrize(
    ("path", "status", "code"),
    [
        ("/workers/not-a-uuid", 400, "BAD_REQUEST"),
        (f"/workers/{uuid.UUID(int=7)}", 404, "WORKER_NOT_FOUND"),
    ],
)
def test_bad_and_unknown_ids_are_errors_in_the_shape_of_the_route(path: str, status: int, code: str) -> None:
    answer = get(make_set(), path)
    body = orjson.loads(answer.body)
    assert (answer.status, body["code"], list(body)) == (status, code, ["error", "code"])
    assert dict(answer.headers) == {"x-request-id": "req-1", "x-mesh-error-code": code}


def test_id_of_an_origin_resolves_to_all_its_ranks_and_each_rank_to_itself() -> None:
    node = make_set(is_dp_aware=True)
    origin = node.keeper.upstreams[0]
    node.activate("http://a:1", "m1", dp_size=2)
    body = orjson.loads(get(node, f"/workers/{origin.id}").body)
    assert (body["id"], body["url"]) == (origin.id, "http://a:1")
    assert [(info["url"], info["dp_rank"], info["dp_size"]) for info in body["ranks"]] == [
        ("http://a:1@0", 0, 2),
        ("http://a:1@1", 1, 2),
    ]
    for rank in node.keeper.upstreams[:2]:
        assert orjson.loads(get(node, f"/workers/{rank.id}").body)["url"] == rank.url


def test_info_tells_what_is_special_of_an_upstream() -> None:
    node = UpstreamSet(is_prompt=True)
    probing = (("disable_health_check", True),)
    node.start("http://a:1", Announcement("http://b:1", runtime="vllm", probing=probing))
    node.activate("http://b:1", "m")
    info = orjson.loads(get(node, f"/workers/{node.the('http://b:1').id}").body)
    assert (info["runtime_type"], info["disable_health_check"]) == ("vllm", True)
    assert (info["available"], 99 < info["cooldown_secs"] <= 100) == (False, True)
    infos = orjson.loads(ask(routes_of(node, is_probing_disabled=True), "GET", "/workers").body)["workers"]
    assert [info["disable_health_check"] for info in infos] == [True, True]


def test_removal_shows_as_a_job_until_the_upstream_has_left() -> None:
    node = make_set()
    upstream = node.the("http://a:1")
    node.keeper.drain([upstream])
    info = orjson.loads(get(node, f"/workers/{upstream.id}").body)
    assert (info["state"], info["available"]) == ("draining", False)
    assert (info["job_status"]["job_type"], info["job_status"]["status"]) == ("remove", "processing")
    node.pass_time(0.25)
    assert get(node, f"/workers/{upstream.id}").status == 404


def test_legacy_list_has_the_urls() -> None:
    assert orjson.loads(get(make_set(), "/list_workers").body) == {"urls": ["http://a:1", "http://b:1"]}
