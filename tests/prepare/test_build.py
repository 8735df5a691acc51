from __future__ import annotations

import itertools
import json

import pytest

from meshd.api.block_keys import KEYS_MAX, TEXT_BYTES_MAX, block_keys
from meshd.api.endpoints import ENDPOINTS
from meshd.api.prefix_key import key_position, pack_token_ids, prefix_key
from meshd.api.view import NEEDS_RANK_FREE, NEEDS_TEXT, NEEDS_TOKENS
from meshd.errors import MeshError
from meshd.prepare.build import Stopped, ViewBuilder
from meshd.prepare.chat_template import ChatTemplate
from meshd.prepare.cut_proof import Cuts
from meshd.prepare.stopwatch import StageTimes
from meshd.prepare.tokenizer import LoadedTokenizer, WorkerTools
from meshd.prepare.tokenizer_set import TokenizerSet
from tests.fakes.tokenizer_events import RecordedEvents

BY_NAME = {e.name: e for e in ENDPOINTS}
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}>{% endif %}"
)
HI = [{"role": "user", "content": "Hi"}]


def by_bytes(text: str) -> list[int]:
    return list(text.encode())


class Harness:
    """A builder over a tokenizer whose ids are the bytes of the text, so that views can be read."""

    def __init__(self, template: str | None = None, count: int = 256, limit: int = 1000, encode=by_bytes):
        compiled = ChatTemplate({"default": template}, {}) if template is not None else None
        self.fallbacks: list[str] = []
        ticks = itertools.count(0, 10)
        self.builder = ViewBuilder(
            TokenizerSet({"default": LoadedTokenizer(encode, None, compiled)}),
            count,
            limit,
            clock=lambda: next(ticks),
            on_fallback=self.fallbacks.append,
        )

    def view(self, name: str, needs: int = NEEDS_TOKENS, should_stop=None, **members):
        body = memoryview(bytearray(json.dumps(members).encode()))
        return self.builder.build(BY_NAME[name], needs, body, should_stop)

    def prompt(self, name: str, **members) -> str:
        """The text that was tokenized."""
        return bytes(self.view(name, **members).token_ids[::4]).decode()


def test_a_refused_request_is_timed_in_the_stage_that_refused_it():
    harness = Harness("{{ raise_exception('no') }}")
    refusal(harness, "chat", messages=HI)
    assert harness.builder.watch.stop() == StageTimes(json_parse=10, template=10, view=10)
    refusal(harness, "chat", messages=[])
    assert harness.builder.watch.stop() == StageTimes(json_parse=10)


def refusal(harness: Harness, name: str, **members) -> MeshError:
    with pytest.raises(MeshError) as caught:
        harness.view(name, **members)
    return caught.value


def test_without_needs_only_the_facts_are_read():
    view = Harness(encode=None).view("completions", needs=0, model="m1", prompt="x", stream=True)
    assert (view.model, view.wants_stream) == ("m1", True)
    assert (view.token_ids, view.prefix_key, view.key_position, view.text_bytes) == (b"", 0, 0, 0)


def test_without_needs_validation_is_still_whole():
    harness = Harness()
    for name, members in (("chat", {"messages": []}), ("completions", {}), ("responses", {"model": " "})):
        with pytest.raises(MeshError) as caught:
            harness.view(name, needs=0, **members)
        assert caught.value.code == "invalid_request"


def test_text_is_measured_when_it_is_needed():
    view = Harness().view("completions", needs=NEEDS_TEXT, prompt="né")
    assert view.text_bytes == 3
    assert view.block_keys == block_keys(view.model, "né".encode())


def test_text_beyond_the_bound_of_the_prefix_index_does_not_count() -> None:
    view = Harness().view("completions", needs=NEEDS_TEXT, prompt="é" * TEXT_BYTES_MAX)
    assert view.text_bytes == TEXT_BYTES_MAX
    assert len(view.block_keys) == 8 * KEYS_MAX


@pytest.mark.parametrize("name", [e.name for e in ENDPOINTS if e.has_prepare_job and e.capability])
def test_rank_free_body_is_found_when_it_is_needed(name):
    members = {"model": "m1", "messages": HI, "prompt": "x", "data_parallel_rank": 7, "stream": None}
    body = json.dumps(members).encode()
    start = body.index(b'"data_parallel_rank"')
    view = Harness().view(name, needs=NEEDS_RANK_FREE, **members)
    assert view.rank_free == (0, start, start + len('"data_parallel_rank": 7,'), len(body) - 1)
    assert Harness().view(name, needs=0, **members).rank_free is None


