"""Messages in the form that a chat template reads: content as a string or as parts, arguments as objects.

Nothing here changes the client's own objects, and elements that cannot be read are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any, Final

import orjson

from meshd.api.text import compact_json, text_parts

_MEDIA: Final = {
    "image": "image",
    "image_url": "image",
    "input_image": "image",
    "video": "video",
    "video_url": "video",
    "input_video": "video",
    "audio": "audio",
    "audio_url": "audio",
    "input_audio": "audio",
}
_REASONING: Final = ("reasoning_content", "thinking", "reasoning")


class ContentForm(Enum):
    """How a template reads a message's content; ``EITHER`` keeps the form the client chose."""

    TEXT = "text"
    PARTS = "parts"
    EITHER = "either"


def conform(messages: Sequence[Any], form: ContentForm) -> list[dict[str, Any]]:
    """Return the messages as ``form`` asks, one new object each; elements that are no object are left out."""
    return [_conformed(message, form) for message in messages if isinstance(message, dict)]


def mark_final(messages: Sequence[dict[str, Any]], mark: str) -> str | None:
    """Put ``mark`` behind the text that a conversation ends with, and return that text.

    ``messages`` are those of ``conform``. None, and nothing changes, if the last one is not the assistant's
    or has no text.
    """
    last = messages[-1] if messages else {}
    content = last.get("content")
    if last.get("role") != "assistant":
        return None
    if isinstance(content, str):
        last["content"] = content + mark
        return content
    for part in reversed(content) if isinstance(content, list) else ():
        text: str | None = part.get("text")
        if text is not None:
            part["text"] = text + mark
            return text
    return None


def chat_messages(system: Any, messages: Sequence[Any]) -> list[dict[str, Any]]:
    """Return a Messages request as chat messages: the system prompt first, tool blocks as JSON text."""
    chat: list[dict[str, Any]] = []
    system_text = " ".join(filter(None, text_parts(system)))
    if system_text:
        chat.append({"role": "system", "content": system_text})
    chat.extend(
        {"role": message.get("role"), "content": _from_blocks(message.get("content"))}
        for message in messages
        if isinstance(message, dict)
    )
    return chat


def _from_blocks(content: Any) -> Any:
    if not isinstance(content, list):
        return content if isinstance(content, str) else ""
    parts: list[dict[str, Any]] = []
    for block in content:
        if isinstance(block, dict):
            part = _part(block)
            if part is None and "tool_" in str(block.get("type")):  # tool_use, tool_result, …
                part = {"type": "text", "text": compact_json(block)}
            if part is not None:
                parts.append(part)
    if all(part["type"] == "text" for part in parts):
        return " ".join(filter(None, (part["text"] for part in parts)))
    return parts


def _conformed(message: dict[str, Any], form: ContentForm) -> dict[str, Any]:
    copy = dict(message)
    reasoning = next((copy[name] for name in _REASONING if copy.get(name) is not None), None)
    if reasoning is not None:  # clients and templates have three names for it
        copy = {"thinking": reasoning, **copy, "reasoning_content": reasoning}
    content = message.get("content")
    if isinstance(content, list):
        if form is ContentForm.TEXT:
            copy["content"] = " ".join(filter(None, text_parts(content)))
        else:
            parts = (_part(part) for part in content if isinstance(part, dict))
            copy["content"] = [part for part in parts if part is not None]
    elif isinstance(content, str) and form is ContentForm.PARTS:
        copy["content"] = [{"type": "text", "text": content}]
    calls = message.get("tool_calls")
    if isinstance(calls, list) and message.get("role") == "assistant":
        copy["tool_calls"] = [_with_parsed_arguments(call) for call in calls]
    return copy


def _part(part: dict[str, Any]) -> dict[str, Any] | None:
    kind = part.get("type")
    media = _MEDIA.get(kind) if isinstance(kind, str) else None
    if media is not None:
        return {"type": media}
    text = part.get("text")
    return {"type": "text", "text": text} if isinstance(text, str) else None


def _with_parsed_arguments(call: Any) -> Any:
    """Return a tool call whose ``arguments``, a JSON object as text, became that object."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = orjson.loads(function["arguments"])
    except orjson.JSONDecodeError:
        return call
    if not isinstance(arguments, dict):
        return call
    return {**call, "function": {**function, "arguments": arguments}}
