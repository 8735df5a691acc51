"""Body slots: no two overlap, nothing is lost, pages of large bodies go back."""

from __future__ import annotations

import itertools
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshd.memory import PAGE, Segment
from meshd.slab import CLASS_BYTES, BodySlab, Slot

VIEW_BYTES = 5000
VIEW_ROOM = 2 * PAGE


def make_slab(size: int = 64 << 20, budget_bytes: int | None = None) -> tuple[Segment, BodySlab]:
    segment = Segment.create("slab", size)
    return segment, BodySlab(segment, VIEW_BYTES, budget_bytes)


def reserve(slab: BodySlab, body_bytes: int) -> Slot:
    slot = slab.reserve(body_bytes)
    assert slot is not None
    return slot


def span(slot: Slot) -> tuple[int, int]:
    return slot.view_offset, slot.body_offset + slot.body_capacity


@pytest.mark.parametrize("step", range(len(CLASS_BYTES)))
def test_a_class_holds_its_size_exactly_and_one_byte_more_goes_up(step: int) -> None:
    _, slab = make_slab()
    size = CLASS_BYTES[step]
    assert reserve(slab, size).body_capacity == size
    larger = CLASS_BYTES[step + 1] if step + 1 < len(CLASS_BYTES) else size + PAGE
    assert reserve(slab, size + 1).body_capacity == larger


def test_the_slot_released_last_is_reserved_first() -> None:
    _, slab = make_slab()
    first, second = reserve(slab, 100), reserve(slab, 100)
    places = span(first), span(second)
    second.release()
    first.release()
    assert span(reserve(slab, 4096)) == places[0]
    assert span(reserve(slab, 0)) == places[1]


def test_views_of_a_slot_are_its_bytes_in_the_segment() -> None:
    segment, slab = make_slab()
    slot = reserve(slab, 10)
    slot.body[:5] = b"hello"
    slot.view[:4] = b"view"
    assert bytes(segment.bytes[slot.body_offset : slot.body_offset + 5]) == b"hello"
    assert bytes(segment.bytes[slot.view_offset : slot.view_offset + 4]) == b"view"
    assert len(slot.view) == slot.view_capacity == VIEW_BYTES


def test_a_second_release_raises_and_changes_nothing() -> None:
    _, slab = make_slab()
    slot = reserve(slab, 10)
    slot.release()
    next_owner = reserve(slab, 10)
    with pytest.raises(RuntimeError, match="released before"):
        slot.release()
    assert slab.in_use_bytes == VIEW_ROOM + next_owner.body_capacity


def test_the_pages_of_a_large_body_go_back_at_release() -> None:
    segment, slab = make_slab()
    empty = os.fstat(segment.fd).st_blocks
    slot = reserve(slab, 8 << 20)
    slot.body[:] = b"x" * (8 << 20)
    assert os.fstat(segment.fd).st_blocks * 512 > 8 << 20
    slot.release()
    assert os.fstat(segment.fd).st_blocks == empty


def test_a_full_slab_says_none_and_has_room_again_after_a_release() -> None:
    _, slab = make_slab(4 << 20)
    slots = []
    while (slot := slab.reserve(300 << 10)) is not None:
        slots.append(slot)
    assert len(slots) == 3
    slots.pop().release()
    assert slab.reserve(300 << 10) is not None


def test_the_budget_bounds_what_is_in_use() -> None:
    _, slab = make_slab(budget_bytes=3 * (VIEW_ROOM + 4096))
    slots = [reserve(slab, 1) for _ in range(3)]
    assert slab.reserve(1) is None
    slots[0].release()
    assert slab.reserve(5000) is None
    assert slab.reserve(1) is not None


def test_small_free_slots_never_strand_the_room_for_a_large_body() -> None:
    _, slab = make_slab(8 << 20)
    small = []
    while (slot := slab.reserve(1)) is not None:
        small.append(slot)
    for slot in small:
        slot.release()
    assert slab.reserve(7 << 20) is not None


@pytest.mark.parametrize("body_bytes", [1000, 60_000, 3 << 20])
def test_a_grown_slot_keeps_its_bytes(body_bytes: int) -> None:
    _, slab = make_slab()
    slot = reserve(slab, body_bytes)
    content = os.urandom(slot.body_capacity)
    slot.body[:] = content
    grown = slot.grow(2 * slot.body_capacity)
    assert grown is not None
    assert bytes(grown.body[: len(content)]) == content
    assert grown.body_capacity >= 2 * len(content)
    with pytest.raises(RuntimeError):
        slot.release()
    grown.release()
    assert slab.in_use_bytes == 0


def test_an_own_extent_grows_in_place_when_the_pages_behind_it_are_free() -> None:
    _, slab = make_slab()
    slot = reserve(slab, 2 << 20)
    grown = slot.grow(4 << 20)
    assert grown is not None and grown.body_offset == slot.body_offset
    reserve(slab, 2 << 20)
    moved = grown.grow(8 << 20)
    assert moved is not None and moved.body_offset != slot.body_offset