def test_tokens_come_with_their_key_and_its_position():
    view = Harness(count=3).view("completions", prompt="abcdef")
    assert view.token_ids == pack_token_ids([97, 98, 99])
    assert view.prefix_key == prefix_key(view.token_ids)
    assert view.key_position == key_position(view.prefix_key)


def test_text_and_tokens_come_from_one_job():
    view = Harness().view("completions", needs=NEEDS_TEXT | NEEDS_TOKENS, prompt="abc")
    assert (view.text_bytes, len(view.token_ids)) == (3, 12)


@pytest.mark.parametrize(
    ("name", "members"),
    [
        ("completions", {"prompt": ""}),
        ("completions", {"prompt": []}),
        ("completions", {"prompt": [[]]}),
        ("completions", {"prompt": ["", "x"]}),
        ("embeddings", {}),
        ("embeddings", {"input": []}),
        ("generate", {}),
        ("generate", {"input_ids": []}),
        ("chat", {"messages": [{"role": "user", "content": None}]}),
    ],
)
def test_an_empty_prompt_has_no_tokens_and_no_key(name, members):
    view = Harness().view(name, **members)
    assert (view.token_ids, view.prefix_key, view.key_position) == (b"", 0, 0)


# --- ids sent by the client ---


@pytest.mark.parametrize(
    ("name", "members"),
    [
        ("generate", {"input_ids": [5, 17, 256, 70000]}),
        ("generate", {"input_ids": [5, 17, 256, 70000], "text": "x"}),
        ("completions", {"prompt": [5, 17, 256, 70000]}),
        ("completions", {"prompt": [[5, 17, 256, 70000], [1]]}),
        ("embeddings", {"input": [5, 17, 256, 70000]}),
        ("embeddings", {"input": [[5, 17, 256, 70000], [1]]}),
    ],
)
def test_ids_of_the_client_are_used_without_a_tokenizer(name, members):
    harness = Harness()
    harness.builder = ViewBuilder(None, 256, 1000, clock=lambda: 0)
    assert harness.view(name, **members).prefix_key == 0x6098D5672B0C4873


@pytest.mark.parametrize("token_id", [-1, 2**32, 10**40])
@pytest.mark.parametrize(
    ("name", "member"), [("generate", "input_ids"), ("completions", "prompt"), ("embeddings", "input")]
)
def test_an_id_that_is_no_u32_is_refused_wherever_it_stands(name, member, token_id):
    error = refusal(Harness(count=2), name, **{member: [1, 2, 3, token_id]})
    assert (error.code, error.status) == ("invalid_request", 400)


def test_lists_of_id_lists_cannot_be_placed_for_generate():
    assert refusal(Harness(), "generate", input_ids=[[1]]).code == "invalid_request"
    assert Harness().view("generate", needs=0, input_ids=[[1]]).batch_size == 1


def test_empty_ids_leave_the_text_to_be_tokenized():
    assert Harness().prompt("generate", text="abc", input_ids=[]) == "abc"


# --- which text is tokenized ---


@pytest.mark.parametrize(
    ("name", "members", "prompt"),
    [
        ("completions", {"prompt": "a b"}, "a b"),
        ("completions", {"prompt": ["first", "second"]}, "first"),
        ("generate", {"text": ["a", "b"]}, "a b"),
        ("embeddings", {"input": ["a", "b"]}, "a b"),
        ("embeddings", {"input": ["a", 1]}, "a 1"),
        ("responses", {"model": "m", "instructions": "x", "input": "y"}, 'instructions="x"\ninput="y"'),
    ],
)
def test_text_endpoints_tokenize_their_routing_text(name, members, prompt):
    for template in (None, TEMPLATE):
        harness = Harness(template)
        assert harness.prompt(name, **members) == prompt
        assert harness.fallbacks == []


def test_chat_is_rendered_by_the_template():
    assert Harness(TEMPLATE).prompt("chat", messages=HI) == "[user]Hi>"


