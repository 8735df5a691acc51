"""The layout of the rings segment: aligned words, one writer a cache line, no overlap."""

from __future__ import annotations

import itertools
from collections import defaultdict

import pytest

from meshd.errors import StartupError
from meshd.memory import HEADER_BYTES, PAGE, Segment
from meshd.prepare.layout import (
    DEPTH,
    RECORD_BYTES,
    RINGS_KIND,
    RINGS_VERSION,
    RingsLayout,
    attempt_of,
    create_rings,
    endpoint_number_of,
    job_word,
    needs_of,
    open_layout,
)

SEATS = [(1, 1), (3, 2), (8, 16)]


def ranges(layout: RingsLayout) -> list[tuple[int, int, str]]:
    """Every range of bytes with the process that writes it."""
    found: list[tuple[int, int, str]] = []
    for i in range(layout.io_seats):
        found += [(word * 8, 8, f"io{i}") for word in (layout.waiting_word(i), layout.epoch_word(i))]
    found += [(layout.retire_word(w) * 8, 8, f"leader of {w}") for w in range(layout.prepare_seats)]
    for i, w in itertools.product(range(layout.io_seats), range(layout.prepare_seats)):
        pair = layout.pair(i, w)
        of_io = (pair.tail_word, pair.valid_from_word, pair.taken_word)
        of_worker = (pair.head_word, pair.done_word)
        found += [(word * 8, 8, f"io{i}") for word in of_io]
        found += [(word * 8, 8, f"prepare{w}") for word in of_worker]
        found.append((pair.withdrawn_word * 8, 8 * DEPTH, f"io{i}"))
        found.append((pair.descriptors_at, DEPTH * RECORD_BYTES, f"io{i}"))
        found.append((pair.completions_at, DEPTH * RECORD_BYTES, f"prepare{w}"))
    return found


@pytest.mark.parametrize(("io_seats", "prepare_seats"), SEATS)
def test_ranges_are_aligned_inside_the_segment_and_do_not_overlap(io_seats: int, prepare_seats: int) -> None:
    layout = RingsLayout(io_seats, prepare_seats)
    spans = sorted(ranges(layout))
    assert all(start % 8 == 0 for start, _, _ in spans)
    assert all(start + length <= after for (start, length, _), (after, _, _) in itertools.pairwise(spans))
    assert spans[0][0] >= HEADER_BYTES + 64
    assert spans[-1][0] + spans[-1][1] <= layout.size


@pytest.mark.parametrize(("io_seats", "prepare_seats"), SEATS)
def test_no_cache_line_has_two_writers(io_seats: int, prepare_seats: int) -> None:
    writers = defaultdict(set)
    for start, length, writer in ranges(RingsLayout(io_seats, prepare_seats)):
        for line in range(start // 64, (start + length - 1) // 64 + 1):
            writers[line].add(writer)
    assert all(len(names) == 1 for names in writers.values())


@pytest.mark.parametrize(("io_seats", "prepare_seats"), SEATS)
def test_the_words_a_process_polls_are_on_no_line_pair_with_another_writer(
    io_seats: int, prepare_seats: int
) -> None:
    layout = RingsLayout(io_seats, prepare_seats)
    for i, w in itertools.product(range(io_seats), range(prepare_seats)):
        pair = layout.pair(i, w)
        lines = {pair.tail_word // 16, pair.taken_word // 16, pair.head_word // 16, pair.withdrawn_word // 16}
        assert len(lines) == 4
    cells = [layout.waiting_word(i) // 16 for i in range(io_seats)]
    assert len(set(cells)) == io_seats


def test_the_segment_opens_for_the_same_seats_only() -> None:
    segment = create_rings(3, 2)
    mapped = Segment.attach(segment.fd, RINGS_KIND, RINGS_VERSION)
    assert open_layout(mapped, 3, 2).pair(2, 1).completions_at + DEPTH * RECORD_BYTES <= mapped.size
    with pytest.raises(StartupError, match="check line"):
        open_layout(mapped, 2, 3)


def test_a_segment_without_the_check_line_is_refused() -> None:
    with pytest.raises(StartupError, match="check line"):
        open_layout(Segment.create(RINGS_KIND, 100 * PAGE, RINGS_VERSION), 1, 1)


def test_a_pair_of_seats_that_do_not_exist_is_an_index_error() -> None:
    for pair in [(1, 0), (0, 2), (-1, 0)]:
        with pytest.raises(IndexError):
            RingsLayout(1, 2).pair(*pair)


def test_the_job_word_holds_endpoint_needs_and_attempt() -> None:
    word = job_word(513, 0x8007, 1)
    assert (endpoint_number_of(word), needs_of(word), attempt_of(word)) == (513, 0x8007, 1)
