from __future__ import annotations

import json

import pytest

from meshd.api.endpoints import ENDPOINTS
from meshd.api.text import compact_json, routing_text

BY_NAME = {e.name: e for e in ENDPOINTS}


def text(name, **members):
    return routing_text(BY_NAME[name], members)


def test_chat_text_covers_the_whole_history_and_skips_what_it_cannot_read():
    messages = [
        {"role": "system", "content": "one"},
        {"role": "user", "content": [{"type": "text", "text": "two"}, {"type": "image_url"}, 7, {"text": 8}]},
        {"role": "assistant", "content": None, "reasoning_content": "three"},
        {"role": "assistant", "content": "", "reasoning_content": {"no": "text"}},
        "nothing",
        {"role": "user", "content": "four"},
    ]
    assert text("chat", messages=messages, tools=[{"type": "function"}]) == "one two three four"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("as it is ", "as it is "),
        (["a", "", "b"], "a b"),
        ([1, 22, 333], "1 22 333"),
        ([[1, 2], [], [3]], "1 2 3"),
        ([], ""),
    ],
)
def test_prompts_of_every_kind_become_one_text(value, expected):
    assert text("completions", prompt=value) == expected
    assert text("embeddings", input=value) == expected
    assert text("generate", input_ids=value) == expected


def test_generate_prefers_its_text_to_its_ids():
    assert text("generate", text=["a", "b"], input_ids=[1]) == "a b"
    assert text("generate") == ""
    assert text("embeddings") == ""


def test_messages_are_three_lines_with_tools_first():
    members = {
        "model": "m1",
        "messages": [{"role": "user", "content": "Hi"}],
        "system": "Be brief",
        "tools": [{"name": "é"}],
        "tool_choice": {"type": "auto"},
    }
    assert text("messages", **members) == (
        'tools=[{"name":"é"}]\nsystem="Be brief"\nmessages=[{"role":"user","content":"Hi"}]'
    )


@pytest.mark.parametrize("empty", [None, "", [], {}])
def test_absent_and_empty_lines_are_left_out(empty):
    members = {"messages": [{"role": "user", "content": "Hi"}], "system": "Be brief", "tools": empty}
    expected = 'system="Be brief"\nmessages=[{"role":"user","content":"Hi"}]'
    assert text("messages", **members) == expected
    assert text("count_tokens", **members) == expected


def test_responses_are_three_lines_with_instructions_first():
    assert (
        text("responses", instructions="x", input=["a"], tools=[1])
        == 'instructions="x"\ntools=[1]\ninput=["a"]'
    )


def test_two_requests_share_everything_up_to_the_first_different_message():
    common = {"tools": [{"name": "t"}], "system": "s"}
    first = text("messages", messages=[{"content": "same"}, {"content": "left"}], **common)
    second = text("messages", messages=[{"content": "same"}, {"content": "right"}], **common)
    shared = first[: first.index("left")]
    assert second.startswith(shared)


def test_compact_json_keeps_order_and_non_ascii_and_takes_what_the_fast_encoder_does_not():
    assert compact_json({"b": "é/", "a": [1, 2.5, None]}) == '{"b":"é/","a":[1,2.5,null]}'
    assert compact_json({"a": [10**30]}) == '{"a":[1' + "0" * 30 + "]}"
    deep = json.loads("[" * 500 + "]" * 500)
    assert compact_json(deep) == "[" * 500 + "]" * 500
