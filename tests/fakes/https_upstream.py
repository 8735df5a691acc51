"""An https upstream in a thread of the test process: real TLS, and just enough HTTP."""

from __future__ import annotations

import asyncio
import queue
import ssl
import threading
from typing import Self

OK = b'{"id":"1","object":"chat.completion","model":"m1","choices":[]}'


class HttpsUpstream:
    """Answers each GET with 200 and an empty object, each POST as told.

    ``posts`` has the body of each POST, ``peers`` the certificate of each client that showed one. With
    ``is_endless`` a POST is answered by an event each 5 ms until its connection ends, which ``ends`` tells.
    """

    def __init__(self, context: ssl.SSLContext, is_endless: bool = False) -> None:
        self.posts: queue.Queue[bytes] = queue.Queue()
        self.ends: queue.Queue[str] = queue.Queue()
        self.peers: queue.Queue[dict[str, object] | None] = queue.Queue()
        self.servernames: list[str | None] = []
        self._context, self._is_endless = context, is_endless
        context.sni_callback = lambda _tls, name, _context: self.servernames.append(name)
        self._loop = asyncio.new_event_loop()
        started = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(started,), daemon=True)
        self._thread.start()
        assert started.wait(10)

    def url(self, host: str = "localhost") -> str:
        return f"https://{host}:{self.port}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def _run(self, started: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(
            asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self._context, limit=1 << 20)
        )
        self.port = server.sockets[0].getsockname()[1]
        started.set()
        self._loop.run_forever()
        server.close()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.peers.put(writer.get_extra_info("peercert"))
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                if head.startswith(b"get"):
                    writer.write(
                        b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"
                    )
                    continue
                length = int(head.split(b"content-length: ")[1].split(b"\r\n")[0])
                self.posts.put(await reader.readexactly(length))
                if self._is_endless:
                    await self._stream(writer)
                writer.write(
                    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
                    % (len(OK), OK)
                )
        except (OSError, asyncio.IncompleteReadError) as error:
            self.ends.put(repr(error))
        finally:
            writer.close()

    async def _stream(self, writer: asyncio.StreamWriter) -> None:
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        event = b'data: {"id":"1","choices":[{"delta":{"content":"x"}}]}\n\n'
        while not writer.transport.is_closing():
            writer.write(b"%x\r\n%b\r\n" % (len(event), event))
            await asyncio.sleep(0.005)
        raise ConnectionResetError("the client left")
