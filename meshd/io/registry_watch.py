"""Act on a new generation of the set of upstreams, beyond placing by it.

Idle connections to an origin that takes no requests any more are closed at once, those that become idle
while it drains too; requests that run on an upstream which was removed by force are cut, as if it had died.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Final, Protocol

from meshd.routing.registry import Registry

CUT_CAUSE: Final = "the upstream was removed by force"


class Running(Protocol):
    """A request in progress: an ``Exchange``."""

    def cut_off(self, removed: Collection[str], cause: str) -> None:
        """End what upstreams with these ids are doing for the request, as if they had died."""
        ...


class RegistryWatch:
    """``registry`` gives the newest generation; ``close_idle`` closes what is idle to an origin."""

    def __init__(
        self,
        registry: Callable[[], Registry],
        close_idle: Callable[[str], None],
        running: Callable[[], Iterable[Running]],
    ) -> None:
        self._registry = registry
        self._close_idle = close_idle
        self._running = running
        self._generation = -1
        self._origins: frozenset[str] = frozenset()
        self._draining: frozenset[str] = frozenset()

    def check(self) -> None:
        """Look whether the set has changed; one comparison while it has not and nothing drains."""
        registry = self._registry()
        for origin in self._draining:
            self._close_idle(origin)
        if registry.generation == self._generation:
            return
        self._generation = registry.generation
        origins = frozenset(u.base_url for u in registry.upstreams if u.state != "draining")
        for origin in self._origins - origins:
            self._close_idle(origin)
        self._origins = origins
        self._draining = frozenset(u.base_url for u in registry.upstreams) - origins
        if registry.cut:
            for request in list(self._running()):
                request.cut_off(registry.cut, CUT_CAUSE)

    def __repr__(self) -> str:
        return f"RegistryWatch(generation={self._generation}, {len(self._origins)} origins)"