def test_a_slot_that_cannot_grow_stays_usable() -> None:
    _, slab = make_slab(4 << 20)
    slot = reserve(slab, 2 << 20)
    slot.body[:3] = b"abc"
    assert slot.grow(16 << 20) is None
    assert bytes(slot.body[:3]) == b"abc"
    slot.release()


def test_a_quarantined_slot_is_kept_and_everything_else_is_scrubbed() -> None:
    segment, slab = make_slab()
    old = [reserve(slab, 100_000) for _ in range(3)]
    for slot in old:
        slot.body[:] = b"x" * slot.body_capacity
    successor = BodySlab(segment, VIEW_BYTES)
    kept = successor.quarantine(old[1].view_offset, VIEW_BYTES, old[1].body_offset, 100_000)
    successor.scrub()
    assert bytes(segment.bytes[old[1].body_offset :][:100_000]) == b"x" * 100_000
    assert segment.bytes[old[0].body_offset] == segment.bytes[old[2].body_offset] == 0
    low, high = span(kept)
    for _ in range(100):
        start, end = span(reserve(successor, 100_000))
        assert end <= low or high <= start
    with pytest.raises(ValueError, match="not free"):
        successor.quarantine(old[1].view_offset, VIEW_BYTES, old[1].body_offset, 100_000)
    in_use = successor.in_use_bytes
    kept.release()
    assert successor.in_use_bytes == in_use - (high - low)


_SIZES = st.one_of(
    st.integers(0, 20_000), st.sampled_from([65_536, 65_537, 1 << 20, (1 << 20) + 1]), st.integers(0, 6 << 20)
)
_STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("reserve"), _SIZES),
        st.tuples(st.just("release"), st.integers(0, 1 << 16)),
        st.tuples(st.just("grow"), st.integers(0, 1 << 16)),
    ),
    max_size=60,
)


@settings(max_examples=60, deadline=None)
@given(_STEPS)
def test_live_slots_never_overlap_and_all_comes_back(steps: list[tuple[str, int]]) -> None:
    segment, slab = make_slab(24 << 20)
    live: list[Slot] = []
    for action, number in steps:
        if action == "reserve":
            slot = slab.reserve(number)
            live += [slot] if slot is not None else []
        elif live and action == "release":
            live.pop(number % len(live)).release()
        elif live:
            slot = live.pop(number % len(live))
            live.append(slot.grow(2 * slot.body_capacity) or slot)
        spans = sorted(span(slot) for slot in live)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
        assert not spans or (spans[0][0] >= PAGE and spans[-1][1] <= segment.size)
        assert slab.in_use_bytes == sum(end - start for start, end in spans)
    for slot in live:
        slot.release()
    assert slab.in_use_bytes == 0
    assert slab.reserve(23 << 20) is not None
    segment.close()


def test_a_wide_view_is_as_long_as_asked_and_goes_back_with_its_slot() -> None:
    _, slab = make_slab()
    slot = reserve(slab, 100)
    before = slab.in_use_bytes
    assert slot.widen_view(3 << 20)
    assert len(slot.view) == slot.view_capacity >= 3 << 20
    slot.body[:4], slot.view[:4] = b"body", b"view"
    assert slot.body[:4] == b"body" and slab.in_use_bytes > before + (3 << 20)
    slot.release()
    assert slab.in_use_bytes == 0
    assert len(reserve(slab, 100).view) == VIEW_BYTES, "the next owner gets an ordinary view"


def test_a_view_that_cannot_be_widened_stays_as_it_was() -> None:
    _, slab = make_slab(4 << 20)
    slot = reserve(slab, 100)
    assert not slot.widen_view(8 << 20)
    assert slot.view_capacity == len(slot.view) == VIEW_BYTES
    slot.release()
    assert slab.in_use_bytes == 0


def test_a_quarantined_slot_with_a_wide_view_keeps_both_of_its_ranges() -> None:
    segment, first = make_slab()
    old = reserve(first, 2 << 20)
    assert old.widen_view(4 << 20)
    old.body[:4], old.view[:4] = b"body", b"view"
    successor = BodySlab(segment, VIEW_BYTES)
    kept = successor.quarantine(old.view_offset, old.view_capacity, old.body_offset, 2 << 20)
    successor.scrub()
    assert (bytes(old.body[:4]), bytes(old.view[:4])) == (b"body", b"view")
    ranges = [range(old.body_offset, old.body_offset + (2 << 20))]
    ranges.append(range(old.view_offset, old.view_offset + (4 << 20)))
    slots = []
    while (slot := successor.reserve(1 << 20)) is not None:
        slots.append(slot)
        assert not any(slot.view_offset in taken or slot.body_offset in taken for taken in ranges)
    for slot in (*slots, kept):
        slot.release()
    assert successor.in_use_bytes == 0


def test_a_process_that_leaves_gives_back_the_pages_that_it_kept_warm() -> None:
    segment, slab = make_slab()
    held, free = reserve(slab, 4096), reserve(slab, 4096)
    free.body[:] = held.body[:] = b"x" * 4096
    free.release()
    before = os.fstat(segment.fd).st_blocks
    slab.trim()
    assert os.fstat(segment.fd).st_blocks < before
    assert bytes(held.body[:4]) == b"xxxx"
