"""What a policy is: it picks one of the candidates, by pure computation.

A policy object belongs to one model of one process and may keep a turn counter, nothing else. It reads
loads and never counts them: counting is placement's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple, Protocol

from meshd.api.view import RoutingView
from meshd.routing.registry import Registry
from meshd.routing.ring_hash import HashRing
from meshd.routing.upstream import Upstream


class Pick(NamedTuple):
    """What a policy decided.

    ``upstream``: ``None`` if it picks none. ``reason``: ``policy:<name>``, or the name of the branch it
    took. ``fallback``: why it could not use its input, empty if it could; a closed list (metrics).
    """

    upstream: Upstream | None
    reason: str
    fallback: str = ""


class Candidates:
    """The upstreams to choose from, in registration order, with what policies ask of them made once.

    ``numbers``: columns of the load cells. ``index_of``: url → place in ``upstreams``.
    """

    __slots__ = ("_registry", "index_of", "numbers", "upstreams")

    def __init__(self, upstreams: Iterable[Upstream], registry: Registry) -> None:
        self.upstreams = tuple(upstreams)
        self.numbers = tuple(upstream.number for upstream in self.upstreams)
        self.index_of = {upstream.url: index for index, upstream in enumerate(self.upstreams)}
        self._registry = registry

    @property
    def ring(self) -> HashRing:
        """The hash ring of their generation; it holds other upstreams as well."""
        return self._registry.ring

    def __len__(self) -> int:
        return len(self.upstreams)

    def __iter__(self) -> Iterator[Upstream]:
        return iter(self.upstreams)

    def __repr__(self) -> str:
        return f"Candidates({[upstream.url for upstream in self.upstreams]})"


class Loads(Protocol):
    """Reading half of the load table."""

    def load(self, number: int) -> int: ...

    def loads(self, numbers: Iterable[int]) -> list[int]: ...


class Policy(Protocol):
    """One way to pick.

    ``needs``: the ``NEEDS`` bits that its view must have been made with. ``uses_ring``: it asks for the
    hash ring. ``has_branches``: the reason of each pick is counted as a branch of its own.
    """

    @property
    def name(self) -> str: ...

    @property
    def needs(self) -> int: ...

    @property
    def uses_ring(self) -> bool: ...

    @property
    def has_branches(self) -> bool: ...

    def pick(self, candidates: Candidates, view: RoutingView, loads: Loads) -> Pick:
        """Pick one of ``candidates``, which may be empty: then it picks none."""
        ...
