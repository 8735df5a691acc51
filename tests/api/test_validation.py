from __future__ import annotations

import json

import pytest

from meshd.api.endpoints import ENDPOINTS
from meshd.api.validation import read_request
from meshd.errors import MeshError

BY_NAME = {e.name: e for e in ENDPOINTS}
SMALLEST = {
    "chat": {"messages": [0]},
    "completions": {"prompt": ""},
    "generate": {},
    "messages": {"model": "m1", "messages": [None]},
    "count_tokens": {"model": "m1", "messages": ["x"]},
    "responses": {"model": "m1"},
    "embeddings": {},
}
ANYTHING = {
    "max_tokens": "many",
    "temperature": 1.5,
    "top_k": -1,
    "tools": 7,
    "unknown": [{}],
    "n": "x",
    "role": None,
}


def read(name, members, raw=None):
    body = json.dumps(members).encode() if raw is None else raw
    return read_request(BY_NAME[name], memoryview(body))


@pytest.mark.parametrize("name", SMALLEST)
def test_the_smallest_body_of_each_endpoint_passes(name):
    assert read(name, SMALLEST[name]) == SMALLEST[name]


@pytest.mark.parametrize("name", SMALLEST)
def test_members_that_routing_does_not_need_never_matter(name):
    read(name, SMALLEST[name] | ANYTHING)


@pytest.mark.parametrize("name", SMALLEST)
def test_stream_null_passes_and_a_string_does_not(name):
    read(name, SMALLEST[name] | {"stream": None})
    for wrong in ("true", 1, 0, []):
        with pytest.raises(MeshError, match='"stream"'):
            read(name, SMALLEST[name] | {"stream": wrong})


@pytest.mark.parametrize("name", SMALLEST)
@pytest.mark.parametrize("model", ["", " ", "\t\u2003", 7, [], True])
def test_a_model_that_is_no_text_is_refused(name, model):
    with pytest.raises(MeshError, match='"model"'):
        read(name, SMALLEST[name] | {"model": model})


def test_a_null_model_is_refused_except_for_generate():
    for name in set(SMALLEST) - {"generate"}:
        with pytest.raises(MeshError, match='"model"'):
            read(name, SMALLEST[name] | {"model": None})
    read("generate", {"model": None})


@pytest.mark.parametrize("name", ["messages", "count_tokens", "responses"])
def test_a_model_is_required_where_the_api_requires_it(name):
    with pytest.raises(MeshError, match='"model" is missing'):
        read(name, {"messages": [1]})


@pytest.mark.parametrize("name", ["chat", "messages", "count_tokens"])
@pytest.mark.parametrize("messages", [[], None, "hi", {}, 3])
def test_messages_must_be_a_non_empty_array(name, messages):
    with pytest.raises(MeshError, match='"messages"'):
        read(name, {"model": "m1", "messages": messages})
    with pytest.raises(MeshError, match='"messages" is missing'):
        read(name, {"model": "m1"})


@pytest.mark.parametrize(
    "prompt", ["", "x", [], ["a", ""], [1, -2], [[1], []], [[]], [10**40], [[10**400, 1]]]
)
def test_each_kind_of_prompt_passes(prompt):
    raw = b'{"prompt":%s}' % json.dumps(prompt).encode()
    read("completions", None, raw)


@pytest.mark.parametrize(
    "prompt",
    [
        None,
        1,
        {},
        True,
        ["a", 1],
        [1, "a"],
        [1, [2]],
        [[1], "a"],
        [True],
        [[False]],
        [1.5],
        [1e30],
        [[2.0]],
        [None],
    ],
)
def test_a_prompt_of_another_or_of_mixed_kind_is_refused(prompt):
    with pytest.raises(MeshError, match='"prompt"'):
        read("completions", {"prompt": prompt})
    with pytest.raises(MeshError, match='"prompt" is missing'):
        read("completions", {})


def test_a_float_among_giant_integers_is_refused():
    with pytest.raises(MeshError, match='"prompt"'):
        read("completions", None, b'{"prompt":[%s,1e40]}' % (b"9" * 40))


