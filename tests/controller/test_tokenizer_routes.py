"""The routes ``/v1/tokenizers``."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import pytest

from meshd.config import Settings
from meshd.controller.admin import AdminRoutes
from meshd.controller.http_server import Request
from meshd.controller.tokenizer_routes import TokenizerRoutes
from meshd.controller.tokenizers import TokenizerKeeper
from meshd.log import Log
from meshd.prepare.tokenizer_board import Loaded, Report, TokenizerBoard

BASE = "/v1/tokenizers"
M1 = {"name": "org/m1", "source": "/models/m1", "chat_template_path": None, "replace": False}


class Controller:
    """The routes over a keeper; its one leader is played by hand."""

    def __init__(self) -> None:
        log = Log("test", "error", stream_fd=-1)
        self.reports = [Report(1)]
        self.keeper = TokenizerKeeper(TokenizerBoard(TokenizerBoard.create(1)), lambda: self.reports, log)
        self.keeper.start(Settings())
        self._routes = AdminRoutes(TokenizerRoutes(self.keeper, self.keeper.poll).routes(), log)

    def ask(self, method: str, path: str, body: Any = None) -> tuple[int, Any, dict[str, str]]:
        data = body if isinstance(body, bytes) else b"" if body is None else orjson.dumps(body)
        answer = asyncio.run(self._routes.handle(Request(method, path, "", {}, data)))
        return answer.status, orjson.loads(answer.body), dict(answer.headers)

    def load(self, serial: int, loaded: Loaded) -> None:
        self.reports[0] = self.reports[0].with_copy(serial, loaded)
        self.keeper.poll()
        self.reports[0] = Report(1, self.reports[0].copies, frozenset({serial}))


@pytest.fixture
def controller() -> Controller:
    return Controller()


def test_a_registration_is_accepted_before_it_is_loaded_and_its_status_can_be_followed(
    controller: Controller,
) -> None:
    status, told, _ = controller.ask("POST", BASE, M1)
    assert (status, list(told), told["status"]) == (202, ["id", "status", "message"], "pending")
    path = f"{BASE}/{told['id']}"
    assert controller.ask("GET", f"{path}/status")[:2] == (
        200,
        {"id": told["id"], "status": "pending", "message": "", "vocab_size": 0},
    )
    controller.load(1, Loaded("loaded", "tokenizers", 152064))
    assert controller.ask("GET", f"{path}/status")[1]["status"] == "completed"
    item = {"id": told["id"], "name": "org/m1", "source": "/models/m1", "vocab_size": 152064}
    assert controller.ask("GET", BASE)[:2] == (200, {"tokenizers": [item]})
    more = {"engine": "tokenizers", "status": "completed", "generation": 1}
    assert controller.ask("GET", path)[:2] == (200, item | more)


def test_a_name_with_a_slash_is_read_and_deleted_and_an_unknown_one_is_404_json(
    controller: Controller,
) -> None:
    controller.ask("POST", BASE, M1)
    status, item, _ = controller.ask("GET", f"{BASE}/org%2Fm1")
    assert (status, item["name"]) == (200, "org/m1")
    status, told, _ = controller.ask("DELETE", f"{BASE}/org%2Fm1")
    assert (status, told["success"], list(told)) == (200, True, ["success", "message"])
    for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/status")):
        status, told, headers = controller.ask(method, f"{BASE}/org%2Fm1{path}")
        assert (status, told["error"]["code"]) == (404, "tokenizer_not_found")
        assert headers["x-mesh-error-code"] == "tokenizer_not_found"
        assert told["error"]["type"] == "not_found_error"


def test_a_taken_name_is_409_and_replaced_when_asked_to(controller: Controller) -> None:
    told = controller.ask("POST", BASE, M1)[1]
    status, refused, headers = controller.ask("POST", BASE, M1)
    assert (status, refused["error"]["code"]) == (409, "tokenizer_exists")
    assert headers["x-mesh-error-code"] == "tokenizer_exists"
    status, again, _ = controller.ask("POST", BASE, M1 | {"replace": True})
    assert (status, again["id"]) == (202, told["id"])


def test_a_failed_load_says_why(controller: Controller) -> None:
    told = controller.ask("POST", BASE, M1)[1]
    controller.load(1, Loaded("failed", message="there is no tokenizer.json at /models/m1"))
    state = controller.ask("GET", f"{BASE}/{told['id']}/status")[1]
    assert (state["status"], state["message"]) == ("failed", "there is no tokenizer.json at /models/m1")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{",
        {"name": "m1"},
        {"source": "/m"},
        {"name": "", "source": "/m"},
        {"name": "m 1", "source": "/m"},
        {"name": "ü", "source": "/m"},
        {"name": "m" * 257, "source": "/m"},
        {"name": "m1", "source": ""},
        {"name": "m1", "source": 1},
        {"name": "m1", "source": "x" * 1025},
        {"name": "m1", "source": "/m", "chat_template_path": 1},
        {"name": "m1", "source": "/m", "replace": 1},
        {"name": "m1", "source": "/m", "replce": True},
    ],
)
def test_a_body_that_is_none_is_400_and_registers_nothing(controller: Controller, body: Any) -> None:
    status, told, _ = controller.ask("POST", BASE, body)
    assert (status, told["error"]["code"]) == (400, "invalid_request")
    assert controller.ask("GET", BASE)[1] == {"tokenizers": []}


def test_an_unknown_member_is_told_its_nearest(controller: Controller) -> None:
    told = controller.ask("POST", BASE, M1 | {"replce": True})[1]
    assert '"replace"' in told["error"]["message"]


def test_a_wrong_method_is_405_with_allow(controller: Controller) -> None:
    status, _, headers = controller.ask("PUT", BASE)
    assert (status, headers["allow"]) == (405, "GET, HEAD, POST")
    assert controller.ask("POST", f"{BASE}/m1")[2]["allow"] == "GET, HEAD, DELETE"
