"""What endpoints do with their upstreams: resource operations, ranks, passthrough, token counting, state."""

from __future__ import annotations

import base64
import http.client
import json
import socket
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.node import Backend, Node, running, wait_until
from tests.fakes.raw_upstream import RawUpstream

FLAGS = ("--io-processes", "1", "--prepare-workers", "1", "--policy", "round_robin")
LOAD = "mesh_worker_requests_active"
BEARER = {"authorization": "Bearer client"}
POST_PATHS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/generate",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/responses",
    "/v1/embeddings",
)
HI = [{"role": "user", "content": "Hi"}]


def seen(backend: Backend, prefix: str = "/") -> list[dict[str, Any]]:
    """Requests of clients that reached a backend, in order."""
    background = {"/health", "/v1/models", "/server_info", "/model_info"}
    found = [
        r for r in backend.requests() if r["target"].startswith(prefix) and r["target"] not in background
    ]
    for request in found:
        request["bytes"] = base64.b64decode(request["body"])
        request["fields"] = {name.lower(): value for name, value in request["headers"]}
    return found


def clear(*backends: Backend) -> None:
    for backend in backends:
        backend.fault("")
        backend.control("DELETE", "/_backend/requests")


# ------------------------------------------------------------------------------------------- three origins


@pytest.fixture(scope="module")
def origins() -> Iterator[tuple[Backend, ...]]:
    three = tuple(sorted((Backend("--model", "m1") for _ in range(3)), key=lambda backend: backend.url))
    yield three
    for backend in three:
        backend.stop()


@pytest.fixture(scope="module")
def three_node(origins: tuple[Backend, ...]) -> Iterator[Node]:
    with running(*FLAGS, "--passthrough-paths", "/v1/score", "/v1/audio/*", backends=origins) as node:
        wait_until(lambda: ready_upstreams(node) == 3, "all three upstreams are ready")
        yield node


@pytest.fixture
def three(three_node: Node, origins: tuple[Backend, ...]) -> tuple[Node, tuple[Backend, ...]]:
    clear(*origins)
    return three_node, origins


def ready_upstreams(node: Node) -> int:
    return sum(row["available"] for row in json.loads(node.request("GET", "/workers")[2])["workers"])


def store(node: Node, origins: tuple[Backend, ...], text: str) -> tuple[str, int]:
    """Make one stored response; return its id and the number of the origin that has it."""
    status, _, body = node.request("POST", "/v1/responses", {"model": "m1", "input": text})
    assert status == 200, body
    place = [len(seen(backend, "/v1/responses")) for backend in origins].index(1)
    clear(*origins)
    return json.loads(body)["id"], place


@pytest.mark.parametrize("method", ["GET", "PUT", "post"])
def test_another_method_on_each_post_path_is_405_in_the_envelope_of_that_path(three, method):
    node, _ = three
    for path in POST_PATHS:
        status, headers, body = node.request(method, path)
        assert (status, headers["allow"]) == (405, "POST"), path
        is_messages = path.startswith("/v1/messages")
        assert (json.loads(body).get("type") == "error") is is_messages


def test_paths_beside_the_endpoints_are_404_json(three):
    node, _ = three
    for path in ("/v1/scores", "/v1/chat/completions/", "/v1//responses", "/v1/responses/", "/v1/audio/../x"):
        status, headers, body = node.request("POST", path, {})
        assert (status, headers["x-mesh-error-code"]) == (404, "not_found"), path
        assert json.loads(body)["error"]["code"] == "not_found"


def test_messages_request_without_max_tokens_and_with_unusual_members_passes(three):
    node, origins = three
    body = {
        "model": "m1",
        "messages": [{"role": "system", "content": "x"}],
        "temperature": 1.5,
        "top_k": -1,
        "stream": None,
    }
    _, headers, _ = node.request("POST", "/v1/messages", body)
    assert "x-mesh-error-code" not in headers  # what the upstream makes of it is its own business
    assert sum(len(seen(backend, "/v1/messages")) for backend in origins) == 1


