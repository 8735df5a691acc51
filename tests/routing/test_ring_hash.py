from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshd.routing.ring_hash import POINTS_PER_URL, HashRing, points_of

THREE = [f"http://10.0.0.{host}:8000" for host in (1, 2, 3)]


def test_point_zero_of_the_first_url_is_the_published_vector() -> None:
    assert points_of("http://10.0.0.1:8000")[0] == 0x125FA0C22303FBFD
    assert len(points_of("http://10.0.0.1:8000")) == POINTS_PER_URL == 150


@pytest.mark.parametrize(
    ("position", "order"),
    [
        (0xCEDCA61C9F075917, (2, 3, 1)),
        (0x59FFD8386B3E7F78, (3, 1, 2)),
        (0x47BE21646350BCA2, (2, 3, 1)),
        (0xE5368FE8218D4361, (2,)),
        (0x48E18065D83C8584, (1,)),
    ],
)
def test_clockwise_order_is_the_published_vector(position: int, order: tuple[int, ...]) -> None:
    ring = HashRing(THREE)
    expected = [f"http://10.0.0.{host}:8000" for host in order]
    assert ring.clockwise(position)[: len(expected)] == expected
    assert ring.owner(position, THREE) == expected[0]


def test_owner_skips_urls_that_are_no_candidates() -> None:
    ring = HashRing(THREE)
    first, second, third = ring.clockwise(0x59FFD8386B3E7F78)
    assert ring.owner(0x59FFD8386B3E7F78, {second, third}) == second
    assert ring.owner(0x59FFD8386B3E7F78, {third}) == third
    assert ring.owner(0x59FFD8386B3E7F78, {first}) == first


def test_nobody_owns_a_position_without_a_candidate_on_the_ring() -> None:
    assert HashRing(THREE).owner(7, {"http://elsewhere:1"}) is None
    assert HashRing(THREE).owner(7, ()) is None
    assert HashRing(()).owner(7, THREE) is None


def test_position_of_a_point_belongs_to_that_point_and_the_one_above_the_last_wraps() -> None:
    ring = HashRing(THREE)
    points = sorted((point, url) for url in THREE for point in points_of(url))
    for point, url in points[:20]:
        assert ring.owner(point, THREE) == url
        assert ring.owner(point + 1, THREE) == points[points.index((point, url)) + 1][1]
    assert points[-1][0] < 2**64 - 1
    assert ring.owner(points[-1][0] + 1, THREE) == points[0][1]


def test_lower_url_comes_first_where_two_share_a_point() -> None:
    def points(url: str) -> list[int]:
        return [10, 20] if url != "http://c" else [15]

    for urls in (["http://b", "http://a", "http://c"], ["http://a", "http://b", "http://c"]):
        ring = HashRing(urls, points=points)
        assert ring.clockwise(3) == ["http://a", "http://b", "http://c"]
        assert ring.owner(3, {"http://b"}) == "http://b"
        assert HashRing(["http://b"], ring, points).clockwise(12) == ["http://b"]


def test_adding_one_upstream_to_ten_moves_few_keys_and_all_of_them_to_it() -> None:
    urls = [f"http://10.0.1.{host}:8000" for host in range(11)]
    before, after = HashRing(urls[:10]), HashRing(urls)
    rng = random.Random(5)
    keys = [rng.getrandbits(64) for _ in range(20_000)]
    moved = [key for key in keys if before.owner(key, urls) != after.owner(key, urls)]
    assert 0 < len(moved) / len(keys) <= 1 / 11 + 0.05
    assert {after.owner(key, urls) for key in moved} == {urls[10]}


def test_removing_one_upstream_moves_only_its_own_keys() -> None:
    urls = [f"http://10.0.1.{host}:8000" for host in range(10)]
    whole, rest = HashRing(urls), HashRing(urls[1:])
    rng = random.Random(6)
    for _ in range(5_000):
        key = rng.getrandbits(64)
        if whole.owner(key, urls) != urls[0]:
            assert rest.owner(key, urls) == whole.owner(key, urls)
        assert whole.owner(key, urls[1:]) == rest.owner(key, urls)  # no candidate = not there


sets_of_urls = st.frozensets(st.integers(0, 9).map(lambda host: f"http://h{host}:1"), max_size=6)


@settings(max_examples=40, deadline=None)
@given(history=st.lists(sets_of_urls, min_size=1, max_size=5), position=st.integers(0, 2**64 - 1))
def test_ring_built_from_the_one_before_equals_a_fresh_one(
    history: list[frozenset[str]], position: int
) -> None:
    ring = HashRing(())
    for urls in history:
        ring = HashRing(urls, ring)
    fresh = HashRing(history[-1])
    assert ring.clockwise(position) == fresh.clockwise(position)
    assert set(ring.clockwise(position)) == history[-1]
    assert repr(ring) == repr(fresh)
