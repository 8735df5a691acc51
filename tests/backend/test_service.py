import json
from typing import Any

import pytest

from meshd.backend.faults import parse_faults
from meshd.backend.reply import Reply
from meshd.backend.service import Options, Service
from meshd.backend.state import Request

CHAT = "/v1/chat/completions"
HI = {"messages": [{"role": "user", "content": "hi"}]}


def request_of(method: str, path: str, body: Any = None, **headers: str) -> Request:
    fields = tuple((k.replace("_", "-").encode(), v.encode()) for k, v in headers.items())
    return Request(method, path, fields, b"" if body is None else json.dumps(body).encode(), 1)


def ask(service: Service, method: str, path: str, body: Any = None, **headers: str) -> Reply:
    exchange = service.begin(request_of(method, path, body, **headers))
    service.end(exchange, is_aborted=False)
    return exchange.reply


def code_of(reply: Reply) -> str:
    code: str = json.loads(reply.body)["error"]["code"]
    return code


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/health"),
        ("HEAD", "/health"),
        ("GET", "/v1/models"),
        ("GET", "/server_info"),
        ("GET", "/get_server_info"),
        ("GET", "/model_info"),
        ("GET", "/get_model_info"),
        ("GET", "/get_load"),
        ("GET", "/metrics"),
        ("POST", "/flush_cache"),
    ],
)
def test_small_routes_answer_200_and_are_not_counted(method: str, path: str) -> None:
    service = Service(Options())
    assert ask(service, method, path).status == 200
    assert service.stats.served == 0


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, HI),
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/messages", {"model": "meshd-demo", **HI}),
        ("/v1/messages/count_tokens", {"model": "meshd-demo", **HI}),
        ("/v1/responses", {"model": "meshd-demo", "input": "x"}),
        ("/generate", {"text": "x"}),
        ("/v1/embeddings", {"input": "x"}),
    ],
)
def test_each_api_answers_and_is_counted(path: str, body: Any) -> None:
    service = Service(Options())
    assert ask(service, "POST", path, body).status == 200
    assert service.stats.to_dict()["served"] == 1


def test_query_does_not_matter_for_the_path() -> None:
    assert ask(Service(Options()), "POST", CHAT + "?a=b", HI).status == 200


def test_unknown_path_is_404_and_other_method_405_with_allow() -> None:
    service = Service(Options())
    assert code_of(ask(service, "POST", "/v1/score", {})) == "not_found"
    reply = ask(service, "GET", CHAT)
    assert (reply.status, reply.headers) == (405, ((b"allow", b"POST"),))
    assert json.loads(ask(service, "GET", "/v1/messages").body)["type"] == "error"


def test_response_operations_reach_the_kept_response() -> None:
    service = Service(Options())
    made = json.loads(ask(service, "POST", "/v1/responses", {"model": "meshd-demo", "input": "x"}).body)
    base = f"/v1/responses/{made['id']}"
    assert json.loads(ask(service, "GET", base + "?include=a").body) == made
    assert len(json.loads(ask(service, "GET", base + "/input_items").body)["data"]) == 1
    assert json.loads(ask(service, "POST", base + "/cancel").body)["status"] == "cancelled"
    assert ask(service, "PUT", base).headers == ((b"allow", b"GET, DELETE"),)
    assert ask(service, "DELETE", base).status == 200
    assert code_of(ask(service, "GET", base)) == "response_not_found"
    assert code_of(ask(service, "GET", base + "/more")) == "not_found"


def test_key_is_asked_of_all_but_health_metrics_and_control() -> None:
    service = Service(Options(api_key="k1"))
    for method, path in (("POST", CHAT), ("GET", "/v1/models"), ("POST", "/flush_cache")):
        reply = ask(service, method, path, HI)
        assert (reply.status, reply.headers) == (401, ((b"www-authenticate", b"Bearer"),))
    for path in ("/health", "/metrics", "/_backend/stats"):
        assert ask(service, "GET", path).status == 200