def test_last_of_two_models_places_the_request_and_the_bytes_go_out_as_they_are(three):
    node, origins = three
    body = b'{"model":"nobody", "prompt":"x", "model":"m1"}'
    assert node.request("POST", "/v1/completions", body)[0] == 200
    assert [r["bytes"] for backend in origins for r in seen(backend)] == [body]
    assert node.request("POST", "/v1/completions", body.replace(b'"m1"', b'"m2"'))[0] == 404


@pytest.mark.parametrize(
    "encoded", ["a" * 257, "a%2Fb", "a.b", "a%20b", "resp%255F1", "%C3%A9"], ids=lambda text: text[:12]
)
def test_bad_resource_id_is_400_and_reaches_no_origin(three, encoded):
    node, origins = three
    for method, suffix in (("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")):
        status, headers, _ = node.request(method, f"/v1/responses/{encoded}{suffix}")
        assert (status, headers["x-mesh-error-code"]) == (400, "invalid_request")
    assert not any(seen(backend) for backend in origins)


def test_get_with_a_query_reaches_each_origin_once_and_the_only_200_wins(three):
    node, origins = three
    response_id, place = store(node, origins, "find me")
    origins[(place + 1) % 3].fault("status=500")
    encoded = response_id.replace("_", "%5F")
    status, headers, body = node.request("GET", f"/v1/responses/{encoded}?include=a&limit=2", None, BEARER)
    assert (status, json.loads(body)["id"]) == (200, response_id)
    assert headers["x-request-id"].startswith("resp-")
    wait_until(lambda: all(seen(backend) for backend in origins), "not all are asked")
    for backend in origins:
        (request,) = seen(backend)
        assert (request["method"], request["target"]) == (
            "GET",
            f"/v1/responses/{response_id}?include=a&limit=2",
        )
        assert request["fields"]["authorization"] == "Bearer client"
        assert "content-length" not in request["fields"]
        assert request["fields"]["x-request-id"] == headers["x-request-id"]


def test_each_resource_operation_is_answered_by_the_origin_that_has_the_response(three):
    node, origins = three
    response_id, place = store(node, origins, "operate on me")
    status, _, body = node.request("GET", f"/v1/responses/{response_id}/input_items")
    assert (status, json.loads(body)["object"]) == (200, "list")
    status, _, body = node.request("POST", f"/v1/responses/{response_id}/cancel")
    assert (status, json.loads(body)["status"]) == (200, "cancelled")
    # The answer of the one that has it ends the others' exchanges, some before their requests have left.
    asked = seen(origins[place])
    assert [request["method"] for request in asked] == ["GET", "POST"]
    assert asked[-1]["fields"]["content-length"] == "0"
    status, _, body = node.request("DELETE", f"/v1/responses/{response_id}")
    assert (status, json.loads(body)["deleted"]) == (200, True)
    assert node.request("GET", f"/v1/responses/{response_id}")[0] == 404


def test_body_of_a_resource_operation_is_read_and_not_forwarded(three):
    node, origins = three
    connection = http.client.HTTPConnection(node.host, node.port, timeout=30)
    for method in ("GET", "DELETE"):
        connection.request(method, "/v1/responses/none", b"x" * 100_000)
        answer = connection.getresponse()
        assert (answer.status, answer.read() != b"") == (404, True)
    connection.close()
    assert [r["bytes"] for backend in origins for r in seen(backend)] == [b""] * 6


def test_delete_without_a_2xx_returns_the_500_and_without_an_answer_502(three):
    node, origins = three
    origins[1].fault("status=403")
    origins[2].fault("status=500")
    status, headers, _ = node.request("DELETE", "/v1/responses/none")
    assert (status, "x-mesh-error-code" in headers) == (500, False)
    origins[2].fault("")
    assert node.request("DELETE", "/v1/responses/none")[0] == 403
    for backend in origins:
        backend.fault("close")
    status, headers, body = node.request("DELETE", "/v1/responses/none")
    assert (status, headers["x-mesh-error-code"]) == (502, "no_worker_response")
    assert "127.0.0.1" not in body.decode()
    wait_until(lambda: not node.held(), "nothing is held after resource operations")


