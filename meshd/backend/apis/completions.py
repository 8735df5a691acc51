"""OpenAI Completions: one choice for each prompt and each of its ``n``, prompt by prompt."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import orjson

from meshd.backend.apis.openai import envelope, finish_reason, usage
from meshd.backend.call import Call, prompt_texts
from meshd.backend.reply import DONE_EVENT, Event, Reply, json_reply, stream_reply
from meshd.backend.text import Output, count_tokens


def answer(call: Call) -> Reply:
    prompts = prompt_texts(call.body.get("prompt"), "prompt")
    model = call.model()
    copies = call.choices()
    outputs = [output for p in prompts for output in [call.output(p, "max_tokens")] * copies]
    words = sum(len(output.words) for output in outputs)
    numbers = usage(count_tokens(prompts), words)
    head = envelope(f"cmpl-{call.digest}", "text_completion", model)
    if call.wants_stream:
        return stream_reply(_events(head, outputs, numbers if call.wants_usage_chunk else None), words)
    body = head | {"choices": [_choice(i, o.text, o.is_cut) for i, o in enumerate(outputs)]}
    if call.has_usage:
        body["usage"] = numbers
    return json_reply(body, words=words)


def _choice(index: int, text: str, is_cut: bool | None) -> dict[str, Any]:
    finish = None if is_cut is None else finish_reason(is_cut)
    return {"index": index, "text": text, "logprobs": None, "finish_reason": finish}


def _events(
    head: dict[str, Any], outputs: Sequence[Output], numbers: dict[str, Any] | None
) -> Iterator[Event]:
    for index, output in enumerate(outputs):
        for piece in output.pieces():
            yield Event(orjson.dumps({**head, "choices": [_choice(index, piece, None)]}))
        yield Event(orjson.dumps({**head, "choices": [_choice(index, "", output.is_cut)]}))
    if numbers is not None:
        yield Event(orjson.dumps({**head, "choices": [], "usage": numbers}))
    yield DONE_EVENT
