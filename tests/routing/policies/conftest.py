from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import pytest

from meshd.routing.policy import Candidates
from meshd.routing.registry import Registry
from meshd.routing.upstream import Upstream


class FixedLoads:
    """Loads as a test wants them, by upstream number."""

    def __init__(self, counts: Sequence[int]) -> None:
        self.counts = list(counts)

    def load(self, number: int) -> int:
        return self.counts[number]

    def loads(self, numbers: Iterable[int]) -> list[int]:
        return [self.counts[number] for number in numbers]


@pytest.fixture
def fixed_loads() -> type[FixedLoads]:
    return FixedLoads


@pytest.fixture
def candidates(make_upstream: Callable[..., Upstream]) -> Callable[..., Candidates]:
    """So many candidates, numbered from 0; ``fleet``: how many upstreams the registry holds in all."""

    def make(count: int, fleet: int | None = None) -> Candidates:
        upstreams = [make_upstream(number) for number in range(fleet or count)]
        return Candidates(upstreams[:count], Registry(1, upstreams))

    return make
