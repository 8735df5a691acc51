"""SGLang native ``/generate``: a stream repeats the text so far in each event."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import orjson

from meshd.backend.apis.openai import finish_reason
from meshd.backend.call import MAX_CHOICES, Call, integer, invalid, limited_output, prompt_texts
from meshd.backend.reply import DONE_EVENT, Event, Reply, json_reply, stream_reply
from meshd.backend.text import Output, count_tokens


def answer(call: Call) -> Reply:
    prompts, is_batch = _prompts(call.body)
    call.model()
    sampling = call.body.get("sampling_params") or {}
    if not isinstance(sampling, dict):
        raise invalid("Member 'sampling_params' must be an object.")
    copies = integer(sampling, "n", 1, low=1, high=MAX_CHOICES)
    items = []
    for prompt in prompts:
        item = _Item(count_tokens([prompt]), limited_output(prompt, sampling, "max_new_tokens"))
        items += [item] * copies
    identifier = f"gnt-{call.digest}"
    words = sum(len(item.output.words) for item in items)
    is_list = is_batch or copies > 1
    if call.wants_stream:
        return stream_reply(_events(identifier, items, is_list, call.has_usage), words)
    answers = [
        {
            "text": item.output.text,
            "meta_info": item.meta(identifier, i, len(item.output.words), True, call.has_usage),
        }
        for i, item in enumerate(items)
    ]
    return json_reply(answers if is_list else answers[0], words=words)


class _Item:
    """One prompt's answer and its numbers."""

    __slots__ = ("output", "prompt_tokens")

    def __init__(self, prompt_tokens: int, output: Output) -> None:
        self.prompt_tokens = prompt_tokens
        self.output = output

    def meta(self, identifier: str, index: int, words: int, is_last: bool, has_usage: bool) -> dict[str, Any]:
        finish = {"type": finish_reason(self.output.is_cut), "length": words} if is_last else None
        meta: dict[str, Any] = {"id": f"{identifier}-{index}" if index else identifier}
        if has_usage:
            meta |= {
                "prompt_tokens": self.prompt_tokens,
                "completion_tokens": words,
                "cached_tokens": 0,
            }
        return meta | {"finish_reason": finish}


def _prompts(body: dict[str, Any]) -> tuple[list[str], bool]:
    """Return the prompts, and whether the answer is an array of them."""
    text, ids = body.get("text"), body.get("input_ids")
    if text is not None:
        if isinstance(text, list) and not all(isinstance(item, str) for item in text):
            raise invalid("Member 'text' must be a string or an array of strings.")
        return prompt_texts(text, "text"), isinstance(text, list)
    if isinstance(ids, list):
        if any(isinstance(item, str) for item in ids):
            raise invalid("Member 'input_ids' must hold ids or arrays of ids.")
        return prompt_texts(ids, "input_ids"), bool(ids) and isinstance(ids[0], list)
    if isinstance(body.get("input_embeds"), list):
        return [""], False
    raise invalid("One of 'text', 'input_ids' and 'input_embeds' is required.")


def _events(identifier: str, items: Sequence[_Item], is_list: bool, has_usage: bool) -> Iterator[Event]:
    for index, item in enumerate(items):
        text, total = "", len(item.output.words)
        for number, piece in enumerate(item.output.pieces() if total else [""], start=1):
            text += piece
            meta = item.meta(identifier, index, min(number, total), number >= total, has_usage)
            event: dict[str, Any] = {"text": text, "meta_info": meta}
            yield Event(orjson.dumps(event | {"index": index} if is_list else event))
    yield DONE_EVENT
