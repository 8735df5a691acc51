from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from random import Random

import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers

from meshd.prepare import tokenizer_proof
from meshd.prepare.cut_proof import Cuts, both, judge_added_tokens, prove_cuts, spanning_texts
from meshd.prepare.proof_text import KINDS, texts_of_kind
from tests.fakes import small_tokenizers as small

Make = Callable[[], Tokenizer]


def text_of_proof(reference: Tokenizer) -> Iterator[str]:
    """A part of the proof's texts: those with most cuts."""
    rng = Random(1)
    for kind in (KINDS[0], KINDS[1], KINDS[2], KINDS[-1]):
        yield from texts_of_kind(rng, kind, 6000)


def verdict(make: Make, monkeypatch: pytest.MonkeyPatch) -> Cuts:
    monkeypatch.setattr(tokenizer_proof, "texts_for", text_of_proof)
    return tokenizer_proof.prove(tokenizer_proof.Unproved("key", make(), None)).cuts


RIGHT: dict[str, Make] = {
    "byte level": small.byte_level,
    "byte level with a space before": lambda: small.byte_level(add_prefix_space=True),
    "NFC": lambda: small.byte_level(normalizer=normalizers.NFC()),
    "NFKC and lower case": lambda: small.byte_level(
        normalizer=normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    ),
    "metaspace first": small.metaspace_bpe,
    "metaspace always": lambda: small.metaspace_bpe("always"),
    "one BPE over all": lambda: small.whole_text_bpe(prepends=False),
    "WordPiece": small.word_piece,
    "Unigram": small.unigram,
    "ends of words": small.end_of_word,
    "added token that eats what is before": lambda: small.with_added("mask", lstrip=True),
    "added token that is a word": lambda: small.with_added("mask", single_word=True),
    "a phrase that is split off": lambda: small.split_by(r"New York| ?\p{L}+|\s+|[^\s\p{L}]+"),
}
HEADS_ONLY: dict[str, Make] = {
    "one BPE over all, prepended to": small.whole_text_bpe,
    "ends stripped": lambda: small.byte_level(normalizer=normalizers.Strip()),
    "split by count": lambda: small.split_by(r"[\s\S]{1,10}"),
    "added token that eats the space": lambda: small.with_added("mask", rstrip=True),
    "added token that begins with a space": lambda: small.with_added(" mask", single_word=True),
}
WRONG: dict[str, Make] = {
    "words together": lambda: small.whole_text_bpe(spans_words=True),
    "two words for one": lambda: small.split_by(r"[A-Za-z]+ [A-Za-z]+"),
    "no spaces": lambda: small.byte_level(normalizer=normalizers.Replace(" ", "")),
    "added token of two words": lambda: small.with_added("foo bar"),
    "added token that ends with a space": lambda: small.with_added("foo "),
}


@pytest.mark.parametrize("make", RIGHT.values(), ids=RIGHT)
def test_tokenizers_that_work_word_by_word_pass(make, monkeypatch):
    assert verdict(make, monkeypatch) == Cuts("", "")


@pytest.mark.parametrize("make", HEADS_ONLY.values(), ids=HEADS_ONLY)
def test_those_that_look_at_the_start_of_a_text_pass_for_heads_alone(make, monkeypatch):
    cuts = verdict(make, monkeypatch)
    assert cuts.head == ""
    assert cuts.pieces


@pytest.mark.parametrize("make", WRONG.values(), ids=WRONG)
def test_those_that_work_across_words_fail(make, monkeypatch):
    cuts = verdict(make, monkeypatch)
    assert cuts.head
    assert cuts.pieces


