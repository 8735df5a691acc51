"""Facts that an upstream tells, and how they settle with what was configured."""

from __future__ import annotations

import asyncio

import orjson
import pytest

from meshd.controller.http_client import Answer, FetchError, UpstreamClient
from meshd.controller.registration import (
    MAX_ENTRIES_BYTES,
    MAX_MODELS,
    MAX_MODELS_BYTES,
    Discovered,
    discover,
    read_information,
    read_models,
    settled_labels,
    settled_models,
    unknown_apis,
    unknown_policy,
)
from meshd.routing.registry import Upstream


class ToldUpstream(UpstreamClient):
    """Answers each path with a status and JSON, any other path with 404; a status of 0 is no answer."""

    def __init__(self, told: dict[str, tuple[int, object]]) -> None:
        super().__init__()
        self.told = told
        self.paths: list[str] = []

    async def get(self, upstream: Upstream, path: str, timeout_s: float, max_body_bytes: int) -> Answer:
        self.paths.append(path)
        status, value = self.told.get(path, (404, None))
        if not status:
            raise FetchError("refused")
        return Answer(status, orjson.dumps(value))

    def discover(self, runtime: str = "sglang") -> Discovered:
        upstream = Upstream(number=0, id="a", base_url="http://u:1", runtime=runtime)
        return asyncio.run(discover(self, upstream))


MODELS = (200, {"data": [{"id": "m1", "root": "/root"}]})
ENTRIES = ('{"id":"m1","root":"/root"}',)


def test_names_and_ranks_come_from_the_information_routes_and_win_over_the_root() -> None:
    found = ToldUpstream(
        {
            "/v1/models": MODELS,
            "/server_info": (200, {"served_model_name": "s", "model_path": "/m", "dp_size": 4, "x": 1}),
            "/model_info": (200, {"model_path": "/other", "tokenizer_path": "/t"}),
        }
    ).discover()
    labels = {"served_model_name": "s", "model_path": "/m", "tokenizer_path": "/t"}
    assert found == Discovered(("m1",), labels, "", 4, ENTRIES)


def test_older_spelling_of_a_route_is_asked_only_where_the_newer_is_missing() -> None:
    upstream = ToldUpstream({"/get_server_info": (200, {"dp_size": 2}), "/model_info": (200, {})})
    assert upstream.discover().dp_size == 2
    assert "/get_model_info" not in upstream.paths


def test_server_without_information_routes_is_no_problem_and_one_that_fails_is() -> None:
    plain = Discovered(("m1",), {"model_path": "/root"}, entries=ENTRIES)
    assert ToldUpstream({"/v1/models": MODELS}).discover() == plain
    found = ToldUpstream({"/v1/models": (500, None), "/server_info": (0, None), "/model_info": (403, None)})
    assert found.discover() == Discovered(
        problem="/v1/models answered 500; /model_info answered 403; /server_info: refused"
    )
    assert found.paths.count("/get_server_info") == 0


@pytest.mark.parametrize("dp_size", [0, -1, True, 2.0, "2", None, 10**6])
def test_number_of_ranks_is_a_count_or_it_is_unknown(dp_size: object) -> None:
    assert read_information("/server_info", orjson.dumps({"dp_size": dp_size})).dp_size is None


@pytest.mark.parametrize("body", [b"", b"[]", b"\xff"])
def test_information_that_is_no_object_is_a_problem(body: bytes) -> None:
    assert read_information("/server_info", body).problem == "/server_info answered no JSON object"


def test_all_ids_are_read_once_in_order_and_the_first_root_is_the_model_path() -> None:
    body = {"data": [{"id": "b", "root": "/m/b"}, {"id": "a", "root": "/m/a"}, {"id": "b"}, {"id": 7}, "x"]}
    found = read_models(orjson.dumps(body))
    assert (found.models, found.labels) == (("b", "a"), {"model_path": "/m/b"})
    assert found.entries == ('{"id":"b","root":"/m/b"}', '{"id":"a","root":"/m/a"}')


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"data":{}}', b"\xff"])
def test_answer_that_is_no_model_list_is_a_problem(body: bytes) -> None:
    found = read_models(body)
    assert found.models == ()
    assert found.problem


