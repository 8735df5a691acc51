from __future__ import annotations

from collections.abc import Callable

from meshd.routing.policy import Candidates
from meshd.routing.registry import Registry
from meshd.routing.upstream import Upstream


def test_candidates_know_their_numbers_places_and_the_ring_of_all(
    make_upstream: Callable[..., Upstream],
) -> None:
    fleet = [make_upstream(number) for number in (4, 2, 9)]
    registry = Registry(1, fleet)
    candidates = Candidates(fleet[1:], registry)
    assert candidates.numbers == (2, 9)
    assert candidates.index_of == {fleet[1].url: 0, fleet[2].url: 1}
    assert candidates.ring is registry.ring
    assert list(candidates) == fleet[1:] and len(candidates) == 2 and not Candidates((), registry)
