"""An upstream that answers as the bundled one does, or breaks off, stalls, floods and lies, as chance has it.

It looks at each request that reaches it: credentials, request id and body must be those of one client.
"""

from __future__ import annotations

import asyncio
import random
import socket
import struct
import threading
from collections import Counter
from typing import Self

from meshd.backend.reply import SSE
from meshd.backend.service import Options, Service
from meshd.backend.state import Request
from tests.stress.chaos.asks import MODEL, key_of, render, reply_to

RESET = struct.pack("ii", 1, 0)
HANG_SECS = 3.0
SILENT = ("hang", "reset", "close", "half-head", "garbage")  # no whole head
WEIGHTS = {
    "good": 40, "close-idle": 6, "reset-idle": 4, "leave": 4, "bytewise": 4, "extra": 3, "interim": 3,
    "cut": 5, "cut-reset": 5, "stall": 2, "bad-chunk": 2, "busy": 4, "busy-for": 2, "fail": 3,
    "hang": 2, "reset": 4, "close": 4, "half-head": 2, "garbage": 1, "early": 2,
}  # fmt: skip


class BadUpstream:
    """Runs in a thread of its own while the block runs. ``is_good``: it behaves from now on.

    ``arrivals``: how often each request id came. ``mixed``: requests that were not of one piece.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._service = Service(Options(models=(MODEL,)))
        self.is_good = False
        self.arrivals: Counter[str] = Counter()
        self.mixed: list[str] = []
        self.played: Counter[str] = Counter()
        self._loop = asyncio.new_event_loop()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._started.wait(10)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(
            asyncio.start_server(self._serve, "127.0.0.1", 0, limit=1 << 20)
        )
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._started.set()
        self._loop.run_forever()
        server.close()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await self._exchange(reader, writer):
                pass
        except (OSError, EOFError, asyncio.CancelledError):  # cancelled only when all ends
            pass
        finally:
            writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Serve one request; return whether the connection stays."""
        head = await reader.readuntil(b"\r\n\r\n")
        line, *lines = head[:-4].decode("latin-1").split("\r\n")
        method, target, _ = line.split(" ")
        fields = {name.lower(): value for name, _, value in (each.partition(": ") for each in lines)}
        if method != "POST":
            exchange = self._service.begin(Request(method, target, (), b"", 0))
            writer.write(plain(exchange.reply.status, exchange.reply.body))
            return True
        way = "good" if self.is_good else self._rng.choices(tuple(WEIGHTS), tuple(WEIGHTS.values()))[0]
        self.played[way] += 1
        self.arrivals[fields.get("x-request-id", "")] += 1
        if way == "early":
            writer.write(plain(503, error("no, thank you"), b"connection: close\r\n"))
            return False
        body = await reader.readexactly(int(fields["content-length"]))
        self._look_at(fields, body)
        return await self._answer(reader, writer, way, target, body)

    def _look_at(self, fields: dict[str, str], body: bytes) -> None:
        name = fields.get("x-request-id", "")
        if fields.get("authorization") != f"Bearer {key_of(name)}" or name.encode() not in body:
            self.mixed.append(f"{fields} {body[:100]!r}")

    async def _answer(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: str, target: str, body: bytes
    ) -> bool:
        rng = self._rng
        if way in SILENT:
            return await self._say_nothing(reader, writer, way)
        if way in ("busy", "busy-for", "fail"):
            advice = b"retry-after: 1\r\n" if way == "busy-for" else b""
            status = 500 if way == "fail" else rng.choice((429, 503))
            writer.write(plain(status, error("another time"), advice))
            return True
        head, rendered = self._response(target, body)
        if way == "interim":
            writer.write(b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" * rng.randint(1, 15))
        if way in ("cut", "cut-reset", "stall"):
            writer.write(head + rendered[: rng.randrange(len(rendered))])
            await writer.drain()
            if way == "stall":
                await silence(reader)
            elif way == "cut-reset":
                await asyncio.sleep(rng.random() * 0.02)
                reset(writer)
            return False
        if way == "bad-chunk" and b"chunked" in head:
            at = rng.randrange(len(rendered))
            rendered = rendered[:at] + b"\xffzz" + rendered[at:]
        if way == "bytewise":
            for at in range(0, len(head), 7):
                writer.write(head[at : at + 7])
                await asyncio.sleep(0)
        else:
            writer.write(head)
        writer.write(rendered + (b"HTTP/1.1 200 OK\r\n" if way == "extra" else b""))
        await writer.drain()
        return await self._end(writer, way)

    async def _end(self, writer: asyncio.StreamWriter, way: str) -> bool:
        if way in ("close-idle", "reset-idle"):
            await asyncio.sleep(self._rng.random() ** 3)
            if way == "reset-idle":
                reset(writer)
            return False
        return way != "leave"

    async def _say_nothing(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: str
    ) -> bool:
        match way:
            case "hang":
                await silence(reader)
            case "reset":
                reset(writer)
            case "half-head":
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-ty")
            case "garbage":
                writer.write(b"SSH-2.0-OpenSSH_9.6\r\n\r\n\x00\xff")
        return False

    def _response(self, target: str, body: bytes) -> tuple[bytes, bytes]:
        """Return head and framed body; a stream in chunks that heed no event."""
        reply = reply_to(self._service, target, body)
        data = render(reply)
        if reply.events is None:
            return plain(reply.status, b"", length=len(data)), data
        head = b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\ntransfer-encoding: chunked\r\n\r\n" % SSE
        step = self._rng.choice((len(data), 4096, 97))
        pieces = (data[at : at + step] for at in range(0, len(data), step))
        return head, b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


def plain(status: int, body: bytes, fields: bytes = b"", length: int | None = None) -> bytes:
    size = len(body) if length is None else length
    return b"HTTP/1.1 %d X\r\ncontent-type: application/json\r\n%bcontent-length: %d\r\n\r\n%b" % (
        status, fields, size, body,
    )  # fmt: skip


def error(message: str) -> bytes:
    return b'{"error":{"message":"%b","type":"api_error","param":null,"code":"x"}}' % message.encode()


async def silence(reader: asyncio.StreamReader) -> None:
    """Say nothing until the peer closes, or for some seconds."""
    try:
        async with asyncio.timeout(HANG_SECS):
            await reader.read(1)
    except TimeoutError:
        pass


def reset(writer: asyncio.StreamWriter) -> None:
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    writer.transport.abort()
