"""The proof that a fast tokenizer engine gives the same ids as the reference, on text of every kind.

It runs, with the cut proof, in a forked child that is thrown away (proof_child.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

Encode = Callable[[str], list[int]]

PROOF_SEED: Final = 20240229


def find_difference(reference: Encode, candidate: Encode, texts: Iterable[str]) -> str:
    """Return why ``candidate`` is not equal to ``reference`` on ``texts``, empty if it is."""
    for number, text in enumerate(texts):
        expected = reference(text)
        try:
            ids = candidate(text)
        # A panic of a Rust engine is a BaseException; any of them fails the proof.
        except BaseException as error:
            return f"it raised {type(error).__name__} on proof text {number}"
        if ids != expected:
            return f"its ids differ on proof text {number} ({len(text)} characters)"
    return ""
