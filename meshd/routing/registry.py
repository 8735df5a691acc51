"""The set of upstreams: one numbered generation of it, and the shared board that publishes generations.

The controller is the board's one writer; how a generation reaches its readers is told in ``publication.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from meshd.memory import Segment
from meshd.publication import Publication
from meshd.routing.ring_hash import HashRing
from meshd.routing.upstream import Upstream

__all__ = ["SEGMENT_BYTES", "SEGMENT_KIND", "Registry", "RegistryBoard", "Upstream"]

SEGMENT_KIND: Final = "registry"
SEGMENT_BYTES: Final = 80 << 20  # two buffers of 40 MiB: 1,024 upstreams of at most 40 KiB each; sparse


class Registry:
    """One generation of the set of upstreams, in registration order; immutable.

    Its indexes are made once. The hash ring is made when it is first asked for, from ``previous``'s
    ring as far as that was made. ``cut``: ids of upstreams that were removed by force a moment ago: their
    running requests are to be ended. ``memo``: what the controller wrote down for its successor.
    """

    __slots__ = (
        "_any_model",
        "_by_model",
        "_earlier_ring",
        "_ring",
        "by_url",
        "cut",
        "generation",
        "memo",
        "upstreams",
    )

    def __init__(
        self,
        generation: int,
        upstreams: Sequence[Upstream],
        previous: Registry | None = None,
        cut: Iterable[str] = (),
        memo: Mapping[str, Any] | None = None,
    ) -> None:
        self.generation = generation
        self.upstreams = tuple(upstreams)
        self.cut = tuple(cut)
        self.memo = memo or {}
        self.by_url = {upstream.url: upstream for upstream in self.upstreams}
        numbers = {upstream.number for upstream in self.upstreams}
        if not len(self.by_url) == len(numbers) == len(self.upstreams):
            raise ValueError("two upstreams have one url or one number")
        self._any_model = tuple(u for u in self.upstreams if u.serves_any_model)
        self._by_model = self._index_models()
        self._ring: HashRing | None = None
        self._earlier_ring: HashRing | None = None
        if previous is not None:
            self._earlier_ring = previous._ring or previous._earlier_ring

    @property
    def ring(self) -> HashRing:
        """The hash ring of all upstreams; the first use of a generation may build it."""
        ring = self._ring
        if ring is None:
            ring = self._earlier_ring
            if ring is None or ring.urls != self.by_url.keys():
                ring = HashRing(self.by_url, ring)
            self._ring = ring
            self._earlier_ring = None
        return ring

    def serving(self, model: str) -> tuple[Upstream, ...]:
        """Return the upstreams that serve ``model``, healthy or not; all of them for an empty name."""
        if not model:
            return self.upstreams
        return self._by_model.get(model, self._any_model)

    def lists_model(self, model: str) -> bool:
        """Say whether an upstream names ``model`` as one of its own."""
        return model in self._by_model

    def _index_models(self) -> dict[str, tuple[Upstream, ...]]:
        named = {m for u in self.upstreams if not u.serves_any_model for m in u.models}
        return _grouped(
            (model, upstream)
            for upstream in self.upstreams
            for model in (named if upstream.serves_any_model else dict.fromkeys(upstream.models))
        )

    def __repr__(self) -> str:
        return f"Registry(generation={self.generation}, {[upstream.url for upstream in self.upstreams]})"


class RegistryBoard:
    """The published generations in shared memory; ``publish`` is for the controller alone."""

    def __init__(self, segment: Segment) -> None:
        self._publication = publication = Publication(segment)
        self._words: memoryview[int] = publication.words
        self._generation_word = publication.generation_word
        self._latest = Registry(0, ())

    def generation(self) -> int:
        """Return the number of the generation in force; one load, for every placement."""
        return self._words[self._generation_word]

    def publish(
        self, upstreams: Sequence[Upstream], cut: Sequence[str] = (), memo: Mapping[str, Any] | None = None
    ) -> int:
        """Put ``upstreams`` in force as the next generation and return its number; ``memo``: plain JSON.

        ``ValueError``: two of them have one url or number, or they do not fit; nothing changed then.
        """
        latest = Registry(self.generation() + 1, upstreams, self._latest, cut, memo)
        rows = [upstream.to_row() for upstream in upstreams]
        generation = self._publication.publish({"upstreams": rows, "cut": list(cut), "memo": latest.memo})
        self._latest = latest
        return generation

    def read(self) -> Registry:
        """Return the generation in force, generation 0 without upstreams if nothing was published.

        The same object as before while nothing changed; a change costs some 10 µs for each upstream.
        """
        if self.generation() == self._latest.generation:
            return self._latest
        generation, value = self._publication.read()
        upstreams = [Upstream.from_row(row) for row in value["upstreams"]]
        self._latest = Registry(generation, upstreams, self._latest, value["cut"], value["memo"])
        return self._latest


def _grouped(pairs: Iterable[tuple[str, Upstream]]) -> dict[str, tuple[Upstream, ...]]:
    groups: dict[str, list[Upstream]] = {}
    for key, upstream in pairs:
        groups.setdefault(key, []).append(upstream)
    return {key: tuple(group) for key, group in groups.items()}