def test_list_of_models_is_bounded() -> None:
    body = orjson.dumps({"data": [{"id": f"m{n}"} for n in range(1000)] + [{"id": "x" * 10_000}]})
    assert len(read_models(body).models) == MAX_MODELS


def test_configured_labels_win_over_discovered_ones() -> None:
    found = Discovered(("a",), {"model_path": "/found", "extra": "1"})
    assert settled_labels(found, {"model_path": "/mine"}) == {"model_path": "/mine", "extra": "1"}


@pytest.mark.parametrize(
    ("configured", "listed", "labels", "models"),
    [
        (("mine",), ("a", "b"), {"served_model_name": "s"}, ("mine", "a", "b")),
        ((), ("a", "b"), {"served_model_name": "s"}, ("s", "a", "b")),
        ((), ("a", "b"), {"served_model_name": "b"}, ("b", "a")),
        ((), ("a", "b"), {"model_path": "/m"}, ("a", "b")),
        ((), (), {"model_path": "/m"}, ("/m",)),
        ((), (), {}, ("unknown",)),
    ],
)
def test_model_id_comes_from_the_first_source_that_has_one(
    configured: tuple[str, ...], listed: tuple[str, ...], labels: dict[str, str], models: tuple[str, ...]
) -> None:
    assert settled_models(Discovered(listed), configured, labels) == models


@pytest.mark.parametrize(
    ("runtime", "asked", "dp_size"),
    [
        ("sglang", {"/v1/models", "/server_info", "/model_info"}, 4),
        ("vllm", {"/v1/models"}, None),
        ("trtllm", {"/v1/models"}, None),
        ("atom", {"/v1/models", "/kv_transfer_info"}, 2),
    ],
)
def test_each_runtime_is_asked_what_it_has(runtime: str, asked: set[str], dp_size: int | None) -> None:
    upstream = ToldUpstream(
        {
            "/v1/models": MODELS,
            "/server_info": (200, {"dp_size": 4}),
            "/model_info": (200, {}),
            "/kv_transfer_info": (200, {"dp_size": 2}),
        }
    )
    assert upstream.discover(runtime).dp_size == dp_size
    assert set(upstream.paths) == asked


def test_texts_of_the_model_list_are_bounded_together() -> None:
    body = {"data": [{"id": f"m{n}", "note": "x" * 1000} for n in range(50)]}
    found = read_models(orjson.dumps(body))
    assert len(found.models) == 50
    assert sum(map(len, found.entries)) <= MAX_ENTRIES_BYTES


def test_names_of_many_long_models_are_bounded_together() -> None:
    found = read_models(orjson.dumps({"data": [{"id": f"{n:0>500}"} for n in range(250)]}))
    assert sum(map(len, found.models)) <= MAX_MODELS_BYTES


def test_entry_nested_too_deep_is_left_out_and_its_id_kept() -> None:
    body = b'{"data":[{"id":"m","x":' + b"[" * 600 + b"]" * 600 + b"}]}"
    found = read_models(body)
    assert (found.models, found.entries) == (("m",), ())


def test_path_at_which_nothing_is_served_is_told() -> None:
    labels = {"mesh.apis": "/generate, /v1/rerank ,/custom/x, /v1/chat/completions,"}
    assert unknown_apis(labels, ()) == ["/v1/rerank", "/custom/x"]
    assert unknown_apis(labels, ("/custom/*", "/v1/rerank")) == []
    assert unknown_apis({}, ()) == []


@pytest.mark.parametrize(
    ("label", "told"),
    [("prefix_hash", ""), ("consistent_hashing", ""), ("", ""), ("fastest", "fastest"), ("Random", "Random")],
)
def test_policy_that_does_not_exist_is_told(label: str, told: str) -> None:
    assert unknown_policy({"policy": label}) == told
    assert unknown_policy({}) == ""
