from __future__ import annotations

import copy

import pytest

from meshd.prepare.chat_messages import ContentForm, chat_messages, conform, mark_final

PARTS = [
    {"type": "text", "text": "a", "cache_control": {}},
    {"type": "image_url", "image_url": {"url": "data:"}},
    {"type": "input_audio", "input_audio": {}},
    {"type": "video_url"},
    {"type": "refusal"},
    "loose",
    {"type": "text", "text": ""},
    {"type": "text", "text": "b"},
]


def test_text_form_joins_text_parts_by_one_space():
    messages = [{"role": "user", "content": PARTS, "name": "n"}, {"role": "user", "content": "as it is "}]
    assert conform(messages, ContentForm.TEXT) == [
        {"role": "user", "content": "a b", "name": "n"},
        {"role": "user", "content": "as it is "},
    ]


def test_parts_form_reduces_media_to_their_kind_and_wraps_strings():
    messages = [{"role": "user", "content": PARTS}, {"role": "user", "content": "x"}]
    first, second = conform(messages, ContentForm.PARTS)
    assert first["content"] == [
        {"type": "text", "text": "a"},
        {"type": "image"},
        {"type": "audio"},
        {"type": "video"},
        {"type": "text", "text": ""},
        {"type": "text", "text": "b"},
    ]
    assert second["content"] == [{"type": "text", "text": "x"}]


def test_either_form_keeps_what_the_client_chose():
    messages = [
        {"role": "user", "content": "x"},
        {"role": "user", "content": [{"type": "text", "text": "y"}]},
    ]
    assert conform(messages, ContentForm.EITHER) == messages


@pytest.mark.parametrize("form", ContentForm)
def test_absent_and_null_content_and_loose_elements_do_not_break_it(form):
    messages = [{"role": "assistant", "content": None}, {"role": "assistant"}, "loose", 7, None]
    assert conform(messages, form) == messages[:2]


def test_arguments_that_hold_an_object_are_parsed_and_others_kept():
    def call(arguments):
        return {"id": "1", "function": {"name": "f", "arguments": arguments}}

    calls = [
        call('{"a":1}'),
        call("[1]"),
        call("{broken"),
        call({"b": 2}),
        call(None),
        "loose",
        {"function": 3},
    ]
    message = {"role": "assistant", "content": None, "tool_calls": calls}
    untouched = copy.deepcopy(message)
    (conformed,) = conform([message], ContentForm.TEXT)
    assert conformed["tool_calls"] == [call({"a": 1}), *calls[1:]]
    assert message == untouched


def test_only_an_assistant_has_its_arguments_parsed():
    message = {"role": "user", "tool_calls": [{"function": {"arguments": "{}"}}]}
    assert conform([message], ContentForm.TEXT) == [message]


def test_the_mark_stands_behind_the_last_text_of_the_assistant():
    def marked(content, role="assistant"):
        messages = conform([{"role": role, "content": content}], ContentForm.EITHER)
        return mark_final(messages, "|"), messages[0]["content"]

    text, image = {"type": "text", "text": "a"}, {"type": "image"}
    assert marked("x ") == ("x ", "x |")
    assert marked("") == ("", "|")
    assert marked([text, text, image]) == ("a", [text, {"type": "text", "text": "a|"}, image])
    for nothing in (None, [image], [], 7):
        assert marked(nothing)[0] is None
    assert marked("x", role="user") == (None, "x")
    assert mark_final([], "|") is None


@pytest.mark.parametrize("name", ["reasoning_content", "thinking", "reasoning"])
def test_reasoning_has_every_name_that_templates_read(name):
    (message,) = conform([{"role": "assistant", name: "why", "content": "x"}], ContentForm.TEXT)
    assert (message["reasoning_content"], message["thinking"]) == ("why", "why")
    both = {"role": "assistant", "reasoning_content": "a", "thinking": "b", "content": "x"}
    assert conform([both], ContentForm.TEXT) == [both], "what the client wrote under a name stays"
    nothing = conform([{"role": "assistant", name: None}], ContentForm.TEXT)[0]
    assert nothing.get("thinking") is None and nothing.get("reasoning_content") is None


def test_a_messages_request_becomes_chat_messages_with_the_system_first():
    system = [{"type": "text", "text": "be"}, {"type": "text", "text": "brief"}]
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "user", "content": [{"type": "image", "source": {}}, {"type": "text", "text": "see"}]},
        "loose",
        {"role": "user", "content": None},
    ]
    assert chat_messages(system, messages) == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "a b"},
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "see"}]},
        {"role": "user", "content": ""},
    ]


def test_tool_blocks_become_their_json_text():
    use = {"type": "tool_use", "id": "t1", "name": "find", "input": {"q": "é"}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": "found"}
    chat = chat_messages(
        None, [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    )
    assert [message["content"] for message in chat] == [
        '{"type":"tool_use","id":"t1","name":"find","input":{"q":"é"}}',
        '{"type":"tool_result","tool_use_id":"t1","content":"found"}',
    ]


@pytest.mark.parametrize("system", [None, "", [], [{"type": "text", "text": ""}], 7])
def test_no_system_prompt_adds_no_message(system):
    assert chat_messages(system, [{"role": "user", "content": "x"}]) == [{"role": "user", "content": "x"}]