def test_generate_members_are_typed_only_if_present():
    for good in (
        {"text": "x"},
        {"text": []},
        {"text": ["a"]},
        {"text": None, "input_ids": None, "input_embeds": None},
        {"input_ids": [1]},
        {"input_ids": []},
        {"input_ids": [[1], [2]]},
        {"input_ids": [2**80]},
        {"input_embeds": []},
    ):
        read("generate", good)
    for member, wrong in (
        ("text", 1),
        ("text", ["a", 1]),
        ("text", {}),
        ("input_ids", "1"),
        ("input_ids", [True]),
        ("input_ids", ["1"]),
        ("input_ids", [[1], 2]),
        ("input_ids", [1.0]),
        ("input_embeds", {}),
        ("input_embeds", "x"),
    ):
        with pytest.raises(MeshError, match=f'"{member}"'):
            read("generate", {member: wrong})


def test_responses_members_are_typed():
    for good in (
        {"input": ""},
        {"input": []},
        {"input": None},
        {"previous_response_id": "r", "conversation": None},
        {"conversation": "c"},
        {"conversation": {"id": "c"}, "previous_response_id": None},
        {"store": None, "background": True},
    ):
        read("responses", {"model": "m1"} | good)
    for member, wrong in (
        ("input", 1),
        ("input", {}),
        ("previous_response_id", ""),
        ("previous_response_id", 1),
        ("conversation", ""),
        ("conversation", {}),
        ("conversation", {"id": ""}),
        ("conversation", {"id": None}),
        ("conversation", 3),
        ("store", "no"),
        ("store", 0),
        ("background", "yes"),
    ):
        with pytest.raises(MeshError, match=f'"{member}"'):
            read("responses", {"model": "m1", member: wrong})
    with pytest.raises(MeshError, match="exclude each other"):
        read("responses", {"model": "m1", "previous_response_id": "r", "conversation": "c"})


def test_embeddings_input_is_a_string_or_an_array():
    for good in ("x", [], [1, "a"], None):
        read("embeddings", {"input": good})
    with pytest.raises(MeshError, match='"input"'):
        read("embeddings", {"input": {}})


def test_a_count_beyond_64_bits_stays_an_integer():
    assert read("chat", {"messages": [1], "n": 10**30})["n"] == 10**30
    assert read("chat", None, b'{"messages":[1],"n":1e30}')["n"] == 1e30


def test_the_last_of_two_models_counts():
    assert read("chat", None, b'{"model":"a","messages":[1],"model":"b"}')["model"] == "b"


# ------------------------------------------------------------------------- tokenize and detokenize

LOCAL = {"tokenize": {"prompt": ""}, "detokenize": {"tokens": []}}


@pytest.mark.parametrize("name", LOCAL)
def test_the_smallest_body_of_each_local_endpoint_passes(name):
    for model in ({}, {"model": None}, {"model": ""}, {"model": "unknown"}, {"model": " m"}):
        read(name, LOCAL[name] | {"stream": "any", "unknown": [{}]} | model)
    for wrong in (7, [], True, {}):
        with pytest.raises(MeshError, match='"model" must be a string'):
            read(name, LOCAL[name] | {"model": wrong})


@pytest.mark.parametrize("prompt", ["x", [], [""], ["a", "b"]])
def test_each_kind_of_prompt_to_tokenize_passes(prompt):
    read("tokenize", {"prompt": prompt})


@pytest.mark.parametrize("prompt", [None, 1, True, {}, [1], ["a", 1], [["a"]], [None]])
def test_a_prompt_to_tokenize_of_another_kind_is_refused(prompt):
    with pytest.raises(MeshError, match='"prompt" must be'):
        read("tokenize", {"prompt": prompt})
    with pytest.raises(MeshError, match='"prompt" is missing'):
        read("tokenize", {"model": "m1"})


@pytest.mark.parametrize("tokens", [[], [1, 2], [[1], []], [[]], [-1], [10**40]])
def test_each_kind_of_tokens_passes(tokens):
    assert read("detokenize", {"tokens": tokens})["tokens"] is not None


@pytest.mark.parametrize(
    "tokens", [None, "x", 1, {}, [True], [1.0], ["a"], [1, [2]], [[1], "a"], [[1.5]], [None]]
)
def test_tokens_of_another_kind_are_refused(tokens):
    with pytest.raises(MeshError, match='"tokens" must be'):
        read("detokenize", {"tokens": tokens})
    with pytest.raises(MeshError, match='"tokens" is missing'):
        read("detokenize", {"model": "m1"})


def test_skip_special_tokens_is_a_boolean():
    for value in (None, True, False):
        read("detokenize", {"tokens": [1], "skip_special_tokens": value})
    for wrong in (1, "true", []):
        with pytest.raises(MeshError, match='"skip_special_tokens"'):
            read("detokenize", {"tokens": [1], "skip_special_tokens": wrong})
