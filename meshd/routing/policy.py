"""What a policy is: it picks one of the candidates, by pure computation.

A policy object belongs to one model of one process and may keep a turn counter, nothing else: with that set
back, a pick has left no trace. It reads loads and never counts them: counting is placement's.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Protocol

from meshd.api.view import RoutingView
from meshd.routing.policies.rotation import Rotation
from meshd.routing.registry import Registry
from meshd.routing.ring_hash import HashRing
from meshd.routing.upstream import Upstream


class Pick:
    """What a policy decided.

    ``upstream``: ``None`` if it picks none. ``reason``: ``policy:<name>``, or the name of the branch it
    took. ``fallback``: why it could not use its input, empty if it could; a closed list (metrics).
    """

    __slots__ = ("fallback", "reason", "upstream")

    def __init__(self, upstream: Upstream | None, reason: str, fallback: str = "") -> None:
        self.upstream = upstream
        self.reason = reason
        self.fallback = fallback

    def __repr__(self) -> str:
        url = None if self.upstream is None else self.upstream.url
        return f"Pick({url} {self.reason} {self.fallback})"


class Candidates:
    """The upstreams to choose from, in registration order, with what policies ask of them made once.

    ``numbers``: columns of the load cells, ``number_set`` the same. ``index_of``: url → place in
    ``upstreams``. ``tried``: numbers left out because the request has been there.
    """

    __slots__ = ("_picks", "_reason", "_registry", "index_of", "number_set", "numbers", "tried", "upstreams")

    def __init__(
        self, upstreams: Iterable[Upstream], registry: Registry, tried: Collection[int] = ()
    ) -> None:
        self.upstreams = tuple(upstreams)
        self.tried = tried
        self.numbers = tuple(upstream.number for upstream in self.upstreams)
        self.number_set = frozenset(self.numbers)
        self.index_of = {upstream.url: index for index, upstream in enumerate(self.upstreams)}
        self._registry = registry
        self._picks: list[Pick] = []
        self._reason = ""

    def picks(self, reason: str) -> list[Pick]:
        """Return the pick of each of them, made once: for a policy that has but one reason."""
        if reason != self._reason:
            self._reason = reason
            self._picks = [Pick(upstream, reason) for upstream in self.upstreams]
        return self._picks

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


class Recorder(Protocol):
    """The half of a policy that remembers what was picked; only a placement that is carried out calls it."""

    def record(self, upstream: Upstream, view: RoutingView) -> None: ...


class Policy(Protocol):
    """One way to pick.

    ``needs``: the ``NEEDS`` bits that its view must have been made with. ``uses_ring``: it asks for the
    hash ring. ``has_branches``: the reason of each pick is counted as a branch of its own. ``always_picks``:
    it is asked even when there is but one candidate. ``recorder``: told of each upstream that a request of
    the policy is sent to, ``None`` if nothing is to be remembered.
    ``rotation``: its turn counter, ``None`` if it takes no turns.
    """

    @property
    def name(self) -> str: ...

    @property
    def needs(self) -> int: ...

    @property
    def uses_ring(self) -> bool: ...

    @property
    def has_branches(self) -> bool: ...

    @property
    def always_picks(self) -> bool: ...

    @property
    def recorder(self) -> Recorder | None: ...

    @property
    def rotation(self) -> Rotation | None: ...

    def pick(self, candidates: Candidates, view: RoutingView, loads: Loads) -> Pick:
        """Pick one of ``candidates``, which may be empty: then it picks none."""
        ...
