"""A leg over connections whose transports the test plays: what it promises, and what it gives back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from meshd.io import leg as leg_module
from meshd.io.leg import Leg
from meshd.io.pool import Address
from meshd.io.upstream import UpstreamConnection, UpstreamFailure
from tests.fakes.transport import FakeClock, FakeTransport

ADDRESS = Address("http://u")
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"

pytestmark = pytest.mark.skipif(
    not leg_module.__file__.endswith(".py"), reason="compiled code takes no stand-in for Services"
)


class Scene:
    """A pool with one idle connection, or none, whose fresh connections come when the test lets them."""

    def __init__(self, has_idle: bool = False) -> None:
        self.clock = FakeClock()
        self.opened: list[UpstreamConnection] = []
        self.connected: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.idle = [self.open()] if has_idle else []
        self.released: list[UpstreamConnection] = []
        self.replaced = 0
        self.io: Any = SimpleNamespace(
            clock=self.clock,
            first_byte_timeout_s=0.0,
            metrics=SimpleNamespace(reuse_retries=SimpleNamespace(inc=self._count)),
            pool=SimpleNamespace(
                try_idle=lambda address, now: self.idle.pop() if self.idle else None,
                connect=self._connect,
                release=self.released.append,
            ),
            settings=SimpleNamespace(upstream_connect_timeout_secs=5.0),
        )
        self.leg = Leg(self.io, self.clock() + 60.0)

    def _count(self) -> None:
        self.replaced += 1

    async def _connect(self, address: Address) -> UpstreamConnection:
        await self.connected
        return self.open()

    def open(self) -> UpstreamConnection:
        connection = UpstreamConnection("u", asyncio.get_running_loop(), lambda _: None, self.clock)
        FakeTransport(connection)
        self.opened.append(connection)
        return connection

    def transport(self, number: int) -> Any:
        return self.opened[number].transport

    async def begin(self) -> asyncio.Task[Any]:
        """Ask, and let happen what happens by itself."""
        asking = self.ask()
        await turns()
        return asking

    def ask(self, needs_fresh: bool = False) -> asyncio.Task[Any]:
        async def wait() -> Any:
            return await self.leg.ask(ADDRESS, "POST", b"head", [b"body"], needs_fresh)

        return asyncio.create_task(wait())

    async def let_connect(self) -> None:
        self.connected.set_result(None)
        await turns()


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def play(story: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(story())


def test_idle_connection_is_asked_at_once():
    async def story() -> None:
        it = Scene(has_idle=True)
        asking = await it.begin()
        assert it.leg.is_reused and bytes(it.transport(0).sent) == b"headbody"
        it.transport(0).receive(OK)
        assert (await asking).status == 200 and it.leg.response is await asking

    play(story)


def test_reused_connection_that_dies_before_any_byte_is_replaced_and_nobody_notices():
    async def story() -> None:
        it = Scene(has_idle=True)
        asking = await it.begin()
        it.opened[0].eof_received()
        await it.let_connect()
        assert not asking.done() and it.replaced == 1 and not it.leg.is_reused
        assert bytes(it.transport(1).sent) == b"headbody"
        it.transport(1).receive(OK)
        assert (await asking).status == 200 and it.leg.connection is it.opened[1]

    play(story)


@pytest.mark.parametrize(("has_idle", "bytes_before"), [(True, b"HTTP/1.1 2"), (False, b"")])
def test_connection_that_dies_otherwise_is_a_failure(has_idle, bytes_before):
    """After a byte of a response, or fresh."""

    async def story() -> None:
        it = Scene(has_idle)
        it.connected.set_result(None)
        asking = await it.begin()
        it.transport(0).receive(bytes_before)
        it.opened[0].eof_received()
        with pytest.raises(UpstreamFailure) as caught:
            await asking
        assert caught.value.code == "upstream_connection_failed" and it.replaced == 0

    play(story)


def test_replacement_that_dies_too_is_a_failure():
    async def story() -> None:
        it = Scene(has_idle=True)
        asking = await it.begin()
        it.opened[0].eof_received()
        await it.let_connect()
        it.opened[1].eof_received()
        with pytest.raises(UpstreamFailure):
            await asking
        assert it.replaced == 1 and len(it.opened) == 2

    play(story)


@pytest.mark.parametrize("how", ["close", "release"])
def test_leg_that_is_given_up_while_it_connects_connects_no_more(how):
    async def story() -> None:
        it = Scene()
        asking = await it.begin()
        getattr(it.leg, how)()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert it.connected.cancelled()
        assert it.opened == [] and it.released == []

    play(story)


def test_connection_that_comes_after_its_leg_was_given_up_is_closed():
    async def story() -> None:
        it = Scene()
        asking = await it.begin()
        it.connected.set_result(None)
        for _ in range(20):
            if it.leg.connection is not None:
                break
            await asyncio.sleep(0)
        it.leg.close()
        await turns()
        assert asking.done() and it.opened[0].is_closed and not it.transport(0).sent

    play(story)


def test_leg_that_is_cut_off_while_it_connects_is_not_sent():
    async def story() -> None:
        it = Scene()
        asking = await it.begin()
        it.leg.cut_off("removed")
        await it.let_connect()
        with pytest.raises(UpstreamFailure) as caught:
            await asking
        assert not caught.value.was_sent and it.opened[0].is_closed and not it.transport(0).sent

    play(story)


def test_leg_that_is_cut_off_is_not_replaced():
    async def story() -> None:
        it = Scene(has_idle=True)
        asking = await it.begin()
        it.leg.cut_off("removed")
        with pytest.raises(UpstreamFailure):
            await asking
        assert it.replaced == 0 and len(it.opened) == 1

    play(story)


def test_fault_of_a_connect_reaches_who_waits():
    async def story() -> None:
        it = Scene()
        asking = await it.begin()
        it.connected.set_exception(ZeroDivisionError("a bug"))
        with pytest.raises(ZeroDivisionError):
            await asking

    play(story)


def test_idle_connection_holds_nothing_of_the_leg_that_used_it():
    async def story() -> None:
        it = Scene(has_idle=True)
        asking = await it.begin()
        it.transport(0).receive(OK)
        await asking
        it.leg.release()
        assert it.released == [it.opened[0]] and it.opened[0]._response is None

    play(story)