def test_an_entry_of_the_vocabulary_across_a_cut_is_tried_though_no_text_has_it():
    """A BPE over the whole text whose vocabulary has just one entry of two words."""

    def tokenizer(*merges: tuple[str, str]) -> Tokenizer:
        letters = dict.fromkeys(" abcdefghijklmnopqrstuvwxyzQX")
        entries = [*letters, *("".join(pair) for pair in merges)]
        ids = {entry: number for number, entry in enumerate(entries)}
        return Tokenizer(models.BPE(ids, list(merges)))

    texts = ["the end of the day", "a b c"]
    for merges in ([("Q", "X")], [("Q", " "), ("Q ", "X")]):
        reference = tokenizer(*merges)
        encode = tokenizer_proof.encode_with(reference)
        assert prove_cuts(encode, texts) == Cuts("", "")
        entries = [reference.id_to_token(number) for number in range(reference.get_vocab_size())]
        cuts = prove_cuts(encode, [*texts, *spanning_texts(entries)])
        assert bool(cuts.head) == (len(merges) == 2)


def test_entries_that_a_cut_can_go_through_are_put_where_one_does():
    assert list(spanning_texts(["a", " a", "b c", "x ", "1 2"])) == ["b c", "a b c a", "x a", "a x a a"]
    assert len(list(islice(spanning_texts(["b c"] * 10_000), 10_000))) == 4000


@pytest.mark.parametrize("count", [1, 63, 64, 65, 500])
def test_up_to_64_cuts_of_each_text_are_tried(count):
    tried: set[str] = set()

    def encode(text: str) -> list[int]:
        tried.add(text)
        return list(text.encode())

    text = "a " * count + "b"
    assert prove_cuts(encode, [text]) == Cuts("", "")
    heads = {prefix for prefix in tried if prefix.endswith("a") and not prefix.startswith(" ")}
    assert len(heads) >= min(count, 10)
    assert len(tried) >= min(count, 64)


def test_one_cut_that_changes_the_ids_before_it_fails():
    def encode(text: str) -> list[int]:
        return [0, *text.encode()] if text.endswith("end of the") else list(text.encode())

    assert prove_cuts(encode, ["a b", "the end of the day", "c d"]).head == (
        "the ids of an opening of proof text 1 are no opening of its ids"
    )


def test_long_texts_are_tried_in_parts_and_as_a_whole():
    word = "alpha "

    def fails_far_on(text: str) -> list[int]:
        ids = list(text.encode())
        return [0, *ids] if len(text) > 1500 and not text.endswith(".") else ids

    def fails_at_once(text: str) -> list[int]:
        ids = list(text.encode())
        return [0, *ids] if 60 < len(text) < 90 else ids

    text = word * 600 + "."
    assert prove_cuts(fails_far_on, [text]).head
    assert prove_cuts(fails_at_once, [text]).head


def test_added_tokens_are_judged_as_they_are_looked_for():
    def judged(content: str, normalize: Callable[[str], str] = str, **options: bool) -> Cuts:
        return judge_added_tokens([AddedToken(content, **options)], normalize)

    def marked(text: str) -> str:
        return text.replace(" ", "\u2581")

    assert judged("<|im_start|>") == Cuts("", "")
    assert judged("  \n") == Cuts("", "")
    assert judged("foo\u2581bar", normalized=True) == Cuts("", "")
    assert judged("foo\u2581bar", marked, normalized=True).head
    assert judged("foo\u2581bar", marked, normalized=False) == Cuts("", "")
    assert judged("foo\u00a0bar", lambda text: text.replace("\u00a0", " "), normalized=True).head
    assert judged("<x>", rstrip=True) == Cuts("", "")
    assert judged("x", rstrip=True).pieces
    assert judged(" x", single_word=True).pieces
    assert judged(" x", single_word=False) == Cuts("", "")


def test_both_proofs_must_hold():
    assert both(Cuts("", ""), Cuts("", "")) == Cuts("", "")
    assert both(Cuts("", "a"), Cuts("", "")) == Cuts("", "a")
    assert both(Cuts("", ""), Cuts("b", "b")) == Cuts("b", "b")
    assert both(Cuts("c", ""), Cuts("", "")).pieces == "c"