@pytest.mark.parametrize("headers", [{"authorization": "bearer k1"}, {"x_api_key": "k1"}])
def test_right_key_is_taken_from_either_field(headers: dict[str, str]) -> None:
    assert ask(Service(Options(api_key="k1")), "POST", CHAT, HI, **headers).status == 200


@pytest.mark.parametrize(
    "headers", [{"authorization": "Bearer k2"}, {"authorization": "k1"}, {"x_api_key": ""}]
)
def test_wrong_key_is_refused(headers: dict[str, str]) -> None:
    assert ask(Service(Options(api_key="k1")), "POST", CHAT, HI, **headers).status == 401


def test_more_than_the_capacity_at_once_is_429_with_retry_after() -> None:
    service = Service(Options(capacity=2))
    running = [service.begin(request_of("POST", CHAT, HI)) for _ in range(2)]
    reply = ask(service, "POST", CHAT, HI)
    assert (reply.status, reply.headers) == (429, ((b"retry-after", b"1"),))
    assert ask(service, "GET", "/v1/models").status == 200
    service.end(running[0], is_aborted=True)
    assert ask(service, "POST", CHAT, HI).status == 200
    stats = service.stats
    assert (stats.active, stats.max_active, stats.aborted, stats.served) == (1, 2, 1, 2)


def test_standing_faults_act_on_traffic_but_not_on_background_questions() -> None:
    service = Service(Options(faults=parse_faults("status=500,times=2")))
    assert ask(service, "GET", "/health").status == ask(service, "GET", "/v1/models").status == 200
    assert ask(service, "POST", "/flush_cache").status == 500
    assert ask(service, "POST", CHAT, HI).status == 500
    assert ask(service, "POST", CHAT, HI).status == 200


def test_fault_header_replaces_the_standing_faults_of_its_request() -> None:
    service = Service(Options(faults=parse_faults("status=500")))
    assert ask(service, "POST", CHAT, HI, x_backend_fault="status=418").status == 418
    assert ask(service, "POST", CHAT, HI, x_backend_fault="").status == 200
    assert ask(service, "GET", "/health", x_backend_fault="status=418").status == 418
    assert ask(service, "POST", CHAT, HI).status == 500


def test_times_of_a_fault_header_counts_the_attempts_of_one_request_id() -> None:
    service = Service(Options())
    fault = {"x_backend_fault": "status=503,times=1"}
    assert ask(service, "POST", CHAT, HI, x_request_id="a", **fault).status == 503
    assert ask(service, "POST", CHAT, HI, x_request_id="b", **fault).status == 503
    assert ask(service, "POST", CHAT, HI, x_request_id="a", **fault).status == 200


def test_unreadable_fault_header_is_a_400() -> None:
    assert ask(Service(Options()), "POST", CHAT, HI, x_backend_fault="nope").status == 400


def test_fault_without_usage_reaches_the_api() -> None:
    reply = ask(Service(Options()), "POST", CHAT, HI, x_backend_fault="no-usage")
    assert "usage" not in json.loads(reply.body)


def test_token_delay_of_a_fault_replaces_that_of_the_flag() -> None:
    service = Service(Options(token_delay_s=0.5, first_token_delay_s=2.0))
    exchange = service.begin(request_of("POST", CHAT, HI))
    assert (exchange.token_delay_s, exchange.first_token_delay_s) == (0.5, 2.0)
    exchange = service.begin(request_of("POST", CHAT, HI, x_backend_fault="token-delay-ms=0"))
    assert exchange.token_delay_s == 0.0


def test_requests_are_logged_but_control_routes_are_not() -> None:
    service = Service(Options())
    ask(service, "POST", CHAT, HI)
    ask(service, "GET", "/nowhere")
    ask(service, "GET", "/_backend/stats")
    assert [item["target"] for item in service.log.to_list()] == [CHAT, "/nowhere"]
