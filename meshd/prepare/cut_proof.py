"""The proof that texts may be cut at safe cuts, between a letter and one space before a letter.

Two things are wanted. *Head*: the ids of the text before a cut open the ids of the whole text. *Pieces*: the
ids of the text between cuts, put one after the other, are the ids of the whole text. Both hold where nothing
in the tokenizer works across a cut:

- normalizers: a space neither composes with a letter nor is composed with; stripping and prepending change
  the ends of what is encoded, so with them only heads may hold;
- added tokens: none may contain a letter and a space after it, nor, for pieces, eat the space after a letter
  (``rstrip``) or look at what stands before its own first space (``single_word``);
- pre-tokenizers: the usual ones split between a letter and a space. Those that count characters, or take
  several words for one, do not;
- models: BPE, Unigram and WordPiece decide alike on both sides as long as no entry of the vocabulary holds a
  letter and a space after it, even where nothing splits the text before (SentencePiece). An entry for the end
  of a word without anything that splits words breaks heads.

Patterns and merges are too free to be judged by reading them, so it is tried: on all texts of the engine
proof, and on a text for each entry of the vocabulary that a cut would go through. Only added tokens are
judged by what they are, because the texts could miss the one that matters.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final, Protocol

from meshd.prepare.engine_proof import Encode

CUTS_A_TEXT: Final = 64
PART: Final = 512
"""Characters of a text at one go. With all of it for each cut the proof takes three times as long."""
_CUTS_OF_ALL: Final = 4
_SPANNING_TEXTS: Final = 2000  # a tokenizer with more such entries fails on the first of them

_SAFE_CUT: Final = re.compile(r"(?<=[A-Za-z]) (?=[A-Za-z])")
_SPANS: Final = re.compile(r"[A-Za-z] ")


@dataclass(frozen=True, slots=True)
class Cuts:
    """Why texts may not be cut, empty where the proof holds. ``pieces`` never holds without ``head``."""

    head: str = "it was not proved"
    pieces: str = "it was not proved"


class AddedToken(Protocol):
    """``tokenizers.AddedToken``."""

    @property
    def content(self) -> str: ...
    @property
    def rstrip(self) -> bool: ...
    @property
    def single_word(self) -> bool: ...
    @property
    def normalized(self) -> bool: ...


def prove_cuts(encode: Encode, texts: Iterable[str]) -> Cuts:
    """Try up to ``CUTS_A_TEXT`` safe cuts of each text."""
    pieces = ""
    for number, text in enumerate(texts):
        cuts = _chosen_cuts(text)
        if not cuts:
            continue
        whole = encode(text)
        if not _heads_hold(encode, text, cuts, whole):
            head = f"the ids of an opening of proof text {number} are no opening of its ids"
            return Cuts(head, head)
        if not pieces and not _joins(encode, text, cuts, whole):
            pieces = f"the ids of the pieces of proof text {number} are not its ids"
    return Cuts("", pieces)


def judge_added_tokens(tokens: Iterable[AddedToken], normalize: Callable[[str], str]) -> Cuts:
    """Say what forbids to cut in the added tokens. ``normalize``: the tokenizer's normalizer."""
    gap = re.search("a(.+)b", normalize("a b"), re.DOTALL)
    if gap is None:
        reason = "its normalizer leaves nothing between two words"
        return Cuts(reason, reason)
    pieces = ""
    for token in tokens:
        # Tokens that are looked for in normalized text are normalized themselves.
        content = normalize(token.content) if token.normalized else token.content
        space = re.escape(gap[1][0]) if token.normalized else " "
        if _SPANS.search(token.content) or re.search(f"[A-Za-z]{space}", content):
            reason = f"the added token {token.content!r} holds a letter before a space"
            return Cuts(reason, reason)
        if token.rstrip and re.search("[A-Za-z]$", content):
            pieces = f"the added token {token.content!r} takes the space behind it"
        if token.single_word and re.match(space, content):
            pieces = f"the added token {token.content!r} begins with a space and must be a word"
    return Cuts("", pieces)


def spanning_texts(entries: Iterable[str]) -> Iterator[str]:
    """Yield texts with those ``entries`` of a vocabulary, as text, that a safe cut can go through."""
    found = 0
    for entry in entries:
        if found < _SPANNING_TEXTS and _SPANS.search(entry):
            found += 1
            whole = re.sub(r" (?![A-Za-z])", " a", entry)  # so that there is a cut
            yield whole
            yield f"a {whole} a"


def both(one: Cuts, other: Cuts) -> Cuts:
    """Return what holds by both."""
    head = one.head or other.head
    return Cuts(head, head or one.pieces or other.pieces)


def _chosen_cuts(text: str) -> list[int]:
    cuts = [found.start() for found in _SAFE_CUT.finditer(text)]
    if len(cuts) <= CUTS_A_TEXT:
        return cuts
    return [cuts[number * len(cuts) // CUTS_A_TEXT] for number in range(CUTS_A_TEXT)]


def _heads_hold(encode: Encode, text: str, cuts: list[int], whole: list[int]) -> bool:
    if len(text) <= PART:
        return _all_open(encode, text, cuts, whole)
    if not _all_open(encode, text, cuts[:: -(-len(cuts) // _CUTS_OF_ALL)], whole):
        return False
    for start in range(0, len(text), PART):
        part = text[start : start + PART]
        within = [cut - start for cut in cuts if start < cut < start + len(part) - 1]
        if within and not _all_open(encode, part, within, encode(part)):
            return False
    return True


def _all_open(encode: Encode, text: str, cuts: Iterable[int], whole: list[int]) -> bool:
    for cut in cuts:
        ids = encode(text[:cut])
        if whole[: len(ids)] != ids:
            return False
    return True


def _joins(encode: Encode, text: str, cuts: list[int], whole: list[int]) -> bool:
    ids: list[int] = []
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        ids += encode(text[start:end])
    return ids == whole
