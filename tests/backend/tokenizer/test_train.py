from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from meshd.backend.tokenizer import train
from meshd.prepare.chat_template import ChatRequest
from meshd.prepare.tokenizer import load_template

HERE = Path(train.__file__).parent
BUNDLED = Tokenizer.from_file(str(HERE / "tokenizer.json"))


@given(st.text())
def test_the_bundled_tokenizer_gives_every_text_back(text):
    ids = BUNDLED.encode(text, add_special_tokens=False).ids
    assert BUNDLED.decode(ids, skip_special_tokens=False) == text


def test_the_bundled_files_are_small_and_belong_to_the_script():
    assert (HERE / "tokenizer.json").stat().st_size < 200_000
    assert BUNDLED.get_vocab_size() == train.VOCABULARY_SIZE
    assert [BUNDLED.token_to_id(token) for token in train.SPECIAL_TOKENS] == [0, 1, 2, 3, 4]
    config = json.loads((HERE / "tokenizer_config.json").read_text())
    assert config["chat_template"] == train.CHAT_TEMPLATE


def test_english_costs_far_fewer_tokens_than_bytes():
    text = "Each process writes its own row of the table, and a reader sums the rows of all processes."
    assert len(BUNDLED.encode(text).ids) * 3 < len(text)


def test_training_again_gives_a_vocabulary_of_the_same_shape():
    tokenizer = train.train()
    assert tokenizer.get_vocab_size() == train.VOCABULARY_SIZE
    assert tokenizer.token_to_id(train.SPECIAL_TOKENS[0]) == 0


@pytest.mark.parametrize(
    ("messages", "tools", "text"),
    [
        ([{"role": "user", "content": "Hi"}], None, "<|user|>Hi<|end|><|assistant|>"),
        (
            [
                {"role": "system", "content": "S"},
                {"role": "user", "content": [{"type": "text", "text": "a"}]},
            ],
            None,
            "<|system|>S<|end|><|user|>a<|end|><|assistant|>",
        ),
        (
            [
                {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]},
                {"role": "user", "content": [{"type": "image_url"}]},
            ],
            [{"name": "f"}],
            '<|system|>Tools: [{"name": "f"}]<|end|><|assistant|>{"name": "f"}<|end|><|user|>[image]<|end|>'
            "<|assistant|>",
        ),
    ],
)
def test_the_bundled_template_renders_a_conversation(messages, tools, text):
    template = load_template(HERE)
    assert template is not None
    assert template.render(ChatRequest(messages, tools), 1000) == text
