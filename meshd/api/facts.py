"""The facts of a request that routing uses: model, stream, batch, logprobs and stored state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from meshd.api.endpoints import Endpoint
from meshd.api.request_json import Members
from meshd.api.view import RoutingView


def read_facts(endpoint: Endpoint, members: Members) -> RoutingView:
    """Return the view of a valid request without text and tokens."""
    facts = RoutingView(members.get("model") or "", members.get("stream") is True)
    read = _FACTS.get(endpoint.name)
    if read is not None:
        read(members, facts)
    return facts


def _chat_facts(members: Members, view: RoutingView) -> None:
    count = members.get("n")
    if type(count) is int and count > 1:
        view.batch_size = count
    view.wants_logprobs = members.get("logprobs") is True


def _completions_facts(members: Members, view: RoutingView) -> None:
    view.batch_size = _count_of_prompts(members["prompt"])
    view.wants_logprobs = members.get("logprobs") is not None


def _generate_facts(members: Members, view: RoutingView) -> None:
    text = members.get("text")
    view.batch_size = _count_of_prompts(members.get("input_ids") if text is None else text)
    view.wants_logprobs = members.get("return_logprob") is True


def _responses_facts(members: Members, view: RoutingView) -> None:
    view.has_state = _has_state(members)
    view.creates_state = view.has_state or members.get("store") is not False


_FACTS: Final[dict[str, Callable[[Members, RoutingView], None]]] = {
    "chat": _chat_facts,
    "completions": _completions_facts,
    "generate": _generate_facts,
    "responses": _responses_facts,
}


def _count_of_prompts(value: Any) -> int:
    """Return how many prompts an array of prompts holds; anything else is one."""
    if type(value) is list and value and type(value[0]) is not int:
        return len(value)
    return 1


def _has_state(members: Members) -> bool:
    if members.get("previous_response_id") is not None or members.get("conversation") is not None:
        return True
    items = members.get("input")
    return type(items) is list and any(map(_is_item_reference, items))


def _is_item_reference(item: Any) -> bool:
    if type(item) is not dict:
        return False
    kind = item.get("type")
    if kind == "item_reference":
        return True
    return kind is None and "id" in item and len(item) == 1 + ("type" in item)
