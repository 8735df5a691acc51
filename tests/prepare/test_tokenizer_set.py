"""Which tokenizer a model gets."""

from __future__ import annotations

from meshd.prepare.tokenizer import LoadedTokenizer
from meshd.prepare.tokenizer_board import TokenizerBoard
from meshd.prepare.tokenizer_set import TokenizerSet


def by_bytes(text: str) -> list[int]:
    return list(text.encode())


OWN, OTHER, DEFAULT = (LoadedTokenizer(by_bytes, source=name) for name in ("own", "other", "default"))


def test_the_entry_of_the_model_wins_over_the_default() -> None:
    entries = TokenizerSet({"m1": OWN, "default": DEFAULT})
    assert entries.find("m1") is OWN
    assert entries.find("m2") is DEFAULT
    assert entries.find("") is DEFAULT
    assert entries.find("unknown") is DEFAULT


def test_without_a_default_only_a_request_without_model_takes_the_only_entry() -> None:
    assert TokenizerSet({"m1": OWN}).find("") is OWN
    assert TokenizerSet({"m1": OWN}).find("m2") is None
    assert TokenizerSet({"m1": OWN, "m2": OTHER}).find("unknown") is None
    assert TokenizerSet({}).find("") is None


def test_the_first_is_the_one_that_was_registered_first() -> None:
    assert TokenizerSet({"m2": OTHER, "m1": OWN}).first() is OTHER
    assert TokenizerSet({}).first() is None


def test_what_is_removed_is_not_found_from_then_on() -> None:
    board = TokenizerBoard(TokenizerBoard.create(1))
    board.remove(99)
    entries = TokenizerSet(
        {"m1": OWN, "m2": OTHER, "default": DEFAULT}, {"m1": 1, "m2": 2, "default": 3}, board
    )
    assert entries.find("m1") is OWN
    board.remove(1)
    assert entries.find("m1") is DEFAULT
    board.remove(3)
    assert entries.find("m1") is None
    assert entries.find("") is OTHER
    board.remove(2)
    assert entries.first() is None
