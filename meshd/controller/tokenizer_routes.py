"""The routes ``/v1/tokenizers``: register a tokenizer, see how its load goes, and remove it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any, Final

from meshd.api.dialects import cut_name, error_body
from meshd.api.request_json import parse_body, refuse
from meshd.controller.admin import AdminRoute
from meshd.controller.answers import json_answer, request_id
from meshd.controller.http_server import Request, Response
from meshd.controller.tokenizers import TokenizerKeeper, Wanted
from meshd.prepare.tokenizer_board import MAX_ENTRIES, MAX_TEXT_BYTES, Entry

_NAME: Final = re.compile(r"[A-Za-z0-9._/-]{1,256}")
_MEMBERS: Final = ("name", "source", "chat_template_path", "replace")


class TokenizerRoutes:
    """Answers from the keeper, which loads in the background. ``poll``: brings it up to date."""

    def __init__(self, keeper: TokenizerKeeper, poll: Callable[[], None]) -> None:
        self._keeper = keeper
        self._poll = poll

    def routes(self) -> list[AdminRoute]:
        one = "/v1/tokenizers/{id}"
        return [
            AdminRoute("GET", "/v1/tokenizers", self._list),
            AdminRoute("POST", "/v1/tokenizers", self._register),
            AdminRoute("GET", one, self._show),
            AdminRoute("DELETE", one, self._remove),
            AdminRoute("GET", f"{one}/status", self._status),
        ]

    async def _list(self, request: Request, _: str) -> Response:
        return json_answer(request, {"tokenizers": [_item(entry) for entry in self._keeper.entries]})

    async def _register(self, request: Request, _: str) -> Response:
        members = parse_body(request.body)
        wanted = _wanted(members)
        answer = self._keeper.add(wanted, replaces=members.get("replace", False))
        if answer == "taken":
            message = f"There is a tokenizer named {wanted.name}; replace it with the member replace."
            return _error(request, 409, "tokenizer_exists", message)
        if isinstance(answer, str):
            refuse(f"There may be {MAX_ENTRIES} tokenizers at most.")
        told = {"id": answer.id, "status": answer.status, "message": "The tokenizer will be loaded."}
        return json_answer(request, told, 202)

    async def _show(self, request: Request, id_or_name: str) -> Response:
        self._poll()
        entry = self._keeper.find(id_or_name)
        if entry is None:
            return _not_found(request)
        more = {
            "engine": self._keeper.engine_of(entry),
            "status": entry.status,
            "generation": entry.generation,
        }
        return json_answer(request, _item(entry) | more)

    async def _status(self, request: Request, id_or_name: str) -> Response:
        self._poll()
        entry = self._keeper.find(id_or_name)
        if entry is None:
            return _not_found(request)
        return json_answer(
            request,
            {
                "id": entry.id,
                "status": entry.status,
                "message": entry.message,
                "vocab_size": entry.vocab_size,
            },
        )

    async def _remove(self, request: Request, id_or_name: str) -> Response:
        entry = self._keeper.find(id_or_name)
        if entry is None:
            return _not_found(request)
        self._keeper.remove(entry)
        return json_answer(request, {"success": True, "message": f"The tokenizer {entry.name} was removed."})


def _item(entry: Entry) -> dict[str, Any]:
    return {"id": entry.id, "name": entry.name, "source": entry.source, "vocab_size": entry.vocab_size}


def _wanted(members: Mapping[str, Any]) -> Wanted:
    """Read the body of a registration. Raises ``MeshError`` ``invalid_request``."""
    for member in members:
        if member not in _MEMBERS:
            nearest = get_close_matches(member[:64], _MEMBERS, n=1, cutoff=0)
            refuse(f'There is no member "{cut_name(member)}" here; the nearest is "{nearest[0]}".')
    name, source = members.get("name"), members.get("source")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        refuse('"name" must be 1 to 256 of the characters A-Z a-z 0-9 . _ / -')
    if not isinstance(source, str) or not _is_text(source):
        refuse(f'"source" must be a path or a hub id of at most {MAX_TEXT_BYTES} bytes.')
    template = members.get("chat_template_path")
    if template is not None and not (isinstance(template, str) and _is_text(template)):
        refuse(f'"chat_template_path" must be null or a path of at most {MAX_TEXT_BYTES} bytes.')
    if type(members.get("replace", False)) is not bool:
        refuse('"replace" must be true or false.')
    return Wanted(name, source, template or "")


def _is_text(value: str) -> bool:
    return 0 < len(value.encode()) <= MAX_TEXT_BYTES and "\0" not in value


def _not_found(request: Request) -> Response:
    return _error(request, 404, "tokenizer_not_found", "There is no tokenizer with this id or name.")


def _error(request: Request, status: int, code: str, message: str) -> Response:
    """Answer a code that has another status here than elsewhere, or exists here alone."""
    own_id = request_id(request)
    headers = (("x-request-id", own_id), ("x-mesh-error-code", code))
    return Response(status, error_body("openai", code, status, message, own_id), headers=headers)