def test_client_that_leaves_during_a_resource_operation_holds_nothing(three):
    node, origins = three
    for backend in origins:
        backend.fault("delay-head-ms=60000")
    with node.connect() as client:
        client.sendall(b"GET /v1/responses/r HTTP/1.1\r\nhost: h\r\n\r\n")
        wait_until(lambda: node.metric(LOAD) == 3, "every origin that is asked is counted")
    wait_until(lambda: not node.held(), "everything is given back")


def test_token_count_is_the_upstreams_own_answer(three):
    node, origins = three
    body = {"model": "m1", "messages": HI}
    status, _, answer = node.request("POST", "/v1/messages/count_tokens", body, {"x-api-key": "client"})
    assert (status, list(json.loads(answer))) == (200, ["input_tokens"])
    ((request,),) = [found for backend in origins if (found := seen(backend))]
    assert request["fields"]["x-api-key"] == "client" and "authorization" not in request["fields"]
    for backend in origins:
        backend.fault("status=418")
    assert node.request("POST", "/v1/messages/count_tokens", body)[0] == 418


def test_token_counts_take_turns_while_upstreams_are_idle(three):
    node, origins = three
    for _ in range(6):
        node.request("POST", "/v1/messages/count_tokens", {"model": "m1", "messages": HI})
    assert [len(seen(backend)) for backend in origins] == [2, 2, 2]


@pytest.mark.parametrize(
    "reference",
    [
        {"previous_response_id": "resp_1"},
        {"conversation": "conv_1"},
        {"input": [{"type": "item_reference", "id": "i"}]},
        {"input": [{"id": "i"}]},
    ],
    ids=lambda reference: next(iter(reference)),
)
def test_state_reference_with_several_origins_is_501(three, reference):
    node, origins = three
    status, headers, _ = node.request("POST", "/v1/responses", {"model": "m1", **reference})
    assert (status, headers["x-mesh-error-code"]) == (501, "stateful_routing_unsupported")
    assert not any(seen(backend) for backend in origins)


# -------------------------------------------------------------------------------------------- passthrough


MULTIPART = (
    b'--b\r\ncontent-disposition: form-data; name="file"; filename="a.wav"\r\n\r\n'
    b'\x00\xff{"stream": tru\r\n--b--\r\n'
)


@pytest.mark.parametrize(
    ("method", "path", "content_type", "body"),
    [
        ("POST", "/v1/score?x=%2F", "application/json", b'{"text_1": "a" , "stream": "not parsed"'),
        ("POST", "/v1/audio/transcriptions", "multipart/form-data; boundary=b", MULTIPART),
        ("PUT", "/v1/score", "application/octet-stream", bytes(range(256)) * 400),
        ("GET", "/v1/score", "text/plain", b"body of a GET"),
        ("DELETE", "/v1/audio/x", None, None),
    ],
)
def test_passthrough_forwards_any_method_and_body_untouched(three, method, path, content_type, body):
    node, origins = three
    headers = {} if content_type is None else {"content-type": content_type, "content-encoding": "x-own"}
    status, fields, _ = node.request(method, path, body, {**headers, **BEARER})
    assert status == 404 and "x-mesh-error-code" not in fields  # the bundled upstream has no such API
    ((request,),) = [found for backend in origins if (found := seen(backend))]
    assert (request["method"], request["target"], request["bytes"]) == (method, path, body or b"")
    assert request["fields"].get("content-type") == content_type
    assert request["fields"]["authorization"] == "Bearer client"
    assert request["fields"].get("content-length") == (None if body is None else str(len(body)))
    assert request["fields"]["x-request-id"].startswith("req-")


def test_passthrough_is_off_unless_it_is_configured():
    with (
        RawUpstream(b"") as upstream,
        running(*FLAGS, "--disable-health-check", "--worker-urls", upstream.url) as node,
    ):
        status, headers, _ = node.request("POST", "/v1/score", {})
        assert (status, headers["x-mesh-error-code"]) == (404, "not_found")


