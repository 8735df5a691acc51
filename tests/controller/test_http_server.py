"""Conversations with the controller's HTTP server over a socket pair."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable

from meshd.controller.answers import refuse
from meshd.controller.http_server import MAX_BODY_BYTES, HttpServer, Request, Response, Timeouts
from meshd.log import Log

QUICK = Timeouts(idle_s=0.05, body_s=0.05, write_s=5.0)


async def echo(request: Request) -> Response:
    text = f"{request.method} {request.path} {request.query} {len(request.body)}"
    return Response(200, text.encode(), "text/plain")


def make_server(timeouts: Timeouts | None = None, max_connections: int = 256) -> HttpServer:
    return HttpServer(echo, refuse, Log("test", "error", stream_fd=-1), timeouts, max_connections)


def talk(*sent: bytes, timeouts: Timeouts | None = None, is_open: bool = False) -> bytes:
    """Send pieces one after the other, half-close unless ``is_open``, and return all that comes back."""

    async def run(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        for piece in sent:
            writer.write(piece)
            await writer.drain()
        if not is_open:
            writer.write_eof()
        return await reader.read()

    return asyncio.run(_connected(make_server(timeouts), run))


async def _connected(
    server: HttpServer, run: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[bytes]]
) -> bytes:
    listener = socket.create_server(("127.0.0.1", 0))
    async with await server.listen(listener):
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        try:
            return await run(reader, writer)
        finally:
            writer.transport.abort()


def test_request_is_answered_with_a_length_a_date_and_our_name() -> None:
    head, _, body = talk(b"GET /a?b=c HTTP/1.1\r\nhost: x\r\n\r\n").partition(b"\r\n\r\n")
    assert body == b"GET /a b=c 0"
    lines = head.decode().lower().split("\r\n")
    assert lines[0] == "http/1.1 200 ok"
    assert {"content-length: 12", "server: meshd", "content-type: text/plain"} <= set(lines)
    assert any(line.startswith("date: ") for line in lines)


def test_connection_is_kept_for_further_requests_pipelined_ones_included() -> None:
    one = b"GET /1 HTTP/1.1\r\nhost: x\r\n\r\n"
    two = b"POST /2 HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\n\r\nabc"
    answer = talk(one + two, one)
    assert answer.count(b"HTTP/1.1 200") == 3
    assert b"POST /2  3" in answer


def test_head_gets_the_length_and_no_body() -> None:
    head, _, body = talk(b"HEAD /a HTTP/1.1\r\nhost: x\r\n\r\n").partition(b"\r\n\r\n")
    assert b"content-length: 10" in head.lower()
    assert body == b""


def test_connection_close_and_old_protocol_end_the_connection() -> None:
    for request in (b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n", b"GET / HTTP/1.0\r\n\r\n"):
        assert talk(request, is_open=True).count(b"HTTP/1.1 200") == 1


def test_absolute_target_is_reduced_to_its_path() -> None:
    assert b"GET /a q 0" in talk(b"GET http://h:1/a?q HTTP/1.1\r\nhost: h:1\r\n\r\n")


def test_client_that_waits_for_permission_gets_it() -> None:
    async def run(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        writer.write(b"POST / HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 1\r\n\r\n")
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(b"y")
        writer.write_eof()
        return await reader.read()

    assert asyncio.run(_connected(make_server(), run)).endswith(b"POST /  1")


def test_malformed_request_is_400_json_and_the_end() -> None:
    answer = talk(b"NOT HTTP\r\n\r\n", is_open=True)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b'"code":"malformed_request"' in answer


def test_head_over_its_bound_is_431() -> None:
    assert talk(b"GET / HTTP/1.1\r\nx: " + b"y" * 100_000, is_open=True).startswith(b"HTTP/1.1 431 ")


def test_body_over_its_bound_is_413() -> None:
    head = f"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: {MAX_BODY_BYTES + 1}\r\n\r\n".encode()
    assert talk(head, bytes(MAX_BODY_BYTES + 1), is_open=True).startswith(b"HTTP/1.1 413 ")


def test_body_that_does_not_come_is_408() -> None:
    head = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n\r\n"
    assert talk(head, timeouts=QUICK, is_open=True).startswith(b"HTTP/1.1 408 ")


def test_idle_connection_is_closed_without_a_word() -> None:
    assert talk(timeouts=QUICK, is_open=True) == b""


def test_connection_over_the_bound_is_closed_at_once() -> None:
    async def run(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        try:
            return await reader.read()
        except ConnectionResetError:
            return b""

    assert asyncio.run(_connected(make_server(max_connections=0), run)) == b""


def test_peer_on_a_unix_socket_is_asked_for_and_a_stranger_is_closed_at_once() -> None:
    async def run(is_admitted: bool) -> tuple[bytes, list[tuple[int, int]]]:
        asked: list[tuple[int, int]] = []

        def admits(pid: int, uid: int) -> bool:
            asked.append((pid, uid))
            return is_admitted

        server = HttpServer(echo, refuse, Log("test", "error", stream_fd=-1), admits=admits)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind("")  # a free name in the abstract namespace
        listener.listen()
        async with await server.listen(listener):
            reader, writer = await asyncio.open_unix_connection(listener.getsockname().decode())
            writer.write(b"GET /a HTTP/1.0\r\n\r\n")
            try:
                return await reader.read(), asked
            except ConnectionError:
                return b"", asked
            finally:
                writer.transport.abort()

    answer, asked = asyncio.run(run(True))
    assert answer.endswith(b"GET /a  0")
    assert asked == [(os.getpid(), os.getuid())]
    assert asyncio.run(run(False))[0] == b""


def test_peer_on_a_tcp_socket_is_not_asked_for() -> None:
    async def run(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        writer.write(b"GET /a HTTP/1.0\r\n\r\n")
        return await reader.read()

    server = HttpServer(echo, refuse, Log("test", "error", stream_fd=-1), admits=lambda pid, uid: False)
    assert asyncio.run(_connected(server, run)).endswith(b"GET /a  0")


def test_a_server_that_closes_answers_what_was_asked_and_ends_the_connection() -> None:
    server = make_server()

    async def run(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        writer.write(b"GET /a HTTP/1.1\r\nhost: x\r\n\r\n")
        first = await reader.readuntil(b"GET /a  0")
        assert b"connection: close" not in first.lower()
        server.is_closing = True
        writer.write(b"GET /b HTTP/1.1\r\nhost: x\r\n\r\n")
        return await reader.read()

    answer = asyncio.run(_connected(server, run))
    assert answer.endswith(b"GET /b  0") and b"connection: close" in answer.lower()
    assert server.busy == 0


def test_an_idle_connection_at_the_end_of_the_process_leaves_no_traceback() -> None:
    """The loop cancels what still runs; asyncio's own tasks for connections complain then."""
    complaints: list[dict[str, object]] = []

    async def run() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(context))
        listener = socket.create_server(("127.0.0.1", 0))
        await make_server().listen(listener)
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        writer.write(b"GET /a HTTP/1.1\r\nhost: x\r\n\r\n")
        await reader.readuntil(b"GET /a  0")  # and the server waits for more

    asyncio.run(run())
    assert complaints == []
