from __future__ import annotations

import os
import resource
from array import array
from collections.abc import Callable
from random import Random

import pytest

from meshd.api.block_keys import block_keys
from meshd.memory import Segment
from meshd.routing.prefix_index import MIN_BYTES, SEGMENT_KIND, PrefixIndex, segment_bytes

SECOND = 1_000_000_000


class Clock:
    def __init__(self) -> None:
        self.now_ns = 1000 * SECOND

    def __call__(self) -> int:
        return self.now_ns


@pytest.fixture
def clock() -> Clock:
    return Clock()


MakeIndex = Callable[..., PrefixIndex]


@pytest.fixture
def make(clock: Clock) -> MakeIndex:
    """Make indexes of one segment, one for each seat asked for; seat 2 is the controller's."""
    segments: dict[int, Segment] = {}

    def one(seat: int = 0, index_bytes: int = 1 << 20) -> PrefixIndex:
        if index_bytes not in segments:
            segments[index_bytes] = Segment.create(SEGMENT_KIND, segment_bytes(index_bytes, 2))
        return PrefixIndex(segments[index_bytes], seat, 2, index_bytes, clock)

    return one


def _keys(text: str) -> bytes:
    return block_keys("m", text.encode())


def _packed(*keys: int) -> bytes:
    return array("Q", keys).tobytes()


def test_an_insert_is_seen_by_every_other_process_at_once(make: MakeIndex) -> None:
    here, there = make(0), make(1)
    here.insert(_keys("a" * 1000), 7)
    match = there.match(_keys("a" * 1000), 1000, {7})
    assert match is not None
    assert (match.number, match.matched_bytes) == (7, 1000)


def test_only_whole_common_blocks_match(make: MakeIndex) -> None:
    index = make()
    index.insert(_keys("a" * 300), 7)
    match = index.match(_keys("a" * 300 + "b" * 100), 400, {7})
    assert match is not None
    assert match.matched_bytes == 256


def test_the_longest_match_among_the_candidates_wins(make: MakeIndex) -> None:
    index = make()
    text = "".join(f"{word:08d}" for word in range(400))
    index.insert(_keys(text), 1)
    index.insert(_keys(text[:640]), 2)
    match = index.match(_keys(text), len(text), {1, 2})
    assert match is not None and match.number == 1
    without = index.match(_keys(text), len(text), {2, 3})
    assert without is not None and (without.number, without.matched_bytes) == (2, 640)
    assert index.match(_keys(text), len(text), {3}) is None
    assert index.matched_bytes(_keys(text), len(text), 2) == 640


def test_of_equal_matches_the_latest_user_wins(make: MakeIndex, clock: Clock) -> None:
    index = make()
    for number in (1, 2, 3):
        index.insert(_keys("a" * 500), number)
        clock.now_ns += SECOND
    index.insert(_keys("a" * 500), 2)
    match = index.match(_keys("a" * 500), 500, {1, 2, 3})
    assert match is not None and match.number == 2


def test_a_fifth_holder_replaces_the_one_used_longest_ago(make: MakeIndex, clock: Clock) -> None:
    index = make()
    for number in (1, 2, 3, 4):
        index.insert(_keys("a" * 100), number)
        clock.now_ns += SECOND
    index.insert(_keys("a" * 100), 1)
    index.insert(_keys("a" * 100), 5)
    held = [number for number in range(1, 6) if index.matched_bytes(_keys("a" * 100), 100, number)]
    assert held == [1, 3, 4, 5]
    assert index.entries == 4


def test_a_full_bucket_drops_its_entry_used_longest_ago(make: MakeIndex, clock: Clock) -> None:
    index = make(index_bytes=MIN_BYTES)
    buckets = MIN_BYTES // 64
    keys = [((number + 1) << 40) * buckets + 5 for number in range(9)]
    for key in keys[:8]:
        index.insert(_packed(key), 1)
        clock.now_ns += SECOND
    index.insert(_packed(keys[0]), 1)
    index.insert(_packed(keys[8]), 1)
    held = [bool(index.match(_packed(key), 10, {1})) for key in keys]
    assert held == [True, False, *[True] * 7]
    assert index.evictions == 1
    assert index.entries == 8


def test_keys_whose_bytes_look_alike_are_told_apart(make: MakeIndex, clock: Clock) -> None:
    """A fingerprint of zeros is no free entry, and bytes across two words are no fingerprint."""
    index = make(index_bytes=MIN_BYTES)
    buckets, random = MIN_BYTES // 64, Random(9)
    halves = (0, 1, 256, 1 << 16, 1 << 24, 0x01000000, 0xFFFFFFFF)
    keys = [(half << 32) + (5 - (half << 32)) % buckets for half in dict.fromkeys(halves)]
    held: dict[int, set[int]] = {key: set() for key in keys}
    for _ in range(300):
        key, number = random.choice(keys), random.choice((0, 1, 257))
        mates = sum(len(numbers) for numbers in held.values())
        if number in held[key] or mates < 8:
            index.insert(_packed(key), number)
            held[key].add(number)
        for other, numbers in held.items():
            assert {n for n in (0, 1, 257) if index.match(_packed(other), 10, {n})} == numbers
        clock.now_ns += SECOND
    assert index.entries == 8 and not index.evictions