def test_members_of_a_chat_request_reach_the_template():
    source = "{{ tools[0].name }} {{ documents[0] }} {{ reasoning_effort }} {{ extra }}"
    members = {
        "tools": [{"name": "t"}],
        "documents": ["d"],
        "reasoning_effort": "low",
        "chat_template_kwargs": {"extra": "x"},
        "chat_template": "{{ 'never used' }}",
    }
    assert Harness(source).prompt("chat", messages=HI, **members) == "t d low x"
    odd = {"tools": "t", "documents": 1, "chat_template_kwargs": []}
    assert Harness("{{ tools }}{{ documents }}").prompt("chat", messages=HI, **odd) == "NoneNone"


def test_a_continued_message_ends_the_prompt():
    messages = [*HI, {"role": "assistant", "content": "So"}]
    harness = Harness(TEMPLATE)
    assert harness.prompt("chat", messages=messages, continue_final_message=True) == "[user]Hi[assistant]So"


def test_chat_without_a_template_tokenizes_its_text_and_is_counted():
    harness = Harness()
    assert harness.prompt("chat", messages=HI) == "Hi"
    assert harness.fallbacks == ["no_chat_template"]


def test_messages_are_rendered_as_chat_where_there_is_a_template():
    members = {"model": "m1", "system": "Be brief", "messages": HI}
    assert Harness(TEMPLATE).prompt("messages", **members) == "[system]Be brief[user]Hi>"
    text = 'system="Be brief"\nmessages=[{"role":"user","content":"Hi"}]'
    assert Harness().prompt("messages", **members) == text


# --- limits and failures ---


def test_no_tokenizer_is_unavailable_with_advice_to_come_back():
    harness = Harness()
    harness.builder = ViewBuilder(TokenizerSet({}), 256, 1000, clock=lambda: 0)
    error = refusal(harness, "completions", prompt="x")
    assert (error.code, error.status, error.retry_after_s) == ("tokenizer_unavailable", 503, 5)


