"""OpenAI Chat Completions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import orjson

from meshd.backend.apis.openai import envelope, finish_reason, usage
from meshd.backend.call import Call
from meshd.backend.reply import DONE_EVENT, Event, Reply, json_reply, stream_reply
from meshd.backend.text import Output, count_tokens, last_user_text, message_texts


def answer(call: Call) -> Reply:
    messages = call.messages()
    model = call.model()
    choices = call.choices()
    output = call.output(last_user_text(messages), "max_completion_tokens", "max_tokens")
    words = len(output.words) * choices
    numbers = usage(count_tokens(message_texts(messages)), words)
    identifier = f"chatcmpl-{call.digest}"
    if call.wants_stream:
        head = envelope(identifier, "chat.completion.chunk", model)
        return stream_reply(
            _events(head, output, choices, numbers if call.wants_usage_chunk else None), words
        )
    body = envelope(identifier, "chat.completion", model)
    body["choices"] = [_choice(index, output) for index in range(choices)]
    if call.has_usage:
        body["usage"] = numbers
    return json_reply(body, words=words)


def _choice(index: int, output: Output) -> dict[str, Any]:
    return {
        "index": index,
        "message": {"role": "assistant", "content": output.text, "refusal": None},
        "logprobs": None,
        "finish_reason": finish_reason(output.is_cut),
    }


def _events(
    head: dict[str, Any], output: Output, choices: int, numbers: dict[str, Any] | None
) -> Iterator[Event]:
    for index in range(choices):
        yield _chunk(head, index, {"role": "assistant", "content": ""})
        for piece in output.pieces():
            yield _chunk(head, index, {"content": piece})
        yield _chunk(head, index, {}, finish_reason(output.is_cut))
    if numbers is not None:
        yield Event(orjson.dumps({**head, "choices": [], "usage": numbers}))
    yield DONE_EVENT


def _chunk(head: dict[str, Any], index: int, delta: dict[str, str], finish: str | None = None) -> Event:
    choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}
    return Event(orjson.dumps({**head, "choices": [choice]}))
