"""Segments: what two mappings of one memfd see, and what is refused."""

from __future__ import annotations

import os

import pytest

from meshd.errors import StartupError
from meshd.memory import HEADER_BYTES, PAGE, Segment, refuse_weak_ordering, round_up


def test_a_word_stored_in_one_mapping_is_read_in_another() -> None:
    first = Segment.create("cells", 1000, version=3)
    second = Segment.attach(os.dup(first.fd), "cells", version=3)
    first.words[HEADER_BYTES // 8] = 0xFEDCBA9876543210
    assert second.words[HEADER_BYTES // 8] == 0xFEDCBA9876543210
    assert second.size == first.size == PAGE


def test_a_child_shares_the_segment_and_nothing_is_named() -> None:
    segment = Segment.create("cells", PAGE)
    child = os.fork()
    if child == 0:
        segment.words[20] = 77
        os._exit(0)
    os.waitpid(child, 0)
    assert segment.words[20] == 77
    assert os.readlink(f"/proc/self/fd/{segment.fd}").startswith("/memfd:meshd:cells")


@pytest.mark.parametrize(("kind", "version"), [("rings", 1), ("cells", 2)])
def test_another_kind_or_version_is_a_startup_error(kind: str, version: int) -> None:
    segment = Segment.create("cells", PAGE, version=1)
    with pytest.raises(StartupError, match="same release"):
        Segment.attach(segment.fd, kind, version)


def test_a_descriptor_without_a_header_is_a_startup_error() -> None:
    empty = os.memfd_create("empty")
    with pytest.raises(StartupError, match="no shared segment"):
        Segment.attach(empty, "cells")
    os.ftruncate(empty, PAGE)
    with pytest.raises(StartupError, match="same release"):
        Segment.attach(empty, "cells")


def test_discarded_pages_read_as_zeros_and_cost_nothing() -> None:
    segment = Segment.create("slab", 1 << 30)
    segment.bytes[PAGE : 3 * PAGE] = b"x" * (2 * PAGE)
    before = os.fstat(segment.fd).st_blocks
    segment.discard(PAGE, 2 * PAGE)
    assert os.fstat(segment.fd).st_blocks == before - 2 * PAGE // 512
    assert segment.bytes[PAGE : 3 * PAGE] == bytes(2 * PAGE)


def test_a_machine_with_weak_store_order_is_refused() -> None:
    refuse_weak_ordering("x86_64")
    with pytest.raises(StartupError, match="aarch64"):
        refuse_weak_ordering("aarch64")


def test_round_up_reaches_the_next_multiple() -> None:
    assert [round_up(value, PAGE) for value in (0, 1, PAGE, PAGE + 1)] == [0, PAGE, PAGE, 2 * PAGE]
