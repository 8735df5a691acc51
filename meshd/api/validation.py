"""What meshd asks of a valid request: only what routing needs; the rest is the upstream's business.

``null`` counts as absent unless a check says otherwise. A JSON boolean is not an integer. Every failure
is a ``MeshError`` ``invalid_request`` that names the member.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

from meshd.api.endpoints import Endpoint
from meshd.api.long_json import LONG_BYTES, LongReader
from meshd.api.request_json import Members, parse_body, parse_exactly, refuse

_EXACT: Final = 2**63
"""Integers of at least this size may come out of ``parse_body`` as floats."""


def read_request(
    endpoint: Endpoint,
    body: memoryview | bytes,
    long_reader: LongReader | None = None,
    *,
    reads_text: bool = True,
) -> Members:
    """Return the members of a body that is valid for ``endpoint``, which must have a prepare job.

    ``reads_text``: without it, the members of a long body may be stand-ins (``LongReader.skim``).
    """
    members: Members | None = None
    if long_reader is not None and len(body) >= LONG_BYTES:
        members = long_reader.read(body) if reads_text else long_reader.skim(body)
    if members is None:
        members = parse_body(body)
    return check_request(endpoint, body, members)


def check_request(endpoint: Endpoint, body: memoryview | bytes, members: Members) -> Members:
    """Return the ``members`` of ``body`` if they are valid, read once more if that takes exact integers."""
    check = _CHECKS[endpoint.name]
    try:
        check(members)
    except _GiantNumber as giant:
        members = parse_exactly(body)
        try:
            check(members)
        except _GiantNumber:
            if giant.refusal:
                refuse(giant.refusal)
    return members


class _GiantNumber(Exception):
    """A float stands where an integer is asked for, and it may have been a giant integer.

    ``refusal``: what to answer if it was a float after all; empty if a float is nothing to refuse.
    """

    def __init__(self, refusal: str) -> None:
        super().__init__(refusal)
        self.refusal = refusal


def _check_chat(members: Members) -> None:
    _check_messages_member(members)
    _check_model(members)
    _check_stream(members)
    count = members.get("n")
    if type(count) is float and abs(count) >= _EXACT:
        raise _GiantNumber("")


def _check_completions(members: Members) -> None:
    if "prompt" not in members:
        refuse('The member "prompt" is missing.')
    prompt = members["prompt"]
    if type(prompt) is not str:
        _check_texts_or_ids(
            prompt,
            'The member "prompt" must be a string, an array of strings, an array of integers or an array'
            " of arrays of integers.",
        )
    _check_model(members)
    _check_stream(members)


def _check_generate(members: Members) -> None:
    if members.get("model") is not None:
        _check_model(members)
    text = members.get("text")
    if type(text) is not str and text is not None and not (type(text) is list and _types(text) <= {str}):
        refuse('The member "text" must be a string or an array of strings.')
    input_ids = members.get("input_ids")
    if input_ids is not None:
        _check_ids(input_ids, 'The member "input_ids" must be an array of integers or of arrays of integers.')
    embeds = members.get("input_embeds")
    if embeds is not None and type(embeds) is not list:
        refuse('The member "input_embeds" must be an array.')
    _check_stream(members)


def _check_messages(members: Members) -> None:
    _require_model(members)
    _check_messages_member(members)
    _check_stream(members)


def _check_responses(members: Members) -> None:
    _require_model(members)
    _check_input(members)
    previous = members.get("previous_response_id")
    if previous is not None and not _is_text(previous):
        refuse('The member "previous_response_id" must be a non-empty string.')
    conversation = members.get("conversation")
    if conversation is not None:
        reference = conversation.get("id") if type(conversation) is dict else conversation
        if not _is_text(reference):
            refuse(
                'The member "conversation" must be a non-empty string, or an object whose "id" is a'
                " non-empty string."
            )
        if previous is not None:
            refuse('The members "previous_response_id" and "conversation" exclude each other.')
    _check_boolean(members, "store")
    _check_boolean(members, "background")
    _check_stream(members)


def _check_embeddings(members: Members) -> None:
    _check_model(members)
    _check_input(members)
    _check_stream(members)
    value = members.get("input")
    if type(value) is list and _has_giant(value[0] if value and type(value[0]) is list else value):
        raise _GiantNumber("")


def _check_tokenize(members: Members) -> None:
    if "prompt" not in members:
        refuse('The member "prompt" is missing.')
    prompt = members["prompt"]
    if type(prompt) is not str and not (type(prompt) is list and _types(prompt) <= {str}):
        refuse('The member "prompt" must be a string or an array of strings.')
    _check_name(members)


def _check_detokenize(members: Members) -> None:
    if "tokens" not in members:
        refuse('The member "tokens" is missing.')
    _check_ids(
        members["tokens"], 'The member "tokens" must be an array of integers or of arrays of integers.'
    )
    _check_name(members)
    _check_boolean(members, "skip_special_tokens")


_CHECKS: Final[dict[str, Callable[[Members], None]]] = {
    "chat": _check_chat,
    "completions": _check_completions,
    "generate": _check_generate,
    "messages": _check_messages,
    "count_tokens": _check_messages,
    "responses": _check_responses,
    "embeddings": _check_embeddings,
    "tokenize": _check_tokenize,
    "detokenize": _check_detokenize,
}


def _check_model(members: Members) -> None:
    if "model" in members:
        _require_model(members)


def _require_model(members: Members) -> None:
    model = members.get("model")
    if type(model) is not str or not model or model.isspace():
        if "model" not in members:
            refuse('The member "model" is missing.')
        refuse('The member "model" must be a string that is not blank.')


def _check_name(members: Members) -> None:
    """Check the model of an endpoint for which any name will do, an empty one too."""
    model = members.get("model")
    if type(model) is not str and model is not None:
        refuse('The member "model" must be a string.')


def _check_messages_member(members: Members) -> None:
    messages = members.get("messages")
    if type(messages) is not list or not messages:
        if "messages" not in members:
            refuse('The member "messages" is missing.')
        refuse('The member "messages" must be a non-empty array.')


def _check_input(members: Members) -> None:
    value = members.get("input")
    if type(value) is not str and value is not None and type(value) is not list:
        refuse('The member "input" must be a string or an array.')


def _check_stream(members: Members) -> None:
    _check_boolean(members, "stream")


def _check_boolean(members: Members, name: str) -> None:
    value = members.get(name)
    if type(value) is not bool and value is not None:
        refuse(f'The member "{name}" must be a boolean.')


def _is_text(value: object) -> bool:
    return type(value) is str and value != ""


def _types(values: Iterable[object]) -> set[type]:
    # 10 µs for 1000 elements, a tenth of a loop that tests each.
    return set(map(type, values))


def _check_texts_or_ids(value: object, refusal: str) -> None:
    if type(value) is list and _types(value) == {str}:
        return
    _check_ids(value, refusal)


def _check_ids(value: object, refusal: str) -> None:
    """Refuse what is not an array of integers or an array of arrays of integers; a boolean is none."""
    if type(value) is not list:
        refuse(refusal)
    if _types(value) == {list}:
        for inner in value:
            _check_integers(inner, refusal)
    else:
        _check_integers(value, refusal)


def _check_integers(values: list[Any], refusal: str) -> None:
    kinds = _types(values)
    if kinds <= {int}:
        return
    if kinds <= {int, float} and _has_giant(values):
        raise _GiantNumber(refusal)
    refuse(refusal)


def _has_giant(values: list[Any]) -> bool:
    """Whether a float among ``values`` may be an integer beyond 64 bits."""
    return float in _types(values) and any(type(v) is float and abs(v) >= _EXACT for v in values)
