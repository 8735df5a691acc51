"""What is asked of all upstreams, against servers that are played."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import pytest
from prometheus_client.parser import text_string_to_metric_families

from meshd.controller import fleet
from meshd.controller.fleet import Fleet
from meshd.controller.http_client import Answer, FetchError, Room, UpstreamClient
from meshd.controller.http_server import Request, Response
from meshd.memory import Segment
from meshd.routing.load import LoadTable, segment_bytes
from meshd.routing.registry import Upstream
from tests.fakes.admin import ask
from tests.fakes.upstream_set import UpstreamSet

A, B, C = "http://a:1", "http://b:1", "http://c:1"


class PlayedServers(UpstreamClient):
    """Answers by base URL: a status, an ``Answer``, or an exception."""

    def __init__(self) -> None:
        super().__init__()
        self.answers: dict[str, Any] = {}
        self.asked: list[tuple[str, str, str]] = []
        self.bounds: set[tuple[float, int]] = set()
        self.running = self.most_running = 0

    async def send(
        self,
        method: str,
        upstream: Upstream,
        path: str,
        timeout_s: float,
        max_body_bytes: int,
        room: Room | None = None,
    ) -> Answer:
        self.asked.append((method, upstream.base_url, path))
        self.bounds.add((timeout_s, max_body_bytes))
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        await asyncio.sleep(0)
        self.running -= 1
        answer = self.answers.get(upstream.base_url, 200)
        if isinstance(answer, Exception):
            raise answer
        if room is not None and isinstance(answer, Answer):
            room.take(len(answer.body))
        return answer if isinstance(answer, Answer) else Answer(answer, b"")


class Node:
    def __init__(self, *urls: str, is_dp_aware: bool = False) -> None:
        self.set = UpstreamSet(is_prompt=True, is_dp_aware=is_dp_aware)
        self.set.start(*urls)
        self.servers = PlayedServers()
        self.forgotten: list[int] = []
        self.now_s = 0.0
        segment = Segment.create("load", segment_bytes(1))
        self.own_load = LoadTable(segment, 0, 1)
        self.fleet = Fleet(
            self.set.keeper,
            LoadTable(segment, None, 1),
            self.servers,
            self.forgotten.extend,
            clock=lambda: self.now_s,
        )

    def ask(self, method: str, path: str) -> Response:
        return ask(self.fleet.routes(), method, path)


def test_flush_of_all_is_200_and_forgets_the_prefixes_of_all() -> None:
    node = Node(A, B, C)
    answer = node.ask("POST", "/flush_cache")
    assert (answer.status, orjson.loads(answer.body)) == (
        200,
        {
            "status": "success",
            "message": "flushed 3 of 3",
            "workers_flushed": 3,
            "total_http_workers": 3,
            "total_workers": 3,
        },
    )
    assert node.servers.asked == [("POST", url, "/flush_cache") for url in (A, B, C)]
    assert node.forgotten == [0, 1, 2]
    assert node.servers.bounds == {(5.0, 1 << 20)}


def test_flush_with_one_failing_upstream_of_three_is_206_and_names_it() -> None:
    """admin.md behaviour 13, its first half."""
    node = Node(A, B, C)
    node.servers.answers[B] = 500
    answer = node.ask("POST", "/flush_cache")
    body = orjson.loads(answer.body)
    assert (answer.status, body["status"], body["message"]) == (206, "partial_success", "flushed 2 of 3")
    assert body["successful"] == [A, C]
    assert body["failed"] == [{"worker": B, "error": "HTTP 500"}]
    assert node.forgotten == [0, 2]


def test_flush_that_fails_everywhere_is_502_and_without_upstreams_a_success() -> None:
    node = Node(A)
    node.servers.answers[A] = FetchError("Connection refused")
    answer = node.ask("POST", "/flush_cache")
    assert (answer.status, orjson.loads(answer.body)["error"]["code"]) == (502, "no_worker_response")
    empty = orjson.loads(Node().ask("POST", "/flush_cache").body)
    assert (empty["status"], empty["workers_flushed"], empty["total_workers"]) == ("success", 0, 0)


def test_ranks_of_an_origin_are_asked_once_and_draining_upstreams_not() -> None:
    node = Node(A, B, is_dp_aware=True)
    node.set.activate(A, "m", dp_size=3)
    node.set.keeper.drain([node.set.the(B)])
    node.ask("POST", "/flush_cache")
    assert node.servers.asked == [("POST", A, "/flush_cache")]
    assert node.forgotten == [0, 2, 3]


@pytest.mark.parametrize(
    ("answer", "load"),
    [
        (Answer(200, b'[{"num_tokens":1000},{"dp_rank":1,"num_tokens":830}]'), 1830),
        (Answer(200, b"[]"), 0),
        (Answer(200, b'[{"num_reqs":1}]'), -1),
        (Answer(200, b'{"num_tokens":5}'), -1),
        (Answer(200, b'[{"num_tokens":"5"}]'), -1),
        (Answer(200, b"<html>"), -1),
        (Answer(200, b'[{"num_tokens":1e300}]'), -1),
        (Answer(200, b'[{"num_tokens":18446744073709551615},{"num_tokens":1}]'), -1),
        (404, -1),
        (FetchError("no answer within 5 s"), -1),
    ],
)
def test_load_is_the_sum_of_tokens_and_in_flight_is_our_own_count(answer: Any, load: int) -> None:
    """admin.md behaviour 14."""
    node = Node(A)
    node.servers.answers[A] = answer
    node.own_load.add(0)
    node.own_load.add(0)
    body = orjson.loads(node.ask("GET", "/get_loads").body)
    assert body == {"workers": [{"worker": A, "load": load, "in_flight": 2}]}
    assert node.servers.asked == [("GET", A, "/get_load")]


def test_in_flight_of_an_origin_is_that_of_all_its_ranks() -> None:
    node = Node(A, is_dp_aware=True)
    node.set.activate(A, "m", dp_size=2)
    for number in (0, 1, 1):
        node.own_load.add(number)
    (worker,) = orjson.loads(node.ask("GET", "/get_loads").body)["workers"]
    assert worker["in_flight"] == 3


def test_engine_metrics_are_merged_and_failures_told() -> None:
    node = Node(A, B, C)
    node.servers.answers = {A: Answer(200, b"x 1\n"), B: Answer(200, b"x 2\n"), C: 500}
    answer = node.ask("GET", "/engine_metrics")
    (family,) = text_string_to_metric_families(answer.body.decode())
    assert {sample.labels["worker_addr"]: sample.value for sample in family.samples} == {A: 1, B: 2}
    assert f"# left out: worker {C}: HTTP 500" in answer.body.decode()
    assert answer.content_type == "text/plain; version=0.0.4; charset=utf-8"
    assert node.servers.bounds == {(5.0, 16 << 20)}


def test_engine_metrics_of_nobody_are_503_and_of_failing_servers_502() -> None:
    assert orjson.loads(Node().ask("GET", "/engine_metrics").body)["error"]["code"] == "no_workers"
    node = Node(A, B)
    node.servers.answers = {A: 500, B: Answer(200, b"<html>")}
    answer = node.ask("GET", "/engine_metrics")
    assert (answer.status, orjson.loads(answer.body)["error"]["code"]) == (502, "no_worker_response")


def test_engine_metrics_of_all_are_bounded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "MAX_MERGED_BYTES", 7)
    node = Node(A, B)
    node.servers.answers = {url: Answer(200, b"x 1\n") for url in (A, B)}
    text = node.ask("GET", "/engine_metrics").body.decode()
    assert f"# left out: worker {B}: the answers of all are too large together" in text


def test_room_of_an_answer_that_is_no_metrics_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "MAX_MERGED_BYTES", 7)
    node = Node(A, B)
    node.servers.answers = {A: Answer(500, b"sorry\n"), B: Answer(200, b"x 1\n")}
    text = node.ask("GET", "/engine_metrics").body.decode()
    assert f'x{{worker_addr="{B}"}} 1' in text


def test_who_asks_for_engine_metrics_while_they_are_merged_gets_the_same_answer() -> None:
    node = Node(A)
    node.servers.answers[A] = Answer(200, b"x 1\n")
    route = next(route for route in node.fleet.routes() if route.path == "/engine_metrics")
    request = Request("GET", "/engine_metrics", "", {})

    async def ask_at_once() -> list[Response]:
        first = asyncio.create_task(route.answer(request, ""))
        others = [asyncio.create_task(route.answer(request, "")) for _ in range(9)]
        await asyncio.sleep(0)
        first.cancel()
        answers = await asyncio.gather(*others)
        assert len(node.servers.asked) == 1
        return [*answers, await route.answer(request, "")]

    assert {answer.body for answer in asyncio.run(ask_at_once())} == {
        b'# TYPE x untyped\nx{worker_addr="http://a:1"} 1\n'
    }
    assert len(node.servers.asked) == 2


def test_at_most_32_are_asked_at_a_time() -> None:
    node = Node(*(f"http://u{n}:1" for n in range(100)))
    node.ask("GET", "/get_loads")
    assert len(node.servers.asked) == 100
    assert node.servers.most_running == 32


def test_upstreams_whose_turn_does_not_come_in_time_have_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(A, B)
    original = node.servers.send

    async def slow(*args: Any) -> Answer:
        answer = await original(*args)
        node.now_s += 100.0
        return answer

    monkeypatch.setattr(node.servers, "send", slow)
    monkeypatch.setattr(fleet, "MAX_ASKED", 1)
    assert orjson.loads(node.ask("POST", "/flush_cache").body)["failed"] == [
        {"worker": B, "error": "not asked: the others took too long"}
    ]
