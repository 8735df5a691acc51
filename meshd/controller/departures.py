"""When upstreams that are being removed leave, and what is remembered of those that have left.

A draining upstream takes no new placement. It leaves when nothing is held on it any more, but not before
every front door must have seen that it drains: a placement made from the generation before would otherwise
run on an upstream that nobody knows. One removed by force leaves at once; its id is published for a while,
so that the I/O processes end what still runs there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from meshd.routing.registry import Upstream

SEEN_S: Final = 0.2  # every I/O process acts on a new generation within 0.1 s
CUT_S: Final = 10.0
SERIES_KEPT_S: Final = 900  # metrics of an upstream that has left are shown for so long


class Departures:
    """``departed``: URLs of upstreams that have left, with the Unix time of it; the newest last."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._clock = clock
        self._wall_clock = wall_clock
        self._draining: dict[str, float] = {}
        self._cut: dict[str, float] = {}
        self._departed: dict[str, int] = {}

    def resume(self, upstreams: Iterable[Upstream], departed: Mapping[str, int], cut: Iterable[str]) -> None:
        """Go on where a predecessor was; those that drain have to be seen draining once more."""
        self._departed = dict(departed)
        for upstream in upstreams:
            if upstream.state == "draining":
                self.begin(upstream)
        for upstream_id in cut:
            self._cut[upstream_id] = self._clock()

    def begin(self, upstream: Upstream) -> None:
        self._draining[upstream.id] = self._clock()

    def may_leave(self, upstream: Upstream) -> bool:
        """Whether ``upstream``, which holds no load, has drained for long enough to be seen."""
        return self._clock() - self._draining.get(upstream.id, self._clock()) >= SEEN_S

    def left(self, upstream: Upstream, *, is_forced: bool = False) -> None:
        self._draining.pop(upstream.id, None)
        self._departed.pop(upstream.url, None)
        self._departed[upstream.url] = int(self._wall_clock())
        if is_forced:
            self._cut[upstream.id] = self._clock()

    @property
    def cut(self) -> list[str]:
        """Ids of upstreams that were removed by force a moment ago."""
        now_s = self._clock()
        self._cut = {key: at_s for key, at_s in self._cut.items() if now_s - at_s < CUT_S}
        return list(self._cut)

    @property
    def departed(self) -> dict[str, int]:
        now = self._wall_clock()
        self._departed = {url: at for url, at in self._departed.items() if now - at < SERIES_KEPT_S}
        return dict(self._departed)

    def __repr__(self) -> str:
        return f"Departures({len(self._draining)} draining, {len(self._departed)} departed)"
