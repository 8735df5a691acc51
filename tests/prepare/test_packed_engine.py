from __future__ import annotations

from pathlib import Path

import pytest

import meshd
from meshd.api.prefix_key import pack_token_ids
from meshd.prepare.packed_engine import PackedEngine, packing

SMALL = Path(meshd.__file__).parent / "backend" / "tokenizer"


def flat(texts: list[str], add_special_tokens: bool) -> tuple[bytes, bytes]:
    assert not add_special_tokens
    return b"".join(pack_token_ids(list(text.encode())) for text in texts), b"offsets"


def test_the_ids_of_a_text_are_a_list_or_packed():
    engine = PackedEngine(flat)
    assert (engine("ab"), engine.pack("ab")) == ([97, 98], b"\x61\0\0\0\x62\0\0\0")
    assert (engine(""), engine.pack("")) == ([], b"")


def test_an_engine_that_has_lists_alone_is_packed():
    pack = packing(lambda text: [*text.encode(), 2**32 - 1])
    assert pack("a") == b"\x61\0\0\0\xff\xff\xff\xff"
    assert packing(PackedEngine(flat))("ab") == b"\x61\0\0\0\x62\0\0\0"


def test_the_fast_engine_gives_the_same_ids_by_both_of_its_calls():
    fastokens = pytest.importorskip("fastokens")
    engine = fastokens.Tokenizer.from_file(str(SMALL / "tokenizer.json"))
    packed = PackedEngine(engine.encode_batch_flat)
    for text in ("", "a", "<|user|>Hi<|end|>", "Ünïcode 河流 👩‍👩‍👧 \n\n" * 50):
        assert packed(text) == engine.encode(text, add_special_tokens=False).ids
    with pytest.raises(UnicodeEncodeError):
        packed("\ud800")