@pytest.mark.parametrize("letter", ["a", "é", "\u4e2d", "\U0001f600"])
def test_text_of_exactly_the_limit_passes_and_one_byte_more_does_not(letter):
    size = len(letter.encode())
    Harness(limit=12).view("completions", prompt=letter * (12 // size))
    error = refusal(Harness(limit=12), "completions", prompt=letter * (12 // size) + "a")
    assert (error.code, error.status) == ("tokenizer_input_too_large", 413)


def test_a_template_that_grows_over_the_limit_is_too_large():
    harness = Harness("{% for i in range(1000) %}{{ messages[0].content }}{% endfor %}", limit=100)
    assert refusal(harness, "chat", messages=HI).code == "tokenizer_input_too_large"


def test_a_template_refusal_is_a_400_with_its_reason():
    harness = Harness("{{ raise_exception('roles must alternate') }}")
    error = refusal(harness, "chat", messages=HI)
    assert (error.code, error.status) == ("invalid_request", 400)
    assert "roles must alternate" in error.message


def test_a_text_that_cannot_be_encoded_is_a_400():
    def fails(text: str) -> list[int]:
        raise ValueError("inner reason")

    error = refusal(Harness(encode=fails), "completions", prompt="x")
    assert error.code == "invalid_request"
    assert "inner reason" not in error.message


# --- stages ---


def test_each_stage_is_timed_and_nothing_is_counted_twice():
    harness = Harness(TEMPLATE)
    harness.view("chat", messages=HI)
    # The clock steps 10 ns at each look: start, parsed, template, encode, encoded, end.
    assert harness.builder.watch.stop() == StageTimes(json_parse=10, template=10, encode=10, view=20)
    harness.view("chat", needs=0, messages=HI)
    assert harness.builder.watch.stop() == StageTimes(10, 10)


def test_a_stop_is_seen_between_any_two_stages():
    for stages_before in range(3):
        answers = iter([False] * stages_before + [True])
        with pytest.raises(Stopped):
            Harness(TEMPLATE).view("chat", messages=HI, should_stop=lambda it=answers: next(it))


def test_the_body_is_not_kept():
    body = bytearray(json.dumps({"model": "m1", "prompt": "abc"}).encode())
    window = memoryview(body)
    view = Harness().builder.build(BY_NAME["completions"], NEEDS_TOKENS, window)
    window.release()
    body.clear()  # a BufferError here would mean that something still points into the body
    assert view.model == "m1"


# --- long bodies ---


def long_harness(encode=by_bytes, cuts: Cuts | None = None) -> tuple[Harness, RecordedEvents]:
    """A tokenizer that allows cuts, and what it tells; ids are asked for by the sixteen."""
    harness, events = Harness(count=16, limit=200_000), RecordedEvents()
    loaded = LoadedTokenizer(encode, cuts=cuts or Cuts("", "")).for_worker(WorkerTools(events))
    harness.builder = ViewBuilder(
        TokenizerSet({"default": loaded}), 16, 200_000, clock=lambda: 0, on_fallback=harness.fallbacks.append
    )
    return harness, events


def read_whole(harness: Harness, name: str, **members):
    """The view that is made without the reader of long bodies."""
    reader, harness.builder._long_reader = harness.builder._long_reader, None
    try:
        return harness.view(name, **members)
    finally:
        harness.builder._long_reader = reader


LONG_TEXT = "the quick brown fox jumps over the lazy dog, " * 1000


@pytest.mark.parametrize(
    ("name", "members"),
    [
        ("completions", {"model": "m1", "prompt": LONG_TEXT, "stream": True, "n": 2}),
        ("completions", {"prompt": LONG_TEXT.replace("fox", 'fox\n"é"')}),
        ("completions", {"prompt": "的" * 20_000}),
        ("completions", {"prompt": "the end\n" + "x" * 50_000}),
        ("completions", {"prompt": LONG_TEXT, "data_parallel_rank": 3}),
        ("completions", {"prompt": [LONG_TEXT, "b"]}),
        ("completions", {"prompt": [1] * 20_000}),
        ("completions", {"suffix": LONG_TEXT, "prompt": "the end of the day"}),
        ("generate", {"text": LONG_TEXT}),
        ("generate", {"text": LONG_TEXT, "input_ids": [5, 6]}),
        ("generate", {"text": LONG_TEXT, "input_ids": []}),
        ("generate", {"input_ids": [5, 6], "text": LONG_TEXT}),
        ("embeddings", {"model": "m1", "input": LONG_TEXT}),
        ("responses", {"model": "m1", "input": LONG_TEXT}),
        ("chat", {"model": "m1", "messages": [{"role": "user", "content": LONG_TEXT}]}),
    ],
)
@pytest.mark.parametrize("needs", [NEEDS_TOKENS, NEEDS_TOKENS | NEEDS_RANK_FREE, NEEDS_TOKENS | NEEDS_TEXT])
@pytest.mark.parametrize("cuts", [Cuts("", ""), Cuts()])
def test_a_long_body_has_the_view_that_reading_all_of_it_gives(name, members, needs, cuts):
    pytest.importorskip("simdjson")
    harness, _ = long_harness(cuts=cuts)
    view = harness.view(name, needs, **members)
    assert view == read_whole(harness, name, needs=needs, **members)
    assert len(view.token_ids) == 4 * len(by_bytes(LONG_TEXT)[:16]) or "input_ids" in members


def test_of_a_long_text_no_more_is_tokenized_than_of_a_short_one_and_its_length_is_counted():
    pytest.importorskip("simdjson")
    harness, events = long_harness()
    harness.view("completions", model="m1", prompt=LONG_TEXT, max_tokens=16)
    assert (events.offered, events.tokenized, events.fallbacks) == (45_000, 93, [])


def test_of_a_long_text_only_the_opening_is_read_and_its_length_is_told_as_it_is_written():
    pytest.importorskip("simdjson")
    harness, events = long_harness()
    harness.view("completions", prompt="the end\nand " * 10_000)
    assert (events.offered, events.fallbacks) == (130_000, [])


def test_a_long_text_without_a_safe_cut_is_tokenized_whole_and_counted_once():
    harness, events = long_harness()
    harness.view("completions", prompt="的" * 20_000)
    assert (events.offered, events.tokenized, events.fallbacks) == (60_000, 60_000, ["no_safe_cut"])


def test_a_long_text_that_cannot_be_tokenized_is_refused():
    def fails(text: str) -> list[int]:
        raise ValueError

    harness, _ = long_harness(fails)
    error = refusal(harness, "completions", prompt=LONG_TEXT)
    assert error.code == "invalid_request"
    assert refusal(harness, "completions", prompt="x" * 200_001).code == "tokenizer_input_too_large"
    assert refusal(harness, "completions", prompt=LONG_TEXT, model=5).code == "invalid_request"
