"""The bytes of a client connection; what a connection makes of them is in test_downstream.py."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Awaitable, Callable

import pytest

from meshd.io.client_socket import ClientSocket


class Ignoring(asyncio.BufferedProtocol):
    """Takes bytes in and does nothing with them; ``side`` has the transport."""

    def __init__(self) -> None:
        self.side = ClientSocket()
        self._scratch = memoryview(bytearray(65536))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.side.connection_made(transport)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._scratch


def on_a_socket_pair(scene: Callable[[ClientSocket, socket.socket], Awaitable[None]]) -> None:
    async def run() -> None:
        listening = socket.create_server(("127.0.0.1", 0))
        client = socket.create_connection(listening.getsockname())
        accepted, _ = listening.accept()
        with listening, client:
            loop = asyncio.get_running_loop()
            _, protocol = await loop.create_connection(Ignoring, sock=accepted)
            side = protocol.side
            assert side.peer == "{}:{}".format(*client.getsockname())
            client.setblocking(False)
            async with asyncio.timeout(10):
                await scene(side, client)
            assert side.transport is not None
            side.transport.abort()

    asyncio.run(run())


def test_a_cut_with_a_reset_is_seen_as_one_and_a_plain_cut_as_an_end():
    async def reset(side: ClientSocket, client: socket.socket) -> None:
        side._cut(True)
        with pytest.raises(ConnectionResetError):
            await asyncio.get_running_loop().sock_recv(client, 1)

    async def plain(side: ClientSocket, client: socket.socket) -> None:
        side._cut(False)
        assert await asyncio.get_running_loop().sock_recv(client, 1) == b""

    on_a_socket_pair(reset)
    on_a_socket_pair(plain)


def test_after_a_shutdown_the_client_reads_to_the_end_and_may_still_send():
    async def scene(side: ClientSocket, client: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        assert side.transport is not None
        side.transport.write(b"answer")
        assert side._try_shut_down()
        read = b""
        while piece := await loop.sock_recv(client, 100):
            read += piece
        assert read == b"answer"
        await loop.sock_sendall(client, b"rest")

    on_a_socket_pair(scene)


def test_a_client_that_takes_a_byte_has_all_its_patience_again():
    async def scene(side: ClientSocket, client: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        assert side.transport is not None
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        side.transport.write(b"x" * (32 << 20))
        side.write_paused_at = 1.0
        assert not side._is_stuck(5.0, 3.0)  # it took the first bytes
        assert not side._is_stuck(8.0, 3.0)
        assert side._is_stuck(8.1, 3.0)
        while not side._has_taken_bytes():
            await loop.sock_recv(client, 1 << 20)
        side._unsent += 1
        assert not side._is_stuck(9.0, 3.0) and side.write_paused_at == 9.0

    on_a_socket_pair(scene)
