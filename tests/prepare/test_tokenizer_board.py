"""What the controller wants and the leaders tell, through shared memory."""

from __future__ import annotations

import pytest

from meshd.errors import StartupError
from meshd.memory import Segment
from meshd.prepare.tokenizer_board import (
    MAX_ENTRIES,
    MAX_TEXT_BYTES,
    SEGMENT_KIND,
    Copy,
    Desired,
    Entry,
    Loaded,
    Report,
    TokenizerBoard,
)
from meshd.publication import DoesNotFit


@pytest.fixture
def segment() -> Segment:
    return TokenizerBoard.create(4)


def entry(name: str, serial: int, **members: object) -> Entry:
    return Entry(f"id-{name}", name, f"/{name}", Copy(serial, f"/{name}"), **members)  # type: ignore[arg-type]


def test_a_reader_finds_the_entries_as_the_controller_published_them(segment: Segment) -> None:
    writer, reader = TokenizerBoard(segment), TokenizerBoard.attach(segment.fd)
    assert (reader.generation(), reader.desired(), reader.leaders) == (0, Desired(), 4)
    replaced = entry("a", 1, next=Copy(3, "/new", "/t", 2), origin="label", status="processing")
    desired = Desired((replaced, entry("b", 2)), 3, {"gone": "/gone"}, "/a")
    writer.publish(desired)
    assert reader.desired() == desired
    assert reader.desired() is reader.desired()
    assert (replaced.generation, replaced.source) == (2, "/a")


def test_as_many_entries_as_may_be_fit_with_the_longest_texts(segment: Segment) -> None:
    def copy(serial: int) -> Copy:
        return Copy(serial, "s" * MAX_TEXT_BYTES, "t" * MAX_TEXT_BYTES)

    entries = tuple(
        Entry("i" * 36, f"{n}" + "n" * 250, "s" * MAX_TEXT_BYTES, copy(n), copy(n + 500), message="m" * 512)
        for n in range(MAX_ENTRIES)
    )
    board = TokenizerBoard(segment)
    board.publish(Desired(entries, 1000))
    assert TokenizerBoard(segment).desired().entries == entries
    with pytest.raises(DoesNotFit):
        board.publish(Desired(entries * 9, 1000))
    report = Report(1)
    for n in range(2 * MAX_ENTRIES):
        report = report.with_copy(n, Loaded("failed", message="é" * 4000))
    board.report(3, report)
    assert TokenizerBoard(segment).reports()[3] == report


def test_reports_of_leaders_stand_side_by_side(segment: Segment) -> None:
    board, reader = TokenizerBoard(segment), TokenizerBoard(segment)
    first = Report(10, {1: Loaded("loaded", "tokenizers", 300)}, frozenset({1}))
    board.report(0, first)
    board.report(2, Report(12).with_copy(7, Loaded("failed", message="no such file")))
    assert reader.reports()[0] == first
    assert reader.reports()[1] == Report()
    assert reader.reports()[2].copies[7].message == "no such file"


def test_there_is_a_tokenizer_once_a_leader_has_one_in_force_that_is_still_wanted(segment: Segment) -> None:
    board, reader = TokenizerBoard(segment), TokenizerBoard(segment)
    assert not reader.has_tokenizer()
    board.publish(Desired((entry("a", 1),), 1))
    board.report(0, Report(10, {1: Loaded("loaded")}))
    assert not reader.has_tokenizer()
    board.report(0, Report(10, {1: Loaded("loaded")}, frozenset({1})))
    assert reader.has_tokenizer() and reader.has_tokenizer()
    board.publish(Desired((), 1))
    assert not reader.has_tokenizer()


def test_a_removed_copy_is_known_at_once_and_no_other_one(segment: Segment) -> None:
    board, reader = TokenizerBoard(segment), TokenizerBoard(segment)
    board.remove(5)
    assert reader.removals() == 1
    assert [serial for serial in range(1, 3000) if reader.is_removed(serial)] == [5]


def test_a_fast_engine_that_one_worker_turns_off_is_off_for_all_and_for_that_copy_alone(
    segment: Segment,
) -> None:
    one, other = TokenizerBoard(segment).engine_switch(5), TokenizerBoard(segment).engine_switch(5)
    successor = TokenizerBoard(segment).engine_switch(5 + 1024)  # shares the word
    assert not other.is_off
    one.turn_off()
    assert other.is_off and not successor.is_off
    assert not TokenizerBoard(segment).engine_switch(6).is_off


def test_a_segment_that_is_none_is_refused() -> None:
    with pytest.raises(StartupError):
        TokenizerBoard(Segment.create(SEGMENT_KIND, 1 << 20))
