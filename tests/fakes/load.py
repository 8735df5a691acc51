"""Steady traffic from many keep-alive connections, each answer checked, each failure kept with its moment."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from dataclasses import dataclass
from itertools import count
from typing import Self

from tests.fakes.node import Node


@dataclass(frozen=True)
class Failure:
    """``is_cut``: the connection ended, or could not be made; else the answer was wrong.

    ``asked_at``: when the request was sent.
    """

    at: float
    port: int
    is_cut: bool
    what: str
    asked_at: float


class SteadyLoad:
    """Runs in a thread of its own while the block runs. One request in two is a stream of about 0.2 s.

    ``paced_s``: pause of each connection between two requests. ``reuses``: a connection has more than one.
    """

    def __init__(
        self,
        node: Node,
        connections: int = 12,
        paced_s: float = 0.01,
        *,
        reuses: bool = True,
        **members: object,
    ) -> None:
        self._node, self._connections, self._paced_s, self._reuses = node, connections, paced_s, reuses
        self._members = {"model": "m1", **members}
        self._numbers = count()
        self._is_over = False
        self.completed = 0
        self.failures: list[Failure] = []
        self.refused: list[str] = []
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over = True
        self._thread.join(60)
        assert not self._thread.is_alive(), "a request hangs"

    def stop(self) -> None:
        """Start no further request."""
        self._is_over = True

    def wait_for_more(self, requests: int = 50) -> None:
        """Wait until so many more requests have been answered."""
        target, deadline = self.completed + requests, time.monotonic() + 30
        while self.completed < target:
            assert time.monotonic() < deadline, f"no traffic gets through: {self.failures[-3:]}"
            time.sleep(0.005)

    async def _run(self) -> None:
        await asyncio.gather(*(self._client() for _ in range(self._connections)))

    async def _client(self) -> None:
        while not self._is_over:
            try:
                reader, writer = await asyncio.open_connection(self._node.host, self._node.port)
            except OSError as error:
                self.refused.append(repr(error))
                await asyncio.sleep(0.05)
                continue
            port = writer.get_extra_info("sockname")[1]
            asked_at = 0.0
            try:
                is_open = True
                while is_open and not self._is_over:
                    asked_at = time.monotonic()
                    is_open = await self._ask(reader, writer, port) and self._reuses
                    await asyncio.sleep(self._paced_s)
            except (OSError, EOFError, TimeoutError) as error:
                self.failures.append(Failure(time.monotonic(), port, True, repr(error), asked_at))
            finally:
                writer.close()

    async def _ask(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int) -> bool:
        """Return whether the connection may be used again."""
        number, asked_at = next(self._numbers), time.monotonic()
        is_stream = number % 2 == 1
        body = json.dumps({**self._members, "prompt": f"n-{number}-n", "stream": is_stream}).encode()
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: h\r\ncontent-type: application/json\r\n"
            b"x-backend-fault: token-delay-ms=20\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
        )
        async with asyncio.timeout(20):
            head, answer = await read_response(reader)
        end = b"data: [DONE]\n\n" if is_stream else b"}"
        if head.startswith(b"HTTP/1.1 200") and b"n-%d-n" % number in answer and answer.endswith(end):
            self.completed += 1
        else:
            what = f"{head!r} {answer[:300]!r}"
            self.failures.append(Failure(time.monotonic(), port, False, what, asked_at))
        return b"connection: close" not in head.lower()


async def read_response(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    """Read one response by its framing; raises EOFError when it is cut."""
    head = await reader.readuntil(b"\r\n\r\n")
    fields = dict(line.split(b": ", 1) for line in head.lower().split(b"\r\n")[1:-2])
    if b"content-length" in fields:
        return head, await reader.readexactly(int(fields[b"content-length"]))
    body = b""
    while size := int(await reader.readuntil(b"\r\n"), 16):
        body += await reader.readexactly(size)
        await reader.readexactly(2)
    await reader.readexactly(2)
    return head, body
