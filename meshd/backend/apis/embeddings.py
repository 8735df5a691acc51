"""OpenAI Embeddings."""

from __future__ import annotations

from typing import Any, Final

from meshd.backend.call import Call, integer, invalid, prompt_texts
from meshd.backend.reply import Reply, json_reply
from meshd.backend.text import count_tokens
from meshd.backend.vectors import embed, to_base64

MAX_DIMENSIONS: Final = 4096


def answer(call: Call) -> Reply:
    texts = prompt_texts(call.body.get("input"), "input")
    model = call.model()
    dimensions = integer(call.body, "dimensions", call.embedding_dimensions, low=1, high=MAX_DIMENSIONS)
    is_base64 = _is_base64(call)
    data = []
    for index, text in enumerate(texts):
        vector = embed(text, dimensions)
        embedding = to_base64(vector) if is_base64 else vector
        data.append({"object": "embedding", "index": index, "embedding": embedding})
    body: dict[str, Any] = {"object": "list", "data": data, "model": model}
    if call.has_usage:
        tokens = count_tokens(texts)
        body["usage"] = {"prompt_tokens": tokens, "total_tokens": tokens}
    return json_reply(body)


def _is_base64(call: Call) -> bool:
    encoding = call.body.get("encoding_format") or "float"
    if encoding not in ("float", "base64"):
        raise invalid("Member 'encoding_format' must be 'float' or 'base64'.")
    return bool(encoding == "base64")
