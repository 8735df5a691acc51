"""A tokenizer with as many entries as a measurement asks for, made from one that has fewer."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path
from typing import Any, Final

from bench import BenchError

LONGEST: Final = 12  # characters of a half; two of them are then a word that some text might have


def entries_of(tokenizer: Path) -> int:
    """How many entries the vocabulary has, added ones included; 0 when the file has no such vocabulary."""
    try:
        return _count(json.loads(tokenizer.read_bytes()))
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def with_entries(tokenizer: Path, wanted: int, directory: Path) -> Path:
    """The same file if it has ``wanted`` entries; else a copy in ``directory`` with more merges at the end.

    The new entries join two of the old ones. They come last in the order of merges, so most texts keep their
    tokens; loading costs what a vocabulary of that size costs. Raises `BenchError` unless it is a BPE.
    """
    if entries_of(tokenizer) >= wanted:
        return tokenizer
    try:
        found = json.loads(tokenizer.read_bytes())
        _widen(found, wanted)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BenchError(f"{tokenizer} is no BPE that could be given {wanted} entries") from error
    path = directory / "tokenizer.json"
    path.write_text(json.dumps(found, ensure_ascii=False))
    return path


def _widen(found: dict[str, Any], wanted: int) -> None:
    vocab, merges = found["model"]["vocab"], found["model"]["merges"]
    number = 1 + max([*vocab.values(), *(one["id"] for one in found.get("added_tokens", ()))])
    are_pairs = bool(merges) and isinstance(merges[0], list)
    missing = wanted - _count(found)
    halves = [entry for entry in vocab if entry.isascii() and entry.isalpha() and len(entry) <= LONGEST]
    for first, second in combinations(halves, 2):
        if missing <= 0:
            return
        if first + second not in vocab:
            vocab[first + second] = number
            merges.append([first, second] if are_pairs else f"{first} {second}")
            number, missing = number + 1, missing - 1
    raise ValueError("too few entries to join")


def _count(found: dict[str, Any]) -> int:
    return len({*found["model"]["vocab"], *(one["content"] for one in found.get("added_tokens", ()))})
