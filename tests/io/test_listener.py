"""Accepting on a shared socket, with a real event loop and real clients."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
import uvloop

from meshd.io import listener as module
from meshd.io.listener import Listener


class Greeting(asyncio.Protocol):
    """Says hello to everybody and keeps the connection."""

    def __init__(self, held: list[asyncio.Transport]) -> None:
        self._held = held

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._held.append(transport)  # type: ignore[arg-type]
        transport.write(b"hello")  # type: ignore[attr-defined]


class Scene:
    """A listener whose room the test decides about."""

    def __init__(self, descriptor_limit: int) -> None:
        self.shared = socket.create_server(("127.0.0.1", 0), backlog=100)
        self.held: list[asyncio.Transport] = []
        self.room = 1_000_000
        self.pauses = self.errors = 0
        self.listener = Listener(
            asyncio.get_running_loop(),
            self.shared.fileno(),
            lambda: Greeting(self.held),
            has_room=lambda: len(self.held) < self.room,
            descriptor_limit=descriptor_limit,
            on_pause=self._paused,
            on_error=self._failed,
        )

    def _paused(self) -> None:
        self.pauses += 1

    def _failed(self) -> None:
        self.errors += 1

    async def greeted(self) -> socket.socket:
        """Connect and wait for the greeting."""
        client = self.connect()
        async with asyncio.timeout(10):
            assert await asyncio.get_running_loop().sock_recv(client, 10) == b"hello"
        return client

    def connect(self) -> socket.socket:
        client = socket.create_connection(self.shared.getsockname())
        client.setblocking(False)
        return client

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not condition():
                await asyncio.sleep(0)


@asynccontextmanager
async def scene(descriptor_limit: int = 1 << 20) -> AsyncIterator[Scene]:
    it = Scene(descriptor_limit)
    await it.listener.open()
    try:
        yield it
    finally:
        it.listener.close()
        for transport in it.held:
            transport.abort()
        it.shared.close()


def play(run: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        await run()

    uvloop.run(main())


@pytest.fixture(autouse=True)
def short_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PAUSE_SECS", 0.001)


def test_connections_wait_unrefused_while_there_is_no_room_and_are_served_afterwards() -> None:
    async def run() -> None:
        async with scene() as it:
            it.room = 2
            clients = [await it.greeted() for _ in range(2)]
            clients.append(await it.greeted())  # the one that finds out
            await it.until(lambda: repr(it.listener) == "Listener(paused)")
            waiting = [it.connect() for _ in range(3)]
            await asyncio.sleep(0.01)
            assert len(it.held) == 3
            assert it.pauses == 1
            it.room = 100
            for client in waiting:
                async with asyncio.timeout(10):
                    assert await asyncio.get_running_loop().sock_recv(client, 10) == b"hello"
            assert repr(it.listener) == "Listener(open)"
            for client in clients + waiting:
                client.close()

    play(run)


def test_accepting_pauses_before_the_last_descriptors_are_used() -> None:
    async def run() -> None:
        base = os.dup(0)
        os.close(base)
        async with scene(descriptor_limit=base + 60) as it:
            clients = []
            while it.listener.__repr__() == "Listener(open)":
                clients.append(await it.greeted())
                await asyncio.sleep(0)
                assert len(clients) < 60, "all descriptors were used up"
            # each takes two, since both ends live in this process, beside what other tests left open
            assert 5 <= len(clients) <= 28
            held = len(it.held)
            for client in clients:
                client.close()
            for transport in it.held:
                transport.abort()
            (await it.greeted()).close()
            assert len(it.held) > held

    play(run)


def test_a_socket_that_the_event_loop_gave_up_is_opened_again() -> None:
    async def run() -> None:
        async with scene() as it:
            it.listener.check()
            assert repr(it.listener) == "Listener(open)" and it.errors == 0
            # What the event loop does at an error of accept: it closes its descriptor and tells nobody.
            assert it.listener._server is not None
            it.listener._server.close()
            await it.until(lambda: it.listener._socket is not None and it.listener._socket.fileno() < 0)
            it.listener.check()
            assert repr(it.listener) == "Listener(paused)" and it.errors == 1
            (await it.greeted()).close()

    play(run)


def test_a_closed_listener_stays_closed() -> None:
    async def run() -> None:
        async with scene() as it:
            it.room = 0
            (await it.greeted()).close()
            await it.until(lambda: repr(it.listener) == "Listener(paused)")
            it.listener.close()
            it.room = 100
            client = it.connect()
            await asyncio.sleep(0.02)
            assert len(it.held) == 1
            assert repr(it.listener) == "Listener(closed)"
            client.close()

    play(run)


def test_closing_leaves_connections_alone_and_the_shared_socket_open() -> None:
    async def run() -> None:
        async with scene() as it:
            client = await it.greeted()
            it.listener.close()
            it.held[0].write(b"still here")  # type: ignore[attr-defined]
            assert await asyncio.get_running_loop().sock_recv(client, 20) == b"still here"
            client.close()
            assert it.shared.fileno() >= 0
            it.connect().close()  # the kernel still takes connections, for whoever accepts next

    play(run)


def test_those_who_wait_in_the_queue_are_served_before_the_shared_socket_closes() -> None:
    async def run() -> None:
        it = Scene(1 << 20)
        address = it.shared.getsockname()
        waiting = [it.connect() for _ in range(20)]
        listener = Listener(
            asyncio.get_running_loop(),
            it.shared.detach(),
            lambda: Greeting(it.held),
            has_room=lambda: True,
            descriptor_limit=1 << 20,
        )
        await listener.open()
        await listener.close_when_empty(10)
        for client in waiting:
            async with asyncio.timeout(10):
                assert await asyncio.get_running_loop().sock_recv(client, 10) == b"hello"
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address)
        for transport in it.held:
            transport.abort()

    play(run)
