"""Clients of every kind, each with one outcome for each request."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Self

from tests.stress.chaos.asks import Ask, Asks, WrongAnswer, judge_part, judge_whole

HANG_SECS = 45.0
RESET = struct.pack("ii", 1, 0)


@dataclass
class Outcome:
    """What came of one request. Times are monotonic.

    ``kind``: `complete`, `refused` (an error in JSON), `told` (an error event), `cut` (the connection ended
    first), `aborted` (by this client), `hang`, `wrong`. ``fellows``: ids of those on the same connection.
    ``is_silent``: cut where the end of the connection is the end of the body, and without a reset.
    """

    ask: Ask
    connected_at: float
    asked_at: float
    fellows: list[str]
    kind: str = ""
    status: int = 0
    code: str = ""
    what: str = ""
    ended_at: float = 0.0
    is_silent: bool = False


@dataclass
class Partial:
    """The response so far. ``is_unframed``: its end is that of the connection (HTTP/1.0)."""

    status: int = 0
    is_unframed: bool = False
    fields: dict[bytes, bytes] = field(default_factory=dict)
    body: bytearray = field(default_factory=bytearray)


class ClientLeaves(Exception):
    """The client's own decision."""


class Traffic:
    """``clients`` connections at a time, in a thread and loop of their own while the block runs."""

    def __init__(
        self, host: str, port: int, rng: random.Random, clients: int, *, is_calm: bool = False
    ) -> None:
        self._host, self._port = host, port
        self._rng = rng
        self._asks = Asks(rng)
        self._clients = clients
        self._is_calm = is_calm
        self._is_over = False
        self.outcomes: list[Outcome] = []
        self.open: dict[str, Outcome] = {}
        self.refused: list[tuple[float, str]] = []
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Start no more requests and wait for the last outcome."""
        self._is_over = True
        self._thread.join(HANG_SECS + 15)
        assert not self._thread.is_alive(), f"requests hang: {list(self.open)[:5]}"

    def kinds(self) -> Counter[str]:
        return Counter(outcome.kind for outcome in self.outcomes)

    async def _run(self) -> None:
        await asyncio.gather(*(self._client() for _ in range(self._clients)))

    async def _client(self) -> None:
        rng = self._rng
        while not self._is_over:
            await asyncio.sleep(rng.random() * 0.02)
            started = asyncio.open_connection(self._host, self._port, limit=rng.choice((4096, 1 << 16)))
            try:
                async with asyncio.timeout(HANG_SECS):
                    reader, writer = await started
            except (OSError, TimeoutError) as error:
                self.refused.append((time.monotonic(), repr(error)))
                continue
            connected_at, fellows = time.monotonic(), list[str]()
            try:
                for _ in range(rng.choice((1, 2, 8, 20))):
                    if self._is_over or not await self._one(reader, writer, connected_at, fellows):
                        break
                    await asyncio.sleep(rng.random() * 0.03)
            finally:
                writer.close()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()

    async def _one(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        connected_at: float,
        fellows: list[str],
    ) -> bool:
        """Make one request; return whether the connection may be used again."""
        ask = self._asks.make(is_calm=self._is_calm)
        outcome = Outcome(ask, connected_at, time.monotonic(), fellows)
        self.open[ask.id] = outcome
        part, keeps = Partial(), False
        try:
            async with asyncio.timeout(HANG_SECS):
                keeps = await self._exchange(reader, writer, ask, part)
            outcome.kind = judge_whole(ask, part.status, bytes(part.body))
        except ClientLeaves:
            outcome.kind = "aborted"
        except (OSError, EOFError) as error:
            outcome.kind, outcome.what = "cut", repr(error)
        except TimeoutError:
            outcome.kind = "hang"
        except (WrongAnswer, ValueError) as error:
            outcome.kind, outcome.what = "cut" if part.is_unframed else "wrong", f"{error} {part.fields}"
            outcome.is_silent = part.is_unframed
        if outcome.kind in ("cut", "aborted"):
            try:
                judge_part(ask, part.status, bytes(part.body))
            except WrongAnswer as wrong:
                outcome.kind, outcome.what = "wrong", str(wrong)
        outcome.status = part.status
        outcome.code = part.fields.get(b"x-mesh-error-code", b"").decode()
        if part.status and part.fields.get(b"x-request-id", b"").decode() != ask.id:
            outcome.kind, outcome.what = "wrong", f"the answer to another request: {part.fields}"
        outcome.ended_at = time.monotonic()
        self.outcomes.append(outcome)
        del self.open[ask.id]
        fellows.append(ask.id)
        return keeps and outcome.kind != "told"  # which ends with the connection (upstream.md section 8)

    async def _exchange(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, ask: Ask, part: Partial
    ) -> bool:
        rng = self._rng
        leaves_in_s = rng.random() * 0.3 if not self._is_calm and rng.random() < 0.08 else None
        is_slow = not self._is_calm and rng.random() < 0.06
        is_http10 = not self._is_calm and rng.random() < 0.05
        if leaves_in_s is None:
            return await self._talk(reader, writer, ask, part, is_slow, is_http10)
        try:
            async with asyncio.timeout(leaves_in_s):
                return await self._talk(reader, writer, ask, part, is_slow, is_http10)
        except TimeoutError:
            if rng.random() < 0.5:
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                writer.transport.abort()
            raise ClientLeaves from None

    async def _talk(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        ask: Ask,
        part: Partial,
        is_slow: bool,
        is_http10: bool,
    ) -> bool:
        await self._send(writer, ask, is_slow, is_http10)
        head = await reader.readuntil(b"\r\n\r\n")
        line, *fields = head[:-4].split(b"\r\n")
        part.status = int(line.split(b" ")[1])
        part.fields = {name.lower(): value for name, _, value in (each.partition(b": ") for each in fields)}
        await self._read_body(reader, part, is_slow)
        return not is_http10 and part.fields.get(b"connection", b"").lower() != b"close"

    async def _send(self, writer: asyncio.StreamWriter, ask: Ask, is_slow: bool, is_http10: bool) -> None:
        rng, body = self._rng, ask.body
        is_chunked = not is_http10 and rng.random() < 0.15
        length = b"transfer-encoding: chunked" if is_chunked else b"content-length: %d" % len(body)
        fault = f"x-backend-fault: {ask.fault}\r\n" if ask.fault else ""
        version = "1.0" if is_http10 else "1.1"
        head = (
            f"POST {ask.path} HTTP/{version}\r\nhost: h\r\ncontent-type: application/json\r\n"
            f"x-request-id: {ask.id}\r\nauthorization: Bearer {ask.key}\r\n{fault}"
        )
        framed = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body) if is_chunked else body
        data = head.encode() + length + b"\r\n\r\n" + framed
        step = max(1, len(data) // rng.choice((2, 5))) if is_slow or rng.random() < 0.1 else len(data)
        for at in range(0, len(data), step):
            writer.write(data[at : at + step])
            await writer.drain()
            if step < len(data):
                await asyncio.sleep(rng.random() * (0.2 if is_slow else 0.005))

    async def _read_body(self, reader: asyncio.StreamReader, part: Partial, is_slow: bool) -> None:
        fields, body = part.fields, part.body
        if b"content-length" in fields:
            await self._read(reader, body, int(fields[b"content-length"]), is_slow)
        elif fields.get(b"transfer-encoding") == b"chunked":
            while size := int(await reader.readuntil(b"\r\n"), 16):
                await self._read(reader, body, size, is_slow)
                if await reader.readexactly(2) != b"\r\n":
                    raise WrongAnswer("broken chunk framing")
            if await reader.readexactly(2) != b"\r\n":
                raise WrongAnswer("broken chunk framing")
        else:
            part.is_unframed = True
            while piece := await reader.read(4096):
                body += piece

    async def _read(self, reader: asyncio.StreamReader, body: bytearray, left: int, is_slow: bool) -> None:
        while left:
            piece = await reader.read(min(left, 1 << 16))
            if not piece:
                raise EOFError
            body += piece
            left -= len(piece)
            if is_slow and self._rng.random() < 0.1:
                await asyncio.sleep(self._rng.random() * 0.1)
