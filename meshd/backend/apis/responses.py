"""OpenAI Responses: one message item, and operations on the responses kept by this process."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, Final

import orjson

from meshd.backend.apis.openai import CREATED
from meshd.backend.call import Call, invalid
from meshd.backend.reply import Event, Reply, RequestError, json_reply, stream_reply
from meshd.backend.text import Output, content_text, count_tokens, last_user_text, message_texts

KEPT_RESPONSES: Final = 1000


class ResponseStore:
    """The last responses whose ``store`` was not false, with the items they answered."""

    def __init__(self, capacity: int = KEPT_RESPONSES) -> None:
        self._capacity = capacity
        self._kept: OrderedDict[str, tuple[dict[str, Any], list[Any]]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, response: dict[str, Any], items: list[Any]) -> None:
        self._kept[response["id"]] = (response, items)
        self._kept.move_to_end(response["id"])
        if len(self._kept) > self._capacity:
            self._kept.popitem(last=False)

    def get(self, identifier: str) -> Reply:
        return json_reply(self._find(identifier)[0])

    def delete(self, identifier: str) -> Reply:
        self._find(identifier)
        del self._kept[identifier]
        return json_reply({"id": identifier, "object": "response", "deleted": True})

    def cancel(self, identifier: str) -> Reply:
        response, items = self._find(identifier)
        cancelled = response | {"status": "cancelled"}
        self._kept[identifier] = (cancelled, items)
        return json_reply(cancelled)

    def input_items(self, identifier: str) -> Reply:
        items = self._find(identifier)[1]
        ids = [item["id"] for item in items]
        body = {"object": "list", "data": items, "has_more": False}
        return json_reply(body | {"first_id": ids[0] if ids else None, "last_id": ids[-1] if ids else None})

    def _find(self, identifier: str) -> tuple[dict[str, Any], list[Any]]:
        kept = self._kept.get(identifier)
        if kept is None:
            raise RequestError(404, "response_not_found", f"No response '{identifier[:256]}' is kept here.")
        return kept


def answer(call: Call, store: ResponseStore) -> Reply:
    model = call.model(is_required=True)
    items = _input(call.body)
    output = call.output(last_user_text(items), "max_output_tokens")
    texts = [content_text(call.body.get("instructions")), *message_texts(items)]
    response = _response(call, model, output, count_tokens(texts))
    if call.body.get("store") is not False:
        store.keep(response, _with_ids(items, call.digest))
    words = len(output.words)
    if call.wants_stream:
        return stream_reply(_numbered(_events(response, output)), words)
    return json_reply(response, words=words)


def _input(body: dict[str, Any]) -> list[Any]:
    value = body.get("input")
    if value is None:
        return []
    if isinstance(value, str):
        content = [{"type": "input_text", "text": value}]
        return [{"type": "message", "role": "user", "content": content}]
    if isinstance(value, list):
        return value
    raise invalid("Member 'input' must be a string or an array.")


def _with_ids(items: list[Any], digest: str) -> list[Any]:
    objects = (item if isinstance(item, dict) else {"type": "unknown"} for item in items)
    return [{"id": f"item_{digest}_{number}", **item} for number, item in enumerate(objects)]


def _response(call: Call, model: str, output: Output, input_tokens: int) -> dict[str, Any]:
    body, words = call.body, len(output.words)
    response: dict[str, Any] = {
        "id": f"resp_{call.digest}",
        "object": "response",
        "created_at": CREATED,
        "status": "incomplete" if output.is_cut else "completed",
        "background": body.get("background") is True,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if output.is_cut else None,
        "instructions": body.get("instructions"),
        "max_output_tokens": body.get("max_output_tokens"),
        "metadata": body.get("metadata") or {},
        "model": model,
        "output": [_item(call.digest, output)],
        "parallel_tool_calls": True,
        "previous_response_id": body.get("previous_response_id"),
        "store": body.get("store") is not False,
        "temperature": 1.0,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "top_p": 1.0,
        "truncation": "disabled",
        "usage": None,
    }
    if call.has_usage:
        response["usage"] = {
            "input_tokens": input_tokens,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": words,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": input_tokens + words,
        }
    return response


def _item(digest: str, output: Output) -> dict[str, Any]:
    return {
        "id": f"msg_{digest}",
        "type": "message",
        "status": "incomplete" if output.is_cut else "completed",
        "role": "assistant",
        "content": [_part(output.text)],
    }


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _events(response: dict[str, Any], output: Output) -> Iterator[tuple[str, dict[str, Any]]]:
    item = response["output"][0]
    started: dict[str, Any] = {
        "status": "in_progress",
        "output": [],
        "usage": None,
        "incomplete_details": None,
    }
    yield "response.created", {"response": response | started}
    opened = item | {"status": "in_progress", "content": []}
    yield "response.output_item.added", {"output_index": 0, "item": opened}
    place = {"item_id": item["id"], "output_index": 0, "content_index": 0}
    yield "response.content_part.added", {**place, "part": _part("")}
    for piece in output.pieces():
        yield "response.output_text.delta", {**place, "delta": piece, "logprobs": []}
    yield "response.output_text.done", {**place, "text": output.text, "logprobs": []}
    yield "response.content_part.done", {**place, "part": _part(output.text)}
    yield "response.output_item.done", {"output_index": 0, "item": item}
    yield f"response.{response['status']}", {"response": response}


def _numbered(events: Iterator[tuple[str, dict[str, Any]]]) -> Iterator[Event]:
    for number, (name, members) in enumerate(events):
        data = orjson.dumps({"type": name, "sequence_number": number, **members})
        is_terminal = name in ("response.completed", "response.incomplete")
        yield Event(data, name, is_terminal)