def test_passthrough_is_counted_in_load_and_its_body_memory_comes_back():
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: 5\r\n\r\n"
    flags = (*FLAGS, "--disable-health-check", "--passthrough-paths", "/v1/score")
    with RawUpstream(head) as upstream, running(*flags, "--worker-urls", upstream.url) as node:
        with node.connect() as client:
            client.sendall(b"POST /v1/score HTTP/1.1\r\nhost: h\r\ncontent-length: 4\r\n\r\nbody")
            assert upstream.requests.get(timeout=10).body_bytes == 4
            wait_until(lambda: node.metric(LOAD) == 1, "the request is counted in load")
        wait_until(lambda: not node.held(), "everything is given back")


# -------------------------------------------------------------------------------------------------- ranks


@pytest.fixture(scope="module")
def ranked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Node, Backend, Backend]]:
    """Four ranks of m1 without a label, two ranks of m2 that list what they serve."""
    plain = Backend("--model", "m1", "--ranks", "4")
    labelled = Backend("--model", "m2", "--ranks", "2")
    config = Path(tmp_path_factory.mktemp("ranked")) / "meshd.toml"
    config.write_text(
        f'[[workers]]\nurl = "{plain.url}"\n\n[[workers]]\nurl = "{labelled.url}"\n'
        'labels = { "mesh.apis" = "/v1/messages, /v1/chat/completions" }\n'
    )
    with running(*FLAGS, "--dp-aware", "--config", str(config)) as node:
        wait_until(lambda: ready_upstreams(node) == 6, "all ranks are ready")
        yield node, plain, labelled
    plain.stop()
    labelled.stop()


def test_every_rank_is_an_upstream_of_its_own_and_the_origin_is_probed_once(ranked):
    node, plain, labelled = ranked
    rows = json.loads(node.request("GET", "/workers")[2])["workers"]
    expected = [(f"{plain.url}@{rank}", rank, 4) for rank in range(4)]
    expected += [(f"{labelled.url}@{rank}", rank, 2) for rank in range(2)]
    assert [(row["url"], row["dp_rank"], row["dp_size"]) for row in rows] == expected
    assert sum(r["target"] == "/health" for r in plain.requests()) <= 2


@pytest.mark.parametrize(
    ("path", "body", "kept"),
    [
        (
            "/v1/completions",
            b'{"model":"m1","data_parallel_rank":9,"prompt":"a"}',
            b'{"model":"m1","prompt":"a"',
        ),
        (
            "/generate",
            b' {"text" : "a" , "data\\u005fparallel_rank" : 1,"n":1.50,"data_parallel_rank":2 }\n',
            b' {"text" : "a" , "n":1.50 ',
        ),
        (
            "/v1/chat/completions",
            b'{"messages":[{"role":"user","content":"\\u00e9"}],"model":"m1"}',
            b'{"messages":[{"role":"user","content":"\\u00e9"}],"model":"m1"',
        ),
    ],
)
def test_ranks_take_turns_and_every_other_byte_is_the_clients(ranked, path, body, kept):
    node, plain, _ = ranked
    clear(plain)
    for _ in range(4):
        assert node.request("POST", path, body)[0] == 200
    requests = seen(plain)
    assert Counter(r["bytes"] for r in requests) == Counter(
        kept + b',"data_parallel_rank":%d}' % rank for rank in range(4)
    )
    assert all(r["fields"]["content-length"] == str(len(r["bytes"])) for r in requests)
    assert {r["fields"]["host"] for r in requests} == {plain.url[7:]}


def test_content_length_of_a_megabyte_with_a_rank_is_that_of_the_bytes_sent(ranked):
    node, plain, _ = ranked
    clear(plain)
    body = json.dumps({"model": "m1", "data_parallel_rank": 7, "prompt": "word " * 220_000}).encode()
    assert node.request("POST", "/v1/completions", body)[0] == 200
    (request,) = seen(plain)
    assert request["fields"]["content-length"] == str(len(request["bytes"]))
    cut = body.replace(b'"data_parallel_rank": 7,', b"")
    assert request["bytes"].startswith(cut[:-1] + b',"data_parallel_rank":')
    assert len(request["bytes"]) == len(cut) + len(',"data_parallel_rank":0')


