from __future__ import annotations

import unicodedata
from random import Random

from meshd.prepare.proof_text import KIND_BYTES, KINDS, proof_texts, texts_of_added_tokens

ADDED = ["<|user|>", "<|end|>"]


def texts(seed: int = 7) -> list[str]:
    return list(proof_texts(seed, ADDED, lambda ids: "".join(map(chr, ids)), 126))


def test_the_proof_is_over_more_than_one_mebibyte_of_every_kind():
    assert len(KINDS) * KIND_BYTES > 1 << 20
    assert sum(len(text.encode()) for text in texts()) > 1 << 20


def test_the_same_seed_gives_the_same_texts():
    assert texts(7) == texts(7)
    assert texts(7) != texts(8)


def test_every_added_token_comes_alone_and_inside_text():
    found = list(texts_of_added_tokens(Random(1), ADDED))
    for token in ADDED:
        assert token in found
        assert any(token in text and not text.startswith(token) for text in found)


def test_every_kind_of_text_that_engines_disagree_on_is_there():
    text = "".join(texts())
    for wanted in ("def ", "\u200d", "\ufe0f", "\t\t", "   ", "\n\n", "000", "\x00", "\x7f", '{"', "\r\n"):
        assert wanted in text
    scripts = {unicodedata.name(character, "").split(" ")[0] for character in set(text)}
    assert {
        "CJK",
        "HIRAGANA",
        "HANGUL",
        "ARABIC",
        "HEBREW",
        "THAI",
        "COMBINING",
        "CYRILLIC",
        "GREEK",
    } <= scripts
    planes = {ord(character) >> 16 for character in text}
    assert planes == set(range(17))
