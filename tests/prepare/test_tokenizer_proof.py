from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

import meshd
from meshd.prepare import tokenizer_proof
from meshd.prepare.cut_proof import Cuts
from meshd.prepare.proof_record import Proof
from meshd.prepare.tokenizer_proof import Unproved, encode_with, prove, texts_for

FILE = Path(meshd.__file__).parent / "backend" / "tokenizer" / "tokenizer.json"


class Remembered:
    def __init__(self) -> None:
        self.proofs: dict[str, Proof] = {}

    def find(self, key: str) -> Proof | None:
        return self.proofs.get(key)

    def keep(self, proof: Proof) -> None:
        self.proofs[proof.key] = proof


@pytest.fixture
def reference(monkeypatch: pytest.MonkeyPatch) -> Tokenizer:
    monkeypatch.setattr(tokenizer_proof, "texts_for", lambda reference: iter(("one two three", "Hi\u200d")))
    return Tokenizer.from_file(str(FILE))


def dies(text: str) -> list[int]:
    os._exit(3)


def test_texts_are_cut_by_the_engine_that_will_be_used(reference):
    encode = encode_with(reference)

    def heads_differ(text: str) -> list[int]:
        return [*encode(text), 0] if text == "one" else encode(text)

    def joiner_differs(text: str) -> list[int]:
        return [*heads_differ(text), 0] if "\u200d" in text else heads_differ(text)

    assert prove(Unproved("k", reference, encode)) == ("", Cuts("", ""), True)
    difference, cuts, _ = prove(Unproved("k", reference, heads_differ))
    assert (difference, bool(cuts.head)) == ("", True)
    difference, cuts, _ = prove(Unproved("k", reference, joiner_differs))
    assert (bool(difference), cuts) == (True, Cuts("", "")), "the reference will be used"


def test_a_proof_that_was_run_is_found_for_the_same_file_and_engines(reference):
    remembered = Remembered()
    unproved = Unproved("k", reference, encode_with(reference))
    assert unproved.find(remembered) is None
    remembered.keep(Proof(unproved.key, "", "", "a reason"))
    assert Unproved("k", reference, encode_with(reference)).find(remembered) == (
        "",
        Cuts("", "a reason"),
        True,
    )
    assert Unproved("k", reference).find(remembered) is None
    assert Unproved("l", reference, encode_with(reference)).find(remembered) is None


def test_the_fast_engine_may_be_loaded_later_and_may_then_be_missing(reference):
    encode = encode_with(reference)
    digests = []

    def load(digest: str) -> tuple[Any, str]:
        digests.append(digest)
        return encode, ""

    unproved = Unproved("k", reference, load_fast=load)
    assert (unproved.is_complete, unproved.fast, digests) == (False, None, [])
    assert unproved.key == Unproved("k", reference, encode).key, "the proof of another leader is found"
    for _ in range(2):
        unproved.complete()
    assert (unproved.is_complete, unproved.fast, unproved.missing, digests) == (True, encode, "", ["k"])
    without = Unproved("k", reference, load_fast=lambda digest: (None, "it is not here"))
    without.complete()
    assert (without.fast, without.missing) == (None, "it is not here")
    assert without.key == Unproved("k", reference).key


def test_a_proof_that_came_to_no_end_is_not_final(reference):
    difference, cuts, is_final = prove(Unproved("k", reference, dies))
    assert "died" in difference
    assert cuts == Cuts("", ""), "the reference was asked in a child of its own"
    assert not is_final


def test_added_tokens_count_beside_what_was_tried(reference):
    reference.add_tokens(["foo bar"])
    assert "foo bar" in prove(Unproved("k", reference, None)).cuts.head


def test_texts_have_every_added_token():
    reference = Tokenizer.from_file(str(FILE))
    texts = list(texts_for(reference))
    assert {token.content for token in reference.get_added_tokens_decoder().values()} <= set(texts)
