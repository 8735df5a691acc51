"""How an admin route is found and answered."""

from __future__ import annotations

import asyncio
import os

import orjson
import pytest

from meshd.controller.admin import AdminRoute, AdminRoutes
from meshd.controller.answers import json_answer
from meshd.controller.http_server import Request, Response
from meshd.errors import MeshError
from meshd.log import Log
from tests.fakes.admin import ask


async def echo(request: Request, segment: str) -> Response:
    return json_answer(request, {"method": request.method, "segment": segment})


async def refuse(request: Request, segment: str) -> Response:
    raise MeshError("no_workers", "No server is registered.")


async def fail(request: Request, segment: str) -> Response:
    raise RuntimeError("a secret detail")


ROUTES = [
    AdminRoute("GET", "/things", echo),
    AdminRoute("POST", "/things", echo),
    AdminRoute("GET", "/things/{id}", echo),
    AdminRoute("GET", "/things/{id}/status", echo),
    AdminRoute("GET", "/workers", echo),
    AdminRoute("GET", "/refused", refuse),
    AdminRoute("GET", "/broken", fail),
    AdminRoute("GET", "/workers/broken", fail),
]


@pytest.mark.parametrize(
    ("path", "segment"),
    [
        ("/things", ""),
        ("/things/a", "a"),
        ("/things/a%2Fb%20c", "a/b c"),
        ("/things/a%2Fb/status", "a/b"),
        ("/things/status", "status"),
        ("/things/{id}", "{id}"),
    ],
)
def test_row_gets_what_its_placeholder_stands_for(path: str, segment: str) -> None:
    assert orjson.loads(ask(ROUTES, "GET", path).body)["segment"] == segment


def test_get_rows_answer_head_too() -> None:
    assert ask(ROUTES, "HEAD", "/things").status == 200


@pytest.mark.parametrize("path", ["/", "/thing", "/things/", "/things/a/b", "/things/a/b/c"])
def test_other_paths_are_404_json(path: str) -> None:
    answer = ask(ROUTES, "GET", path)
    assert answer.status == 404
    assert orjson.loads(answer.body)["error"]["code"] == "not_found"


@pytest.mark.parametrize(("path", "allow"), [("/things", "GET, HEAD, POST"), ("/workers", "GET, HEAD")])
def test_other_methods_are_405_with_allow_in_the_common_envelope(path: str, allow: str) -> None:
    answer = ask(ROUTES, "DELETE", path)
    assert (answer.status, dict(answer.headers)["allow"]) == (405, allow)
    assert orjson.loads(answer.body)["error"]["code"] == "method_not_allowed"


def test_error_of_a_row_is_answered_with_its_code_and_retry_after() -> None:
    answer = ask(ROUTES, "GET", "/refused")
    assert (answer.status, dict(answer.headers)["retry-after"]) == (503, "5")
    assert dict(answer.headers)["x-mesh-error-code"] == "no_workers"


def test_fault_of_a_row_is_a_500_without_its_words_in_the_envelope_of_the_path() -> None:
    answer = ask(ROUTES, "GET", "/broken")
    assert answer.status == 500
    assert b"secret" not in answer.body
    assert orjson.loads(answer.body)["error"]["code"] == "internal_error"
    answer = ask(ROUTES, "GET", "/workers/broken")
    assert answer.status == 500
    assert orjson.loads(answer.body) == {
        "error": "Something went wrong here.",
        "code": "INTERNAL_SERVER_ERROR",
    }


def test_fault_of_a_row_is_logged_with_its_traceback() -> None:
    log_fd = os.memfd_create("log")
    log = Log("test", is_json=True, stream_fd=log_fd)
    asyncio.run(AdminRoutes(ROUTES, log).handle(Request("GET", "/broken", "", {})))
    line = orjson.loads(os.pread(log_fd, 65536, 0))
    assert (line["level"], line["event"]) == ("error", "internal_error")
    assert "in fail" in line["trace"]
