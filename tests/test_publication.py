from __future__ import annotations

import pytest

from meshd.memory import Segment
from meshd.publication import DoesNotFit, Publication


@pytest.fixture
def segment() -> Segment:
    return Segment.create("test", 64 << 10)


def test_nothing_published_reads_as_generation_zero(segment: Segment) -> None:
    assert Publication(segment).read() == (0, None)


def test_a_reader_sees_the_last_value_and_its_generation(segment: Segment) -> None:
    writer, reader = Publication(segment), Publication(segment)
    assert [writer.publish({"n": n}) for n in range(3)] == [1, 2, 3]
    assert reader.generation() == 3
    assert reader.read() == (3, {"n": 2})


def test_a_successor_of_the_writer_goes_on_counting(segment: Segment) -> None:
    Publication(segment).publish("old")
    assert Publication(segment).publish("new") == 2
    assert Publication(segment).read() == (2, "new")


def test_publications_in_one_segment_do_not_touch_each_other(segment: Segment) -> None:
    first, second = Publication(segment, 64, 4096), Publication(segment, 64 + 4096, 4096)
    for n in range(2):
        first.publish("a" * (1900 + n))
        second.publish("b" * (1900 + n))
    assert first.read() == (2, "a" * 1901)
    assert second.read() == (2, "b" * 1901)


def test_a_value_that_does_not_fit_is_refused_and_the_old_one_stays(segment: Segment) -> None:
    publication = Publication(segment, 64, 4096)
    publication.publish("old")
    with pytest.raises(DoesNotFit):
        publication.publish("x" * 4096)
    assert publication.read() == (1, "old")


def test_damaged_memory_is_an_error(segment: Segment) -> None:
    publication = Publication(segment)
    publication.publish("some text")
    at = bytes(segment.bytes).index(b"some text")
    segment.bytes[at] = ord("t")
    with pytest.raises(RuntimeError, match="damaged"):
        publication.read()
