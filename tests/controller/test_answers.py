"""Request ids and error envelopes of the controller's own answers."""

from __future__ import annotations

import re

import orjson
import pytest

from meshd.controller.answers import error_answer, refuse, request_id
from meshd.controller.http_server import Request


def with_id(value: str) -> Request:
    return Request("GET", "/", "", {"x-request-id": value})


def test_id_of_the_request_is_kept() -> None:
    assert request_id(with_id("chatcmpl-1 x")) == "chatcmpl-1 x"


@pytest.mark.parametrize("given", ["", "x" * 257, "tab\tbed", "é"])
def test_unfit_id_is_replaced(given: str) -> None:
    assert re.fullmatch(r"req-[A-Za-z0-9]{24}", request_id(with_id(given)))


def test_error_carries_code_advice_and_the_common_envelope() -> None:
    answer = error_answer(with_id("r1"), "no_workers", "None.")
    headers = dict(answer.headers)
    assert answer.status == 503
    assert headers == {"x-request-id": "r1", "x-mesh-error-code": "no_workers", "retry-after": "5"}
    assert orjson.loads(answer.body) == {
        "error": {"message": "None.", "type": "api_error", "param": None, "code": "no_workers"}
    }


@pytest.mark.parametrize("status", [400, 408, 413, 431, 501, 505])
def test_status_the_server_finds_keeps_its_status(status: int) -> None:
    assert refuse(status, "No.").status == status
