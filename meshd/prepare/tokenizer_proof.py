"""Both proofs about a tokenizer that was loaded: its fast engine is equal, and its texts may be cut.

They run together in one child that is thrown away (``engine_proof``); what they find is remembered
(``proof_record``), unless the child came to no end: that says nothing about the tokenizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, Final, NamedTuple

import tokenizers

from meshd.prepare.child_answers import NoAnswer, answers_of_child
from meshd.prepare.cut_proof import Cuts, both, judge_added_tokens, prove_cuts, spanning_texts
from meshd.prepare.engine_proof import PROOF_SEED, Encode, find_difference
from meshd.prepare.proof_record import Proof, Proofs, proof_key
from meshd.prepare.proof_text import proof_texts

REFERENCE: Final = "tokenizers"
FAST: Final = "fastokens"

LoadFast = Callable[[str], tuple[Encode | None, str]]
"""Loads the fast engine from a file that still has this digest; else says why there is none."""


class Found(NamedTuple):
    """``difference``: why the fast engine is not equal, empty if it is or there is none."""

    difference: str
    cuts: Cuts
    is_final: bool = True

    @classmethod
    def of(cls, proof: Proof) -> Found:
        """Return what a kept proof has found."""
        return cls(proof.difference, Cuts(proof.head, proof.pieces))


class Unproved:
    """A tokenizer whose proof, named ``key``, is still to be run. ``fast``: ``None`` if there is none.

    ``digest``: of its file. With ``load_fast`` the fast engine is loaded when the proof is about to be run:
    that takes a second for a large vocabulary, three times what the reference takes, and nothing uses it
    before the proof has ended.
    """

    def __init__(
        self,
        digest: str,
        reference: tokenizers.Tokenizer,
        fast: Encode | None = None,
        load_fast: LoadFast | None = None,
    ) -> None:
        self._digest = digest
        self.reference = reference
        self.fast = fast
        self._load_fast = load_fast
        self.missing = ""
        self.key = self._key()

    @property
    def is_complete(self) -> bool:
        """Whether nothing is left to load."""
        return self._load_fast is None

    def complete(self) -> None:
        """Load the fast engine if that was left until now; ``missing`` then tells why there is none.

        Starts no thread.
        """
        if self._load_fast is not None:
            self.fast, self.missing = self._load_fast(self._digest)
            self._load_fast = None
            self.key = self._key()

    def work(self) -> tuple[str, str, str]:
        """Run the proofs, in a child alone; texts are cut by the engine that will be used."""
        reference, fast = self.reference, self.fast
        encode = encode_with(reference)
        texts = list(texts_for(reference))
        difference = find_difference(encode, fast, texts) if fast is not None else ""
        used = encode if fast is None or difference else fast
        ids = range(reference.get_vocab_size())
        entries = (reference.decode([number], skip_special_tokens=False) for number in ids)
        cuts = prove_cuts(used, chain(texts, spanning_texts(entries)))
        return difference, cuts.head, cuts.pieces

    def found(self, answers: Sequence[str]) -> Found:
        """Return what the child's answers mean."""
        difference, head, pieces = answers
        added = self.reference.get_added_tokens_decoder().values()
        normalizer = self.reference.normalizer
        judged = judge_added_tokens(added, str if normalizer is None else normalizer.normalize_str)
        return Found(difference, both(judged, Cuts(head, pieces)))

    def proof_of(self, found: Found) -> Proof | None:
        """Return what of ``found`` is worth keeping, ``None`` for what another try may find otherwise."""
        if not found.is_final:
            return None
        return Proof(self.key, found.difference, found.cuts.head, found.cuts.pieces)

    def without_fast(self) -> Unproved:
        """Return what is left to prove when the child with the fast engine came to no end."""
        return Unproved(self._digest, self.reference)

    def find(self, proofs: Proofs) -> Found | None:
        """Return what the proof found if it was run before."""
        known = proofs.find(self.key)
        return None if known is None else Found.of(known)

    def _key(self) -> str:  # before it is complete it counts on its fast engine
        is_alone = self.fast is None and self._load_fast is None
        return proof_key(self._digest, (REFERENCE,) if is_alone else (REFERENCE, FAST))

    def __repr__(self) -> str:
        return f"Unproved({self.key!r}, is_complete={self.is_complete})"


def prove(unproved: Unproved) -> Found:
    """Run the proofs and wait for them."""
    try:
        return unproved.found(answers_of_child(unproved.work))
    except NoAnswer as error:
        reason = str(error)
        if unproved.fast is None:
            return Found("", Cuts(reason, reason), is_final=False)
        return Found(reason, prove(unproved.without_fast()).cuts, is_final=False)


def texts_for(reference: tokenizers.Tokenizer) -> Iterator[str]:
    """Yield the texts of the proofs of one tokenizer."""
    added = [token.content for token in reference.get_added_tokens_decoder().values()]

    def decode(ids: list[int]) -> str:
        return reference.decode(ids, skip_special_tokens=False)

    return proof_texts(PROOF_SEED, added, decode, reference.get_vocab_size())


def encode_with(engine: Any) -> Encode:
    """Return the function that encodes with ``engine``, special tokens recognised and none added."""
    encode = engine.encode

    def ids(text: str) -> list[int]:
        found: list[int] = encode(text, add_special_tokens=False).ids
        return found

    return ids
