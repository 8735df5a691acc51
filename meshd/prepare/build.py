"""A body to its routing view: the whole work of a prepare job, in stages.

    json_parse   strict JSON and validation; always
    view         facts, always; routing text, prefix key and rank-free body as they are needed
    template     chat messages to the model's prompt; only when tokens are needed
    encode       text to token ids; only when tokens are needed

Pure: no socket, no event loop; the clock and the stop question come from outside.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any, Final, NoReturn

from meshd.api.block_keys import TEXT_BYTES_MAX, block_keys
from meshd.api.endpoints import Endpoint
from meshd.api.facts import read_facts
from meshd.api.long_json import LONG_BYTES, Opening, open_long_reader
from meshd.api.prefix_key import TOKEN_ID_MAX, key_position, pack_token_ids, prefix_key
from meshd.api.rank_body import find_rank_free
from meshd.api.request_json import Members, refuse
from meshd.api.text import routing_text
from meshd.api.validation import check_request, read_request
from meshd.api.view import NEEDS_RANK_FREE, NEEDS_TEXT, NEEDS_TOKENS, RoutingView
from meshd.errors import MeshError
from meshd.prepare.chat_messages import chat_messages
from meshd.prepare.chat_template import ChatRequest, ChatTemplate, OutputTooLong, TemplateRefusal
from meshd.prepare.prefix_tokens import FIRST_BYTES_PER_ID
from meshd.prepare.stopwatch import ENCODE, JSON_PARSE, TEMPLATE, VIEW, Stopped, Stopwatch
from meshd.prepare.tokenize import TokenizerAnswers
from meshd.prepare.tokenizer import EncodeFailed, LoadedTokenizer
from meshd.prepare.tokenizer_set import TokenizerSet

NO_TEMPLATE: Final = "no_chat_template"
"""Reason reported to ``on_fallback``; those of tokenizers are in ``tokenizer_events``."""

__all__ = ["NO_TEMPLATE", "Stopped", "ViewBuilder"]

_CHAT_LIKE: Final = frozenset(("chat", "messages", "count_tokens"))
_TEXT_MEMBERS: Final = {"completions": "prompt", "generate": "text", "embeddings": "input"}
"""Members that are the text to tokenize, if they are a string."""
_OPENING_BYTES_PER_ID: Final = FIRST_BYTES_PER_ID + 2  # as it is written; decoding more would cost more


class ViewBuilder:
    """Builds the views of one prepare worker.

    ``tokenizers``: ``None`` if the node has none. ``clock``: monotonic nanoseconds.
    ``on_fallback``: told the reason when something slower or coarser was used instead.
    ``answers``: for the endpoints that are answered here. ``watch`` times all stages, one job at a time,
    until it is stopped.
    """

    def __init__(
        self,
        tokenizers: TokenizerSet | None,
        prefix_token_count: int,
        max_tokenize_bytes: int,
        *,
        clock: Callable[[], int],
        on_fallback: Callable[[str], None] | None = None,
    ) -> None:
        self._tokenizers = tokenizers
        self._prefix_token_count = prefix_token_count
        self._max_tokenize_bytes = max_tokenize_bytes
        self._on_fallback = on_fallback
        self._long_reader = open_long_reader()
        self.watch = Stopwatch(clock)
        self.answers = TokenizerAnswers(tokenizers, max_tokenize_bytes, self.watch)

    def build(
        self,
        endpoint: Endpoint,
        needs: int,
        body: memoryview | bytes,
        should_stop: Callable[[], bool] | None = None,
    ) -> RoutingView:
        """Return the view of ``body``, which is not kept.

        Raises ``MeshError`` for a request that is refused, ``Stopped`` if ``should_stop`` says so
        between two stages.
        """
        watch = self.watch
        watch.start()
        asked = needs & (NEEDS_TEXT | NEEDS_TOKENS)
        view = None
        if asked == NEEDS_TOKENS and len(body) >= LONG_BYTES:
            view = self._build_by_opening(endpoint, needs, body, should_stop)
        if view is None:
            members = read_request(endpoint, body, self._long_reader, reads_text=asked != 0)
            view = self._view_of(endpoint, needs, body, members, None, should_stop)
        return view

    def _build_by_opening(
        self,
        endpoint: Endpoint,
        needs: int,
        body: memoryview | bytes,
        should_stop: Callable[[], bool] | None,
    ) -> RoutingView | None:
        """Return the view of a long body that is most of all one text, of which only the opening is read.

        ``None`` if it is no such body, or if more of its text is needed.
        """
        reader = self._long_reader
        name = _TEXT_MEMBERS.get(endpoint.name)
        if reader is None or name is None or len(body) > self._max_tokenize_bytes:
            return None
        opening = reader.open_text(body, name, _OPENING_BYTES_PER_ID * self._prefix_token_count)
        if opening is None:
            return None
        members = check_request(endpoint, body, opening.members)
        try:
            return self._view_of(endpoint, needs, body, members, opening, should_stop)
        except _OpeningTooShort:
            self.watch.enter(JSON_PARSE)
            return None

    def _view_of(
        self,
        endpoint: Endpoint,
        needs: int,
        body: memoryview | bytes,
        members: Members,
        opening: Opening | None,
        should_stop: Callable[[], bool] | None,
    ) -> RoutingView:
        """``opening``: of the text that stands for all of it."""
        self.watch.enter(VIEW)
        view = read_facts(endpoint, members)
        if needs:
            _check_stop(should_stop)
            if needs & NEEDS_RANK_FREE:
                view.rank_free = find_rank_free(members, body)
            text = routing_text(endpoint, members) if needs & NEEDS_TEXT else None
            if text is not None:
                data = text[:TEXT_BYTES_MAX].encode()  # a character is a byte at least
                view.text_bytes = min(len(data), TEXT_BYTES_MAX)
                view.block_keys = block_keys(view.model, data)
            if needs & NEEDS_TOKENS:
                self._add_tokens(endpoint, members, view, text, opening, should_stop)
        return view

    def _add_tokens(
        self,
        endpoint: Endpoint,
        members: Members,
        view: RoutingView,
        text: str | None,
        opening: Opening | None,
        should_stop: Callable[[], bool] | None,
    ) -> None:
        """Set the token members of ``view``."""
        watch = self.watch
        ids = _ids_in_body(endpoint, members)
        if ids is not None:
            packed = _packed(ids, self._prefix_token_count)
        elif opening is not None:
            tokenizer = self._find_tokenizer(view.model)
            watch.enter(ENCODE)
            packed = self._encode_opening(tokenizer, opening)
            watch.enter(VIEW)
            _check_stop(should_stop)
        else:
            tokenizer = self._find_tokenizer(view.model)
            prompt = _prompt_to_encode(endpoint, members, text)
            self._check_length(prompt)
            if endpoint.name in _CHAT_LIKE:
                watch.enter(TEMPLATE)
                prompt = self._render(endpoint, members, tokenizer.template, prompt)
                _check_stop(should_stop)
            watch.enter(ENCODE)
            packed = self._encode(tokenizer, prompt)
            watch.enter(VIEW)
            _check_stop(should_stop)
        if packed:
            view.token_ids = packed
            view.prefix_key = prefix_key(packed)
            view.key_position = key_position(view.prefix_key)

    def _find_tokenizer(self, model: str) -> LoadedTokenizer:
        found = self._tokenizers.find(model) if self._tokenizers is not None else None
        if found is None:
            raise MeshError("tokenizer_unavailable", "There is no tokenizer for this model yet.")
        return found

    def _check_length(self, text: str) -> None:
        limit = self._max_tokenize_bytes
        # A character is at most four bytes, so most texts need no encoding to be counted.
        if len(text) * 4 > limit and (len(text) > limit or len(text.encode()) > limit):
            self._refuse_length()

    def _refuse_length(self) -> NoReturn:
        raise MeshError(
            "tokenizer_input_too_large",
            f"The text to tokenize is longer than {self._max_tokenize_bytes} bytes.",
        )

    def _render(
        self, endpoint: Endpoint, members: Members, template: ChatTemplate | None, fallback: str
    ) -> str:
        if template is None:
            if self._on_fallback is not None:
                self._on_fallback(NO_TEMPLATE)
            return fallback
        try:
            return template.render(_chat_request(endpoint, members), self._max_tokenize_bytes)
        except OutputTooLong:
            self._refuse_length()
        except TemplateRefusal as error:
            refuse(f"The chat template of the model refused the request: {error}")

    def _encode(self, tokenizer: LoadedTokenizer, text: str) -> bytes:
        if not text:
            return b""
        try:
            return tokenizer.packed_head(text, self._prefix_token_count)
        except EncodeFailed as error:
            raise _not_tokenized(error) from error

    def _encode_opening(self, tokenizer: LoadedTokenizer, opening: Opening) -> bytes:
        try:
            packed = tokenizer.packed_opening(opening.text, self._prefix_token_count, opening.text_bytes)
        except EncodeFailed as error:
            raise _not_tokenized(error) from error
        if packed is None:
            raise _OpeningTooShort
        return packed


class _OpeningTooShort(Exception):
    """The opening of a text has fewer ids than are asked for, or may not be tokenized alone."""


def _not_tokenized(error: EncodeFailed) -> MeshError:
    return MeshError("invalid_request", "The text of the request cannot be tokenized.", cause=str(error))


def _check_stop(should_stop: Callable[[], bool] | None) -> None:
    if should_stop is not None and should_stop():
        raise Stopped


def _ids_in_body(endpoint: Endpoint, members: Members) -> list[int] | None:
    """Return the ids that the client sent instead of text, ``None`` if it sent none."""
    if endpoint.name == "generate":
        ids: list[Any] | None = members.get("input_ids")
        if ids and type(ids[0]) is list:
            refuse('The member "input_ids" must be one array of integers to be placed by its tokens.')
        return None if ids == [] and members.get("text") is not None else ids
    if endpoint.name == "completions":
        return _one_list_of_ids(members["prompt"])
    if endpoint.name == "embeddings":
        return _one_list_of_ids(members.get("input"))
    return None


def _one_list_of_ids(value: Any) -> list[int] | None:
    if type(value) is not list:
        return None
    first = value[0] if value and type(value[0]) is list else value
    return first if set(map(type, first)) <= {int} else None


def _packed(ids: list[int], count: int) -> bytes:
    if ids and (min(ids) < 0 or max(ids) > TOKEN_ID_MAX):
        refuse(f"A token id must be an integer from 0 to {TOKEN_ID_MAX}.")
    return pack_token_ids(islice(ids, count))


def _prompt_to_encode(endpoint: Endpoint, members: Members, text: str | None) -> str:
    """Return the routing text, or the first of several prompts of a completion."""
    if endpoint.name == "completions" and type(members["prompt"]) is list:
        first: str = members["prompt"][0]  # an array of strings: one of ids, or empty, never gets here
        return first
    return routing_text(endpoint, members) if text is None else text


def _chat_request(endpoint: Endpoint, members: Members) -> ChatRequest:
    messages = members["messages"]
    if endpoint.name != "chat":
        return ChatRequest(chat_messages(members.get("system"), messages))
    kwargs = members.get("chat_template_kwargs")
    tools, documents = members.get("tools"), members.get("documents")
    return ChatRequest(
        messages,
        tools if type(tools) is list else None,
        documents if type(documents) is list else None,
        members.get("reasoning_effort"),
        kwargs if type(kwargs) is dict else None,
        members.get("continue_final_message") is True,
    )
