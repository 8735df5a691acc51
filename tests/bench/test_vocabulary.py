"""Vocabularies made larger."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import meshd
from bench import BenchError
from bench.vocabulary import entries_of, with_entries

DEMO = Path(meshd.__file__).parent / "backend" / "tokenizer" / "tokenizer.json"


def test_a_vocabulary_that_is_large_enough_stays_the_file_it_is(tmp_path: Path) -> None:
    assert with_entries(DEMO, 10, tmp_path) == DEMO
    assert not list(tmp_path.iterdir())


def test_a_small_vocabulary_gets_as_many_entries_as_wanted_and_still_encodes(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    wide = with_entries(DEMO, 5000, tmp_path)
    assert entries_of(wide) == 5000 > entries_of(DEMO)
    loaded = tokenizers.Tokenizer.from_file(str(wide))
    text = "A request is forwarded to the upstream."
    assert loaded.get_vocab_size() == 5000
    assert loaded.decode(loaded.encode(text).ids) == text


@pytest.mark.parametrize("text", ["no JSON", "{}", json.dumps({"model": {"vocab": {"a": 0}, "merges": []}})])
def test_what_is_no_bpe_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "odd.json"
    path.write_text(text)
    with pytest.raises(BenchError, match="no BPE"):
        with_entries(path, 100, tmp_path)
