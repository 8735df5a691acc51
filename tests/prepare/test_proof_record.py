"""A proof is of one file by engines of one version."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshd.prepare import proof_record
from meshd.prepare.proof_record import file_digest, proof_key


def test_the_key_of_a_proof_is_another_one_for_another_file_engine_or_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_text("{}")
    digest = file_digest(file)
    first = proof_key(digest, ("tokenizers",))
    assert proof_key(file_digest(file), ("tokenizers",)) == first
    found = {first, proof_key(digest, ("tokenizers", "fastokens")), proof_key(digest, ("nobody's",))}
    file.write_text("[]")
    found.add(proof_key(file_digest(file), ("tokenizers",)))
    monkeypatch.setattr(proof_record, "version", lambda package: "0.0.0")
    found.add(proof_key(digest, ("tokenizers",)))
    assert len(found) == 5
