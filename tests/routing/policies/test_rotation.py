from __future__ import annotations

from meshd.routing.policies.rotation import Rotation


def test_equal_counts_take_turns_from_where_the_process_starts() -> None:
    rotation = Rotation(1)
    assert [rotation.least([0, 5, 0, 0]) for _ in range(4)] == [2, 3, 0, 2]


def test_the_smallest_count_wins_without_a_tie() -> None:
    assert Rotation(7).least([3, 1, 2]) == 1
