"""A proof is of one file by engines of one version."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshd.prepare import proof_record
from meshd.prepare.proof_record import proof_key


def test_the_key_of_a_proof_is_another_one_for_another_file_engine_or_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_text("{}")
    first = proof_key(file, ("tokenizers",))
    assert proof_key(file, ("tokenizers",)) == first
    found = {first, proof_key(file, ("tokenizers", "fastokens")), proof_key(file, ("nobody's",))}
    file.write_text("[]")
    found.add(proof_key(file, ("tokenizers",)))
    file.write_text("{}")
    monkeypatch.setattr(proof_record, "version", lambda package: "0.0.0")
    found.add(proof_key(file, ("tokenizers",)))
    assert len(found) == 5
