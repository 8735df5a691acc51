import json
from typing import Any

import pytest

from meshd.backend.service import Options, Service
from meshd.backend.state import Request


def control(service: Service, method: str, path: str, body: bytes = b"") -> tuple[int, Any]:
    reply = service.begin(Request(method, f"/_backend/{path}", (), body, 1)).reply
    return reply.status, json.loads(reply.body)


@pytest.mark.parametrize(
    "body", [b"status=503,times=4", b'"status=503,times=4"', b'{"fault":"status=503,times=4"}']
)
def test_fault_is_set_from_text_or_json_and_cleared_by_an_empty_body(body: bytes) -> None:
    service = Service(Options())
    assert control(service, "PUT", "fault", body) == (200, {"fault": "status=503,times=4"})
    assert service.standing_faults.take().status == 503
    assert control(service, "PUT", "fault")[0] == 200
    assert service.standing_faults.take().status is None


@pytest.mark.parametrize("body", [b"nope", b"{", b'{"fault":7}'])
def test_wrong_fault_is_a_400_and_changes_nothing(body: bytes) -> None:
    service = Service(Options())
    control(service, "PUT", "fault", b"close")
    assert control(service, "PUT", "fault", body)[0] == 400
    assert service.standing_faults.take().close


def test_health_status_is_set() -> None:
    service = Service(Options())
    assert control(service, "PUT", "health", b'{"status":503}') == (200, {"status": 503})
    assert service.begin(Request("GET", "/health", (), b"", 1)).reply.status == 503


@pytest.mark.parametrize("body", [b"", b"503", b'{"status":"x"}', b'{"status":700}', b'{"status":true}'])
def test_wrong_health_status_is_a_400(body: bytes) -> None:
    service = Service(Options())
    assert control(service, "PUT", "health", body)[0] == 400
    assert service.health_status == 200


def test_requests_are_listed_and_cleared() -> None:
    service = Service(Options())
    service.begin(Request("GET", "/health", ((b"A", b"b"),), b"", 7))
    listed = [{"method": "GET", "target": "/health", "headers": [["A", "b"]], "body": "", "connection": 7}]
    assert control(service, "GET", "requests") == (200, listed)
    assert control(service, "DELETE", "requests") == (200, {"cleared": 1})
    assert control(service, "GET", "requests") == (200, [])


def test_stats_have_the_counters() -> None:
    status, stats = control(Service(Options()), "GET", "stats")
    assert status == 200
    assert {"served", "active", "max_active", "aborted", "connections"} <= set(stats)


@pytest.mark.parametrize(("method", "path"), [("GET", "nothing"), ("POST", "stats"), ("GET", "fault")])
def test_other_routes_and_methods_are_404(method: str, path: str) -> None:
    assert control(Service(Options()), method, path)[0] == 404
