"""One API request as its handler sees it: the parsed body, and readers that refuse what is unusable."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import orjson

from meshd.backend.reply import RequestError
from meshd.backend.text import DEFAULT_LIMIT, Output, answer_to, digest_of, text_of_ids

# ``ignore_eos`` really makes this many words; more would only fill memory.
MAX_FORCED_WORDS: Final = 1_000_000
MAX_CHOICES: Final = 128


def invalid(message: str) -> RequestError:
    return RequestError(400, "invalid_request", message)


@dataclass(frozen=True, slots=True)
class Call:
    """``digest``: hex digits for ids. ``models``: those served. ``has_usage``: false under ``no-usage``."""

    body: dict[str, Any]
    digest: str
    models: tuple[str, ...]
    has_usage: bool = True
    embedding_dimensions: int = 16

    @property
    def wants_stream(self) -> bool:
        return self.body.get("stream") is True

    @property
    def wants_usage_chunk(self) -> bool:
        options = self.body.get("stream_options")
        return self.has_usage and isinstance(options, dict) and options.get("include_usage") is True

    def model(self, *, is_required: bool = False) -> str:
        """Return the model to echo: the one named, or the first served; raises 400 and 404."""
        model = self.body.get("model")
        if model is None:
            if is_required:
                raise invalid("Member 'model' is required.")
            return self.models[0]
        if not isinstance(model, str) or not model.strip():
            raise invalid("Member 'model' must be a non-empty string.")
        if model not in self.models:
            raise RequestError(404, "model_not_found", f"The model '{model[:256]}' is not served here.")
        return model

    def messages(self) -> list[Any]:
        messages = self.body.get("messages")
        if not isinstance(messages, list) or not messages:
            raise invalid("Member 'messages' must be a non-empty array.")
        return messages

    def choices(self) -> int:
        return integer(self.body, "n", 1, low=1, high=MAX_CHOICES)

    def output(self, prompt: str, *limit_names: str) -> Output:
        """Answer ``prompt`` under the first limit that is present among ``limit_names``."""
        return limited_output(prompt, self.body, *limit_names)


def read_body(raw: bytes) -> dict[str, Any]:
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError:
        raise invalid("The body is not valid JSON.") from None
    if not isinstance(body, dict):
        raise invalid("The body must be a JSON object.")
    return body


def make_call(raw: bytes, models: tuple[str, ...], *, has_usage: bool, embedding_dimensions: int) -> Call:
    return Call(read_body(raw), digest_of(raw), models, has_usage, embedding_dimensions)


def limited_output(prompt: str, members: dict[str, Any], *limit_names: str) -> Output:
    limit = next((integer(members, name, 0) for name in limit_names if members.get(name) is not None), None)
    ignores_eos = members.get("ignore_eos") is True
    if ignores_eos and limit is not None and limit > MAX_FORCED_WORDS:
        raise invalid(f"At most {MAX_FORCED_WORDS} tokens can be forced with 'ignore_eos'.")
    return answer_to(prompt, DEFAULT_LIMIT if limit is None else limit, ignores_eos=ignores_eos)


def integer(members: dict[str, Any], name: str, default: int, *, low: int = 0, high: int = 2**63) -> int:
    value = members.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise invalid(f"Member '{name}' must be an integer of at least {low}.")
    return value


def prompt_texts(value: object, name: str) -> list[str]:
    """Return the prompts of a string, strings, ids, or arrays of ids; raises 400 for any other kind."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise invalid(f"Member '{name}' must be a string or a non-empty array.")
    if all(isinstance(item, str) for item in value):
        return list(value)
    if _are_ids(value):
        return [text_of_ids(value)]
    if all(isinstance(item, list) and _are_ids(item) for item in value):
        return [text_of_ids(item) for item in value]
    raise invalid(f"Member '{name}' must hold strings, ids, or arrays of ids.")


def _are_ids(value: list[Any]) -> bool:
    return all(type(item) is int for item in value)
