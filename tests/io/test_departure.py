"""The ways out of an I/O process, with fakes for what it leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from meshd.control import ProcessBoard, Role, State
from meshd.io.departure import Departure


class Left:
    """Listener, server, services, director and pool in one; ``events`` in the order in which they came."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.is_busy = self.is_open = self.is_draining = self.has_jobs = False
        self.handshakes = 0
        self.exchanges: set[Any] = set()
        self.director = self
        board = ProcessBoard.create(1)
        self.row = board.row(0)
        self.row.open(Role.IO, 0, 1, "")
        self.ended = asyncio.Event()
        fake: Any = self
        self.departure = Departure(
            asyncio.get_running_loop(), self.row, fake, fake, fake, fake, lambda: self.handshakes, self.end
        )

    def close(self) -> None:
        self.events.append("close")

    async def close_when_empty(self, patience_s: float) -> None:
        self.events.append("queue emptied")

    def close_idle(self) -> None:
        if "idle closed" not in self.events:
            self.events.append("idle closed")

    def end(self) -> None:
        self.events.append("end")
        self.ended.set()

    async def wait(self) -> None:
        async with asyncio.timeout(10):
            await self.ended.wait()

    async def live_on(self) -> None:
        """Show that nothing happens by itself; some of its turns pass."""
        await asyncio.sleep(0.1)
        assert not self.ended.is_set()


class Running:
    """An exchange that is through with its preparation."""

    def __init__(self, left: Left) -> None:
        self.record = type("Record", (), {"body_at": 1.0, "prepared_at": 2.0})()
        self._left = left
        left.exchanges.add(self)
        left.is_busy = True

    def cut(self) -> None:
        self._left.events.append("cut")
        self._left.exchanges.discard(self)
        self._left.is_busy = False


def play(run: Callable[[Left], Awaitable[None]]) -> None:
    async def main() -> None:
        await run(Left())

    asyncio.run(main())


def test_a_drain_takes_in_the_queue_before_anybody_is_refused() -> None:
    async def run(left: Left) -> None:
        left.departure.drain(5)
        await left.wait()
        assert left.events[:3] == ["queue emptied", "close", "idle closed"]
        assert left.is_draining and left.row.state is State.DRAINING

    play(run)


def test_a_retired_process_refuses_and_closes_nobody_and_ends_with_its_last_connection() -> None:
    async def run(left: Left) -> None:
        left.is_open = True
        left.departure.retire(600)
        await left.live_on()
        assert left.events == ["close"], "the listener alone"
        assert left.is_draining, "answers say connection: close"
        left.is_open = False
        await left.wait()

    play(run)


def test_a_retired_process_waits_for_handshakes_too() -> None:
    async def run(left: Left) -> None:
        left.handshakes = 1
        left.departure.retire(600)
        await left.live_on()
        left.handshakes = 0
        await left.wait()

    play(run)


def test_what_is_left_at_the_end_of_the_grace_period_of_a_retirement_is_cut() -> None:
    async def run(left: Left) -> None:
        left.is_open = True
        Running(left)
        left.departure.retire(0.05)
        await left.wait()
        assert left.events.index("cut") < left.events.index("end")

    play(run)


def test_a_shutdown_wins_over_a_retirement() -> None:
    async def run(left: Left) -> None:
        left.is_open = True
        left.departure.retire(600)
        await left.live_on()
        left.departure.drain(0)
        await left.wait()
        assert "idle closed" in left.events

    play(run)


def test_a_cut_ends_what_runs_at_once() -> None:
    async def run(left: Left) -> None:
        left.is_open = True
        Running(left)
        left.departure.drain(600)
        await left.live_on()
        left.departure.cut()
        await left.wait()
        assert left.events.index("cut") < left.events.index("end")

    play(run)
