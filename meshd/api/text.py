"""The routing text of a request: the prompt as one string, in prompt order, for keys and tokens.

Two requests that share the opening of their prompt share the opening of this text. Members that do not
reach the prompt (sampling, ``tool_choice``) are left out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, Final

import orjson

from meshd.api.endpoints import Endpoint
from meshd.api.request_json import Members


def routing_text(endpoint: Endpoint, members: Members) -> str:
    """Return the text of a valid request; empty if its prompt holds no text."""
    return _TEXTS[endpoint.name](members)


def compact_json(value: Any) -> str:
    """Return ``value`` without white space, members in their order, non-ASCII unescaped."""
    try:
        return orjson.dumps(value).decode()
    except orjson.JSONEncodeError:  # an integer beyond 64 bits, or more than 254 levels
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def text_parts(content: Any) -> Iterator[str]:
    """Yield the texts of a message's content: the string, or the string ``text`` of each part."""
    if type(content) is str:
        yield content
    elif type(content) is list:
        for part in content:
            if type(part) is dict and type(part.get("text")) is str:
                yield part["text"]


def _chat_text(members: Members) -> str:
    pieces: list[str] = []
    for message in members["messages"]:
        if type(message) is dict:
            pieces.extend(text_parts(message.get("content")))
            reasoning = message.get("reasoning_content")
            if type(reasoning) is str:
                pieces.append(reasoning)
    return _joined(pieces)


def _completions_text(members: Members) -> str:
    return _prompt_text(members["prompt"])


def _embeddings_text(members: Members) -> str:
    return _prompt_text(members.get("input"))


def _generate_text(members: Members) -> str:
    text = members.get("text")
    return _prompt_text(members.get("input_ids") if text is None else text)


def _messages_text(members: Members) -> str:
    return _lines(members, ("tools", "system", "messages"))


def _responses_text(members: Members) -> str:
    return _lines(members, ("instructions", "tools", "input"))


_TEXTS: Final[dict[str, Callable[[Members], str]]] = {
    "chat": _chat_text,
    "completions": _completions_text,
    "generate": _generate_text,
    "messages": _messages_text,
    "count_tokens": _messages_text,
    "responses": _responses_text,
    "embeddings": _embeddings_text,
}


def _joined(pieces: list[str]) -> str:
    return " ".join(filter(None, pieces))


def _prompt_text(value: Any) -> str:
    if type(value) is str:
        return value
    pieces: list[str] = []
    for item in value or ():
        if type(item) is str:
            pieces.append(item)
        elif type(item) is int:
            pieces.append(str(item))
        elif type(item) is list:
            pieces.extend(str(inner) for inner in item if type(inner) is int)
    return _joined(pieces)


def _lines(members: Members, names: tuple[str, ...]) -> str:
    lines: list[str] = []
    for name in names:
        value = members.get(name)
        if value is not None and value not in ("", [], {}):
            lines.append(f"{name}={compact_json(value)}")
    return "\n".join(lines)
