"""Small tokenizers of each make that models come with, trained or written here in a moment."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from random import Random
from typing import Any, Final

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from meshd.prepare.proof_text import KINDS

_SPECIAL: Final = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]


def corpus(pieces: int = 4000) -> Iterator[str]:
    """Yield lines of English, code, JSON and a little of the rest."""
    rng = Random(5)
    kinds = [KINDS[0]] * 6 + [KINDS[1], KINDS[2], *KINDS[3:5]]
    for _ in range(pieces // 20):
        kind = rng.choice(kinds)
        yield "".join(kind(rng) for _ in range(20))


def byte_level(*, add_prefix_space: bool = False, normalizer: Any = None) -> Tokenizer:
    """As GPT-2 and most that came after."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    return _trained(tokenizer, trainers.BpeTrainer, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())


def metaspace_bpe(prepend_scheme: str = "first") -> Tokenizer:
    """As Llama 2 in its newer form: words split before the space that they begin with."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend_scheme)
    tokenizer.decoder = decoders.Metaspace()
    return _trained(tokenizer, trainers.BpeTrainer)


def whole_text_bpe(*, prepends: bool = True, spans_words: bool = False) -> Tokenizer:
    """As Llama 2 in its older form: one BPE over the whole text, spaces replaced by the normalizer.

    ``spans_words``: its vocabulary has entries of several words.
    """
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    steps: list[Any] = [normalizers.Replace(" ", "\u2581")]
    if prepends:
        steps.insert(0, normalizers.Prepend("\u2581"))
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.decoder = decoders.Replace("\u2581", " ")
    if not spans_words:  # as SentencePiece learns: no piece has the mark inside
        tokenizer.pre_tokenizer = pre_tokenizers.Split("\u2581", "merged_with_next")
    lines = ("sorry to say so, the end of the day " * 20 for _ in range(20)) if spans_words else corpus()
    _trained(tokenizer, trainers.BpeTrainer, lines=lines)
    if not spans_words:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([])
    return tokenizer


def word_piece() -> Tokenizer:
    """As BERT: lower case, accents gone, words split at spaces and punctuation."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return _trained(tokenizer, trainers.WordPieceTrainer)


def unigram(*, splits: bool = True) -> Tokenizer:
    """As T5, or without any split, as some SentencePiece models."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    lines = ("".join(filter(str.isascii, line)) for line in corpus(800))  # it wants all their characters
    _trained(tokenizer, trainers.UnigramTrainer, lines=lines, unk_token="<unk>")
    if not splits:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
    return tokenizer


def end_of_word() -> Tokenizer:
    """As CLIP: the last piece of a word is another than the same piece inside."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.BPEDecoder()
    return _trained(tokenizer, trainers.BpeTrainer, end_of_word_suffix="</w>")


def split_by(pattern: str) -> Tokenizer:
    """Byte level, split by ``pattern``."""
    tokenizer = byte_level()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return tokenizer


def with_added(content: str, **options: bool) -> Tokenizer:
    """Byte level with one more added token."""
    tokenizer = byte_level()
    tokenizer.add_tokens([AddedToken(content, **options)])
    return tokenizer


def _trained(
    tokenizer: Tokenizer, trainer: Callable[..., Any], lines: Iterable[str] | None = None, **options: Any
) -> Tokenizer:
    tokenizer.train_from_iterator(
        corpus() if lines is None else lines,
        trainer(vocab_size=1500, show_progress=False, special_tokens=_SPECIAL, **options),
    )
    return tokenizer
