from __future__ import annotations

import pytest

from meshd.api.endpoints import ENDPOINTS
from meshd.api.facts import read_facts

BY_NAME = {e.name: e for e in ENDPOINTS}


def facts(name, **members):
    return read_facts(BY_NAME[name], members)


def test_model_and_stream_are_read_from_every_api():
    for name in ("chat", "completions", "generate", "messages", "responses", "embeddings"):
        view = facts(name, model="m1", stream=True, messages=[1], prompt="")
        assert (view.model, view.wants_stream, view.batch_size) == ("m1", True, 1)
    view = facts("generate", model=None, stream=None)
    assert (view.model, view.wants_stream) == ("", False)


@pytest.mark.parametrize(
    ("n", "batch"),
    [(None, 1), (1, 1), (0, 1), (-3, 1), (4, 4), (10**30, 10**30), (True, 1), (2.0, 1), ("3", 1)],
)
def test_a_chat_batch_is_an_integer_n_above_one(n, batch):
    assert facts("chat", n=n).batch_size == batch


@pytest.mark.parametrize(
    ("prompt", "batch"), [("x", 1), ([], 1), (["a", "b"], 2), ([1, 2, 3], 1), ([[1], [2], [3]], 3), ([[]], 1)]
)
def test_a_completion_batch_is_its_number_of_prompts(prompt, batch):
    assert facts("completions", prompt=prompt).batch_size == batch


def test_a_generate_batch_is_its_number_of_texts_or_of_id_lists():
    assert facts("generate", text=["a", "b"]).batch_size == 2
    assert facts("generate", input_ids=[[1], [2], [3]]).batch_size == 3
    assert facts("generate", input_ids=[1, 2, 3]).batch_size == 1
    assert facts("generate").batch_size == 1


@pytest.mark.parametrize(
    ("name", "members", "wants"),
    [
        ("chat", {"logprobs": True}, True),
        ("chat", {"logprobs": 1}, False),
        ("completions", {"prompt": "", "logprobs": 0}, True),
        ("completions", {"prompt": "", "logprobs": None}, False),
        ("generate", {"return_logprob": True}, True),
        ("generate", {"return_logprob": "yes"}, False),
    ],
)
def test_logprobs_are_asked_for_in_the_way_of_each_api(name, members, wants):
    assert facts(name, **members).wants_logprobs is wants


@pytest.mark.parametrize(
    "members",
    [
        {"previous_response_id": "r1"},
        {"conversation": "c1"},
        {"conversation": {"id": "c1"}},
        {"input": ["text", {"type": "item_reference", "id": "i1", "other": 1}]},
        {"input": [{"id": "i1"}]},
        {"input": [{"type": None, "id": "i1"}]},
    ],
)
def test_each_reference_to_stored_state_is_seen(members):
    view = facts("responses", store=False, **members)
    assert view.has_state
    assert view.creates_state


@pytest.mark.parametrize(
    "members",
    [
        {},
        {"background": True},
        {"previous_response_id": None, "conversation": None, "input": None},
        {"input": "item_reference"},
        {"input": [{"id": "x", "type": "message"}, {"id": "x", "role": "user"}, {"type": None}, {}, 7, None]},
    ],
)
def test_what_refers_to_nothing_stored_is_not_state(members):
    assert not facts("responses", **members).has_state
    assert facts("responses", **members).creates_state
    assert not facts("responses", store=False, **members).creates_state


def test_only_responses_have_state():
    assert not facts("chat", previous_response_id="r1").has_state
    assert not facts("chat").creates_state
