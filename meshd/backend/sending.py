"""Sends one response slowly, in pieces, or not to its end, as delays and faults demand.

A body limit (``cut``, ``reset-at``, ``stall``) counts bytes of the body proper, not of chunk framing. The
chunk in which it falls is announced with its full size, so what the peer sees is a server that died while
it wrote. A limit beyond the end of the body never acts; one at exactly the end acts before the last chunk.
"""

from __future__ import annotations

import asyncio
from enum import Enum
from typing import Final, Protocol

from meshd.backend.faults import Faults
from meshd.backend.reply import Reply
from meshd.backend.service import Exchange
from meshd.backend.wire import LAST_CHUNK, MALFORMED_HEAD, Framing

IMMEDIATE_WORDS: Final = 2048  # about 0.5 MiB of chat events: more must heed back-pressure


class Ending(Enum):
    """What becomes of the connection after a response."""

    COMPLETE = "complete"
    CLOSE = "close"
    RESET = "reset"
    SILENCE = "silence"  # says nothing more until the peer closes


class Outlet(Protocol):
    """Where bytes go; ``drain`` returns once there is room for more."""

    def write(self, data: bytes) -> None: ...

    async def drain(self) -> None: ...


def is_immediate(exchange: Exchange) -> bool:
    """Say whether the whole response can be written in one piece, without a task of its own."""
    faults = exchange.faults
    acts = (
        faults.delay_head_ms
        or faults.close
        or faults.reset
        or faults.malformed_head
        or faults.split
        or _limit_of(faults) is not None
    )
    return not acts and not _generation_s(exchange) and exchange.reply.words <= IMMEDIATE_WORDS


async def send(exchange: Exchange, head: bytes, framing: Framing, outlet: Outlet) -> Ending:
    """Send the response and return how it ended; cancelled when the peer leaves."""
    faults, reply = exchange.faults, exchange.reply
    if faults.delay_head_ms:
        await asyncio.sleep(faults.delay_head_ms / 1000)
    if reply.events is None:
        await asyncio.sleep(_generation_s(exchange))
    if faults.reset:
        return Ending.RESET
    if faults.close:
        return Ending.CLOSE
    writer = _Writer(outlet, faults)
    if faults.malformed_head:
        await writer.put(MALFORMED_HEAD)
        return Ending.CLOSE
    await writer.put(head)
    try:
        await _send_body(exchange, framing, writer)
    except _LimitReached as reached:
        if reached.ending is Ending.SILENCE:
            await asyncio.get_running_loop().create_future()
        return reached.ending
    return Ending.COMPLETE


def _generation_s(exchange: Exchange) -> float:
    """A plain answer takes as long as its words would in a stream; no words, no time."""
    if not exchange.reply.words:
        return 0.0
    return exchange.first_token_delay_s + exchange.token_delay_s * exchange.reply.words


async def _send_body(exchange: Exchange, framing: Framing, writer: _Writer) -> None:
    if framing is Framing.NONE:
        return
    writer.check_limit()
    if exchange.reply.events is None:
        await writer.put_body(exchange.reply.body)
        return
    is_chunked = framing is Framing.CHUNKED
    await _send_events(exchange, exchange.reply, writer, is_chunked)
    if is_chunked:
        await writer.put(LAST_CHUNK)


async def _send_events(exchange: Exchange, reply: Reply, writer: _Writer, is_chunked: bool) -> None:
    loop = asyncio.get_running_loop()
    due = loop.time() + exchange.first_token_delay_s  # absolute times: a late timer delays no later event
    for event in reply.events or ():
        due += exchange.token_delay_s
        if due > loop.time():
            await asyncio.sleep(due - loop.time())
        data = event.render()
        if is_chunked:
            await writer.put_body(data, b"%x\r\n" % len(data), b"\r\n")
        else:
            await writer.put_body(data)


def _limit_of(faults: Faults) -> tuple[int, Ending] | None:
    """Return the nearest body limit and what happens there."""
    limits = (
        (faults.reset_at, Ending.RESET),
        (faults.cut, Ending.CLOSE),
        (faults.stall, Ending.SILENCE),
    )
    present = [(at, ending) for at, ending in limits if at is not None]
    return min(present, key=lambda limit: limit[0], default=None)


class _LimitReached(Exception):
    def __init__(self, ending: Ending) -> None:
        super().__init__(ending)
        self.ending = ending


class _Writer:
    """Writes pieces of the asked size, and stops the body at its limit."""

    def __init__(self, outlet: Outlet, faults: Faults) -> None:
        self._outlet = outlet
        self._piece_bytes = faults.split
        self._limit = _limit_of(faults)
        self._body_bytes = 0

    async def put(self, data: bytes) -> None:
        size = self._piece_bytes
        if size is None:
            self._outlet.write(data)
            await self._outlet.drain()
            return
        for start in range(0, len(data), size):
            self._outlet.write(data[start : start + size])
            await asyncio.sleep(0)  # the loop joins writes of one turn: without this there is one piece
            await self._outlet.drain()

    async def put_body(self, data: bytes, before: bytes = b"", after: bytes = b"") -> None:
        if self._limit is not None:
            left = self._limit[0] - self._body_bytes
            if left < len(data):
                data, after = data[:left], b""
        self._body_bytes += len(data)
        await self.put(before + data + after)
        self.check_limit()

    def check_limit(self) -> None:
        if self._limit is not None and self._body_bytes >= self._limit[0]:
            raise _LimitReached(self._limit[1])
