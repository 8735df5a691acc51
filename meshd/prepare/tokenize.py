"""Tokenize and detokenize: a body to the finished body of its answer.

    json_parse   strict JSON and validation
    encode       texts to ids, or
    decode       ids to texts
    view         the answer as JSON

Encoding adds no special tokens. Pure, like ``build``; the limits are those of any text to tokenize.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Protocol

import orjson

from meshd.api.endpoints import Endpoint
from meshd.api.prefix_key import TOKEN_ID_MAX
from meshd.api.request_json import Members, refuse
from meshd.api.validation import read_request
from meshd.errors import MeshError
from meshd.prepare.stopwatch import DECODE, ENCODE, VIEW, Stopped, Stopwatch
from meshd.prepare.tokenizer import DecodeFailed, EncodeFailed

_IDS_A_BYTE: Final = 4  # of the limit in bytes, this part is the limit in ids


class Tokenizer(Protocol):
    """What is used of a loaded tokenizer."""

    def encode(self, text: str) -> list[int]: ...
    def decode(self, ids: list[int], skip_special_tokens: bool) -> str: ...


class Tokenizers(Protocol):
    """Where tokenizers are looked up."""

    def find(self, model: str) -> Tokenizer | None: ...
    def first(self) -> Tokenizer | None: ...


class TokenizerAnswers:
    """Answers the two endpoints in one prepare worker. ``tokenizers``: ``None`` if the node has none."""

    def __init__(self, tokenizers: Tokenizers | None, max_tokenize_bytes: int, watch: Stopwatch) -> None:
        self._tokenizers = tokenizers
        self._max_bytes = max_tokenize_bytes
        self._watch = watch

    def answer(
        self, endpoint: Endpoint, body: memoryview | bytes, should_stop: Callable[[], bool]
    ) -> tuple[str, bytes]:
        """Return the model that ``body`` names, and the answer.

        Raises ``MeshError`` for a request that is refused, ``Stopped`` if ``should_stop`` says so
        before any of its texts.
        """
        self._watch.start()
        members = read_request(endpoint, body)
        model: str = members.get("model") or ""
        tokenizer = self._find(model)
        if endpoint.name == "tokenize":
            answer = self._tokenize(tokenizer, members["prompt"], should_stop)
        else:
            answer = self._detokenize(tokenizer, members, should_stop)
        return model, orjson.dumps(answer)

    def _find(self, model: str) -> Tokenizer:
        tokenizers = self._tokenizers
        found = None
        if tokenizers is not None:
            found = tokenizers.find(model)
            if found is None and model in ("", "unknown"):
                found = tokenizers.first()
        if found is None:
            raise MeshError("tokenizer_not_found", "There is no tokenizer for this model.")
        return found

    def _tokenize(
        self, tokenizer: Tokenizer, prompt: str | list[str], should_stop: Callable[[], bool]
    ) -> dict[str, Any]:
        prompts = [prompt] if isinstance(prompt, str) else prompt
        self._check_bytes(prompts)
        self._watch.enter(ENCODE)
        ids = [_encoded(tokenizer, text, should_stop) for text in prompts]
        self._watch.enter(VIEW)
        if isinstance(prompt, str):
            return {"tokens": ids[0], "count": len(ids[0]), "char_count": len(prompt)}
        return {"tokens": ids, "count": [*map(len, ids)], "char_count": [*map(len, prompts)]}

    def _detokenize(
        self, tokenizer: Tokenizer, members: Members, should_stop: Callable[[], bool]
    ) -> dict[str, Any]:
        tokens = members["tokens"]
        is_batch = bool(tokens) and type(tokens[0]) is list
        lists: list[list[int]] = tokens if is_batch else [tokens]
        skips_special = members.get("skip_special_tokens") is not False
        self._check_ids(lists)
        self._watch.enter(DECODE)
        texts = [_decoded(tokenizer, ids, skips_special, should_stop) for ids in lists]
        self._watch.enter(VIEW)
        return {"text": texts if is_batch else texts[0]}

    def _check_bytes(self, prompts: list[str]) -> None:
        # A character is one to four bytes, so most prompts need no encoding to be counted.
        limit = self._max_bytes
        characters = sum(map(len, prompts))
        if characters * 4 > limit and (characters > limit or _bytes_of(prompts) > limit):
            raise MeshError(
                "tokenizer_input_too_large", f"The text to tokenize is longer than {limit} bytes."
            )

    def _check_ids(self, lists: list[list[int]]) -> None:
        most = self._max_bytes // _IDS_A_BYTE
        if sum(map(len, lists)) > most:
            raise MeshError("tokenizer_input_too_large", f"There are more than {most} token ids.")
        for ids in lists:
            if ids and (min(ids) < 0 or max(ids) > TOKEN_ID_MAX):
                refuse(f'The ids of the member "tokens" must be integers from 0 to {TOKEN_ID_MAX}.')

    def __repr__(self) -> str:
        return f"TokenizerAnswers({self._tokenizers!r}, max_bytes={self._max_bytes})"


def _bytes_of(texts: list[str]) -> int:
    return sum([len(text.encode()) for text in texts])


def _encoded(tokenizer: Tokenizer, text: str, should_stop: Callable[[], bool]) -> list[int]:
    if should_stop():
        raise Stopped
    try:
        return tokenizer.encode(text) if text else []
    except EncodeFailed as error:
        raise MeshError("tokenization_error", "The text cannot be tokenized.", cause=str(error)) from error


def _decoded(
    tokenizer: Tokenizer, ids: list[int], skips_special: bool, should_stop: Callable[[], bool]
) -> str:
    if should_stop():
        raise Stopped
    try:
        return tokenizer.decode(ids, skips_special) if ids else ""
    except DecodeFailed as error:
        raise MeshError(
            "detokenization_error", "The token ids cannot be turned into text.", cause=str(error)
        ) from error
