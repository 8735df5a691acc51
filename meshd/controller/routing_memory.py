"""What routing remembers in shared memory, as far as it needs one owner: new sessions, and sweeping.

I/O processes read and write the prefix index and refresh sessions by themselves. Here sessions are assigned,
one at a time, and both are swept of upstreams that have left. Upstream numbers are given out again, so a
number rests until nothing remembers its former owner: ``is_clean``.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterable
from typing import Final

import orjson

from meshd.controller.admin import AdminRoute
from meshd.controller.http_server import Request, Response
from meshd.controller.scrape import Values
from meshd.errors import MeshError
from meshd.routing.load import MAX_UPSTREAMS
from meshd.routing.prefix_index import PrefixIndex
from meshd.routing.sessions import ASSIGNED_HEADER, ASSIGNMENT_PATH, SessionId, SessionLedger

LOOK_S: Final = 0.25
EXPIRY_S: Final = 60.0


class RoutingMemory:
    """``current``: numbers of the upstreams that are registered. ``load_of``: the shared load of one.

    ``interval_s``: how often the index is swept even if nobody is known to have left: an I/O process may have
    entered an upstream just when it left.
    """

    def __init__(
        self,
        index: PrefixIndex,
        sessions: SessionLedger,
        current: Callable[[], Collection[int]],
        load_of: Callable[[int], int],
        interval_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._index = index
        self._sessions = sessions
        self._current = current
        self._load_of = load_of
        self._interval_s = interval_s
        self._clock = clock
        self._remembered: set[int] = set()  # numbers that something may be remembered of
        self._flushed: set[int] = set()
        self._sweep_at = self._expire_at = clock()

    def start(self) -> None:
        """Forget, before a number can be given out, whom a predecessor had no time to forget."""
        current = set(self._current())
        if self._index.entries or self._sessions.active:
            for _ in self._index.sweep(lambda number: number not in current):
                pass
            self._sessions.forget([number for number in range(MAX_UPSTREAMS) if number not in current])
        self._remembered = current
        self._sweep_at = self._clock() + self._interval_s

    def is_clean(self, number: int) -> bool:
        """Whether a new upstream may have this number."""
        return number not in self._remembered

    def forget_cached(self, numbers: Collection[int]) -> None:
        """Drop what the prefix index holds of upstreams whose caches were flushed; done soon after."""
        self._flushed.update(numbers)

    async def run(self) -> None:
        """Look after both until cancelled."""
        while True:
            await self._look()
            await asyncio.sleep(LOOK_S)

    def routes(self) -> list[AdminRoute]:
        """The route that I/O processes use themselves; they relay no client's request to it."""
        return [AdminRoute("POST", ASSIGNMENT_PATH, self._assign)]

    def values(self) -> Values:
        """Gauges for a scrape."""
        return {
            "mesh_prefix_index_entries": {(): float(self._index.entries)},
            "mesh_prefix_index_limit_bytes": {(): float(self._index.limit_bytes)},
            "mesh_sessions_active": {(): float(self._sessions.active)},
        }

    async def _look(self) -> None:
        now = self._clock()
        if now >= self._expire_at:
            self._expire_at = now + EXPIRY_S
            self._sessions.sweep()
        current = set(self._current())
        left = self._remembered - current
        self._remembered |= current
        if left:
            self._sessions.forget(left)
        if left or now >= self._sweep_at:
            self._sweep_at = now + self._interval_s
            await _run(self._index.sweep(lambda number: number not in current))
            self._remembered -= left - set(self._current())
        if self._flushed:
            flushed, self._flushed = self._flushed, set()
            await _run(self._index.forget(flushed))

    async def _assign(self, request: Request, _segment: str) -> Response:
        try:
            asked = orjson.loads(request.body)
            session = SessionId(*asked["session"])
            candidates = [int(number) for number in asked["candidates"]]
            is_rehearsed = bool(asked.get("rehearsed"))
        except (orjson.JSONDecodeError, KeyError, TypeError, ValueError) as fault:
            raise MeshError("invalid_request", "This is no question for an assignment.") from fault
        choose = self._sessions.choose if is_rehearsed else self._sessions.assign
        number = choose(session, candidates, self._load_of)
        headers = () if number is None else ((ASSIGNED_HEADER.decode(), str(number)),)
        return Response(200, b"", headers=headers)

    def __repr__(self) -> str:
        return f"RoutingMemory({self._index!r}, {self._sessions!r})"


async def _run(steps: Iterable[int]) -> None:
    for _ in steps:
        await asyncio.sleep(0)  # traffic of the controller between steps of some milliseconds
