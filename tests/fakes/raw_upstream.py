"""An upstream that plays given bytes after each POST and tells when its connections end, to the millisecond.

It runs in a thread of the test process, so its clock is the test's clock. Bodies are counted and hashed as
they arrive, never kept.
"""

from __future__ import annotations

import asyncio
import hashlib
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self

NOT_FOUND = b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n"


@dataclass
class Received:
    """One POST as it arrived. ``ended_at``: monotonic time at which the connection was lost."""

    head: bytes
    body_bytes: int = 0
    digest: Any = field(default_factory=hashlib.sha256)
    ended_at: float = 0.0


class RawUpstream:
    """Answers GET with 404, so that probes and discovery learn nothing, and every POST with ``reply``.

    After ``reply`` comes ``trickle`` each 5 ms for as long as there is a connection; without a trickle there
    is silence. ``keeps_alive``: keep the connection for the next request instead, for ``idle_secs`` at most.
    Without ``takes_bodies`` it stops reading after a head. ``connections`` counts all there were.
    ``requests`` has each POST once its body is complete (or will not be read), ``ends`` each POST whose
    connection ended.
    """

    def __init__(
        self,
        reply: bytes | Callable[[Received], bytes],
        trickle: bytes = b"",
        keeps_alive: bool = False,
        takes_bodies: bool = True,
        idle_secs: float | None = None,
        host: str = "127.0.0.1",
    ) -> None:
        self.reply, self.trickle, self.keeps_alive = reply, trickle, keeps_alive
        self.takes_bodies = takes_bodies
        self.idle_secs = idle_secs
        self.connections = 0
        self._host = host
        self.requests: queue.Queue[Received] = queue.Queue()
        self.ends: queue.Queue[Received] = queue.Queue()
        self.open_connections = 0
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        started = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(started,), daemon=True)
        self._thread.start()
        assert started.wait(10)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def _run(self, started: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(
            asyncio.start_server(self._serve, self._host, 0, limit=1 << 20)
        )
        self.port = server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        started.set()
        self._loop.run_forever()
        server.close()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open_connections += 1
        self.connections += 1
        received: Received | None = None
        try:
            while True:
                async with asyncio.timeout(self.idle_secs if received else None):
                    head = await reader.readuntil(b"\r\n\r\n")
                if not head.startswith(b"POST"):
                    writer.write(NOT_FOUND)
                    continue
                received = Received(head)
                if not self.takes_bodies:
                    self.requests.put(received)
                    await asyncio.Event().wait()
                await self._read_body(reader, received)
                self.requests.put(received)
                writer.write(self.reply if isinstance(self.reply, bytes) else self.reply(received))
                if not self.keeps_alive:
                    await self._trickle_until_end(reader, writer)
                    break
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            self.open_connections -= 1
            if received is not None:
                received.ended_at = time.monotonic()
                self.ends.put(received)
            writer.close()

    async def _read_body(self, reader: asyncio.StreamReader, received: Received) -> None:
        lines = received.head.lower().split(b"\r\n")
        length = next(int(line.split(b":")[1]) for line in lines if line.startswith(b"content-length:"))
        while received.body_bytes < length:
            piece = await reader.read(min(1 << 20, length - received.body_bytes))
            if not piece:
                raise asyncio.IncompleteReadError(b"", length)
            received.body_bytes += len(piece)
            received.digest.update(piece)

    async def _trickle_until_end(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        end = asyncio.ensure_future(reader.read(1))
        while not end.done():
            if self.trickle:
                writer.write(self.trickle)
            await asyncio.wait((end,), timeout=0.005 if self.trickle else None)
        end.result()