def test_the_index_stays_inside_its_bytes_over_a_million_distinct_prefixes(make: MakeIndex) -> None:
    index = make(index_bytes=1 << 20)
    random = Random(7)
    index.insert(array("Q", (random.getrandbits(64) for _ in range(300_000))).tobytes(), 1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(10):
        index.insert(array("Q", (random.getrandbits(64) for _ in range(100_000))).tobytes(), 2)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert index.entries <= (1 << 20) // 8
    assert index.evictions > 900_000
    assert after - before < 16 << 10  # KiB


def test_bisection_looks_at_ten_keys_at_most_of_the_longest_text(make: MakeIndex) -> None:
    index = make(index_bytes=1 << 22)
    text = Random(3).randbytes(600_000)
    index.insert(block_keys("m", text), 1)
    looked = 0

    class Counted(frozenset[int]):
        def __contains__(self, number: object) -> bool:
            nonlocal looked
            looked += 1
            return super().__contains__(number)

    match = index.match(block_keys("m", text), 524288, Counted({1}))
    assert match is not None and match.matched_bytes == 524288
    assert looked <= 10


def test_a_grown_conversation_inserts_its_new_turn_and_keeps_the_rest_young(
    make: MakeIndex, clock: Clock
) -> None:
    index = make(index_bytes=1 << 22)
    text = Random(4).randbytes(200_000)
    for length in range(50_000, 200_001, 10_000):
        index.insert(block_keys("m", text[:length]), 1)
        assert index.matched_bytes(block_keys("m", text[:length]), length, 1) == length
        clock.now_ns += 6 * SECOND
    now = clock() >> 27
    packed = memoryview(block_keys("m", text)).cast("Q")
    idle = [index._idle(key, 1, now) for key in packed]
    assert min(idle) >= 0
    assert max(idle) <= (60 * SECOND >> 27)


@pytest.mark.parametrize("length", [1024, 4096, 8192])
def test_a_short_text_that_comes_again_stays_young_behind_a_beginning_that_all_share(
    make: MakeIndex, clock: Clock, length: int
) -> None:
    index, random = make(), Random(length)
    shared = random.randbytes(length * 3 // 4)
    text = shared + random.randbytes(length // 4)
    for second in range(60):
        index.insert(block_keys("m", shared + random.randbytes(length // 4)), 1)
        if second % 5 == 0:
            index.insert(block_keys("m", text), 1)
        clock.now_ns += SECOND
    now = clock() >> 27
    idle = [index._idle(key, 1, now) for key in memoryview(block_keys("m", text)).cast("Q")]
    assert min(idle) >= 0 and max(idle) <= 15 * SECOND >> 27


def test_sweeping_frees_the_entries_of_upstreams_that_have_left(make: MakeIndex) -> None:
    index, controller = make(0), make(2)
    index.insert(_keys("a" * 1000), 1)
    index.insert(_keys("a" * 1000), 2)
    assert index.entries == 16
    assert sum(controller.sweep(lambda number: number == 1)) == 8
    assert index.entries == 8
    assert index.match(_keys("a" * 1000), 1000, {1}) is None
    assert index.matched_bytes(_keys("a" * 1000), 1000, 2) == 1000


def test_sweeping_touches_no_memory_that_was_never_used(make: MakeIndex) -> None:
    index, controller = make(0, 64 << 20), make(2, 64 << 20)
    index.insert(_keys("a" * 1000), 1)
    before = os.fstat(index._fd).st_blocks
    assert sum(controller.sweep(lambda number: number == 1)) == 8
    assert os.fstat(index._fd).st_blocks == before


def test_forgetting_drops_only_the_upstreams_named(make: MakeIndex) -> None:
    index, controller = make(0), make(2)
    index.insert(_keys("a" * 1000), 1)
    index.insert(_keys("b" * 1000), 2)
    assert sum(controller.forget([2, 3])) == 8
    assert index.matched_bytes(_keys("a" * 1000), 1000, 1) == 1000
    assert index.matched_bytes(_keys("b" * 1000), 1000, 2) == 0


def test_no_keys_match_nothing(make: MakeIndex) -> None:
    index = make()
    index.insert(b"", 1)
    assert index.match(b"", 0, {1}) is None
    assert index.entries == 0


def test_a_segment_too_small_is_refused() -> None:
    with pytest.raises(ValueError, match="holds no index"):
        PrefixIndex(Segment.create(SEGMENT_KIND, 4096), 0, 1, MIN_BYTES)
