"""Anthropic Messages and its token counter."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import orjson

from meshd.backend.call import Call
from meshd.backend.reply import Event, Reply, json_reply, stream_reply
from meshd.backend.text import Output, content_text, count_tokens, last_user_text, message_texts


def answer(call: Call) -> Reply:
    messages = call.messages()
    model = call.model(is_required=True)
    output = call.output(last_user_text(messages), "max_tokens")
    input_tokens = _input_tokens(call, messages)
    message: dict[str, Any] = {
        "id": f"msg_{call.digest}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
    }
    words = len(output.words)
    if call.wants_stream:
        return stream_reply(_events(message, output, input_tokens, call.has_usage), words)
    message["content"] = [{"type": "text", "text": output.text}]
    message["stop_reason"] = _stop_reason(output)
    if call.has_usage:
        message["usage"] = _usage(input_tokens, words)
    return json_reply(message, words=words)


def count(call: Call) -> Reply:
    messages = call.messages()
    call.model(is_required=True)
    return json_reply({"input_tokens": _input_tokens(call, messages)})


def _input_tokens(call: Call, messages: list[Any]) -> int:
    return count_tokens([content_text(call.body.get("system")), *message_texts(messages)])


def _usage(input_tokens: int, output_tokens: int) -> dict[str, int]:
    return {
        "input_tokens": input_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": output_tokens,
    }


def _stop_reason(output: Output) -> str:
    return "max_tokens" if output.is_cut else "end_turn"


def _events(message: dict[str, Any], output: Output, input_tokens: int, has_usage: bool) -> Iterator[Event]:
    if has_usage:
        message = message | {"usage": _usage(input_tokens, 0)}
    yield _event("message_start", message=message)
    yield _event("content_block_start", index=0, content_block={"type": "text", "text": ""})
    for piece in output.pieces():
        yield _event("content_block_delta", index=0, delta={"type": "text_delta", "text": piece})
    yield _event("content_block_stop", index=0)
    ending: dict[str, Any] = {"delta": {"stop_reason": _stop_reason(output), "stop_sequence": None}}
    if has_usage:
        ending["usage"] = {"output_tokens": len(output.words)}
    yield _event("message_delta", **ending)
    yield _event("message_stop")


def _event(name: str, **members: Any) -> Event:
    return Event(orjson.dumps({"type": name, **members}), name, is_terminal=name == "message_stop")
