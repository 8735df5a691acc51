"""Train the small tokenizer of the demo upstreams from meshd's own text: ``python train.py``.

A byte-level BPE, so every text can be encoded, with a vocabulary just large enough that English and code
cost fewer tokens than bytes. The result is committed; run this again only to change it, because every
id in it may change.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Final

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

import meshd
from meshd.prepare.proof_text import KINDS, texts_of_kind

VOCABULARY_SIZE: Final = 3072
SPECIAL_TOKENS: Final = ("<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
CHAT_TEMPLATE: Final = (
    "{% if tools %}<|system|>Tools: {{ tools | tojson }}<|end|>{% endif %}"
    "{% for message in messages %}<|{{ message.role }}|>"
    "{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content or [] %}"
    "{% if part.type == 'text' %}{{ part.text }}{% else %}[{{ part.type }}]{% endif %}"
    "{% endfor %}{% endif %}"
    "{% for call in message.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}<|end|>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def corpus() -> Iterator[str]:
    """Yield meshd's sources, docstrings and all, and generated text of the kinds found in prompts."""
    for source in sorted(Path(meshd.__file__).parent.rglob("*.py")):
        yield source.read_text("utf-8")
    rng = Random(1)
    for piece in KINDS[:3]:
        yield from texts_of_kind(rng, piece, 200_000)


def train() -> Tokenizer:
    """Return the trained tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=[AddedToken(text, special=True, normalized=False) for text in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    return tokenizer


def main() -> None:
    here = Path(__file__).parent
    compact = json.dumps(json.loads(train().to_str()), ensure_ascii=False, separators=(",", ":"))
    (here / "tokenizer.json").write_text(compact + "\n", "utf-8")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIAL_TOKENS[0],
        "chat_template": CHAT_TEMPLATE,
    }
    (here / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    main()
