"""Publish the set of upstreams: changes of one moment together, and then tell everybody.

A thousand registrations are so a few generations instead of a thousand. Each publication rings the doorbells
of the I/O processes and calls the listeners of this process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from meshd.log import Log
from meshd.routing.registry import Registry, RegistryBoard, Upstream

PUBLISH_DELAY_S: Final = 0.01

Contents = Callable[[], tuple[Sequence[Upstream], Sequence[str], Mapping[str, Any]]]
"""Gives what is to be published: upstreams, ids to be cut, the memo (``Registry``)."""


class Publisher:
    """``schedule``: runs a callable a little later, once (the event loop's ``call_later``)."""

    def __init__(
        self,
        board: RegistryBoard,
        log: Log,
        contents: Contents,
        schedule: Callable[[float, Callable[[], None]], object],
        ring_bells: Callable[[], None],
    ) -> None:
        self._board = board
        self._log = log
        self._contents = contents
        self._schedule = schedule
        self._ring_bells = ring_bells
        self._is_scheduled = False
        self._waiting: list[asyncio.Future[None]] = []
        self._listeners: list[Callable[[], None]] = []

    def read(self) -> Registry:
        """Return what is in force."""
        return self._board.read()

    def subscribe(self, listener: Callable[[], None]) -> None:
        """Have ``listener`` called after each publication."""
        self._listeners.append(listener)

    def soon(self) -> None:
        """Publish within a few milliseconds, with whatever else changes until then."""
        if not self._is_scheduled:
            self._is_scheduled = True
            self._schedule(PUBLISH_DELAY_S, self.now)

    async def published(self) -> None:
        """Wait until all that has been changed is in force, and so survives this process."""
        if self._is_scheduled:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(future)
            await future

    def finish(self) -> None:
        """Publish what waits for it, if anything does: this process ends."""
        if self._is_scheduled:
            self.now()

    def now(self) -> None:
        """Publish. A set that does not fit into its shared memory leaves the last one in force."""
        self._is_scheduled = False
        upstreams, cut, memo = self._contents()
        try:
            generation = self._board.publish(upstreams, cut, memo)
        except ValueError as exc:
            self._log.error("registry_not_published", reason=str(exc))
        else:
            self._ring_bells()
            self._log.debug("registry_published", generation=generation, upstreams=len(upstreams))
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)
        for listener in self._listeners:
            listener()

    def __repr__(self) -> str:
        return f"Publisher(scheduled={self._is_scheduled})"