def test_messages_get_a_rank_only_where_the_label_lists_them(ranked):
    node, plain, labelled = ranked
    for model, backend in (("m1", plain), ("m2", labelled)):
        clear(plain, labelled)
        body = json.dumps({"model": model, "max_tokens": 5, "messages": HI, "data_parallel_rank": 9}).encode()
        for path in ("/v1/messages", "/v1/messages/count_tokens"):
            assert node.request("POST", path, body)[0] == 200
        sent = [r["bytes"] for r in seen(backend)]
        if backend is plain:
            assert sent == [body, body]
        else:
            assert [json.loads(each)["data_parallel_rank"] in (0, 1) for each in sent] == [True, True]


def test_api_that_no_upstream_of_the_model_lists_is_501(ranked):
    node, _, _ = ranked
    status, headers, _ = node.request("POST", "/v1/completions", {"model": "m2", "prompt": "x"})
    assert (status, headers["x-mesh-error-code"]) == (501, "unsupported_api")


def test_four_ranks_of_one_origin_keep_state_together_and_get_one_resource_request(ranked):
    node, plain, labelled = ranked
    clear(plain, labelled)
    status, _, body = node.request("POST", "/v1/responses", {"model": "m1", "input": "x"})
    response_id = json.loads(body)["id"]
    follow_up = {"model": "m1", "input": "y", "previous_response_id": response_id}
    assert (status, node.request("POST", "/v1/responses", follow_up)[0]) == (200, 200)
    assert node.request("GET", f"/v1/responses/{response_id}")[0] == 200
    assert [r["method"] for r in seen(plain, f"/v1/responses/{response_id}")] == ["GET"]
    assert seen(labelled) == []
    wait_until(lambda: not node.held(), "nothing is held")


def test_each_rank_has_its_own_load(ranked):
    node, plain, _ = ranked
    clear(plain)
    plain.fault("delay-head-ms=60000")
    body = b'{"model":"m1","prompt":"a"}'
    head = b"POST /v1/completions HTTP/1.1\r\nhost: h\r\ncontent-type: application/json\r\n"
    clients: list[socket.socket] = []
    try:
        for _ in range(4):
            clients.append(node.connect())
            clients[-1].sendall(head + b"content-length: %d\r\n\r\n%b" % (len(body), body))
        wait_until(
            lambda: [node.metric(LOAD, worker=f"{plain.url}@{rank}") for rank in range(4)] == [1.0] * 4,
            "each rank holds one request",
        )
    finally:
        for client in clients:
            client.close()
    wait_until(lambda: not node.held(), "everything is given back")


def test_origins_with_different_upstream_keys_each_get_their_own(tmp_path):
    pair = [Backend("--model", "m1", "--api-key", key) for key in ("one", "two")]
    config = tmp_path / "meshd.toml"
    config.write_text(
        "".join(
            f'[[workers]]\nurl = "{backend.url}"\napi_key = "{key}"\n'
            for backend, key in zip(pair, ("one", "two"), strict=True)
        )
    )
    try:
        with running(*FLAGS, "--config", str(config), "--route-headers") as node:
            wait_until(lambda: ready_upstreams(node) == 2, "both upstreams are ready")
            status, fields, _ = node.request("GET", "/v1/responses/none", None, BEARER)
            assert (status, fields["x-mesh-attempts"]) == (404, "2")
            assert node.request("POST", "/v1/completions", {"prompt": "a"})[1]["x-mesh-attempts"] == "1"
            for backend, key in zip(pair, ("one", "two"), strict=True):
                assert seen(backend, "/v1/responses")[0]["fields"]["authorization"] == f"Bearer {key}"
            body = {"model": "m1", "messages": HI}
            assert node.request("POST", "/v1/messages/count_tokens", body, BEARER)[0] == 200
            ((counted,),) = [f for backend in pair if (f := seen(backend, "/v1/messages"))]
            assert counted["fields"]["x-api-key"] in ("one", "two")
            assert counted["fields"]["authorization"] == f"Bearer {counted['fields']['x-api-key']}"
    finally:
        for backend in pair:
            backend.stop()
