"""One GET against upstreams that play bytes on a real socket."""

from __future__ import annotations

import asyncio
import ssl
import threading
from collections.abc import Awaitable, Callable

import pytest

from meshd.controller.http_client import Answer, FetchError, Room, UpstreamClient, give_lookups_threads
from meshd.routing.registry import Upstream
from meshd.tls import client_context
from tests.fakes.certificates import Authority


def fetch(
    reply: bytes,
    *,
    base_path: str = "",
    api_key: str | None = None,
    timeout_s: float = 5.0,
    is_silent: bool = False,
    method: str = "GET",
    room: Room | None = None,
) -> tuple[Answer | FetchError, bytes]:
    """Ask a server that answers ``reply`` and closes for /health; return the result and what it received."""
    heads: list[bytes] = []

    async def play(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(reply)
        if is_silent:
            await reader.read()
        writer.close()

    async def run(port: int) -> Answer | FetchError:
        upstream = Upstream(0, "id", f"http://127.0.0.1:{port}{base_path}", api_key=api_key)
        try:
            return await UpstreamClient().send(method, upstream, "/health", timeout_s, 1000, room)
        except FetchError as exc:
            return exc

    return asyncio.run(_with_server(play, run)), b"".join(heads)


async def _with_server(
    play: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
    run: Callable[[int], Awaitable[Answer | FetchError]],
) -> Answer | FetchError:
    server = await asyncio.start_server(play, "127.0.0.1", 0)
    async with server:
        return await run(server.sockets[0].getsockname()[1])


def test_answer_with_a_length_is_read_whole() -> None:
    result, _ = fetch(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
    assert result == Answer(200, b"ok")
    assert isinstance(result, Answer)
    assert result.is_success


def test_answer_in_chunks_and_one_that_ends_with_the_connection_are_read() -> None:
    chunked, _ = fetch(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n")
    closed, _ = fetch(b"HTTP/1.0 200 OK\r\n\r\nok")
    assert chunked == closed == Answer(200, b"ok")


def test_request_carries_host_base_path_and_the_key_of_the_upstream() -> None:
    _, head = fetch(b"HTTP/1.1 204 No Content\r\n\r\n", base_path="/base", api_key="k1")
    lines = head.decode().lower().split("\r\n")
    assert lines[0] == "get /base/health http/1.1"
    assert "authorization: bearer k1" in lines
    assert any(line.startswith("host: 127.0.0.1:") for line in lines)


def test_post_has_an_empty_body_that_is_told() -> None:
    result, head = fetch(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n", method="POST")
    assert result == Answer(200, b"")
    assert head.startswith(b"POST /health HTTP/1.1\r\n")
    assert b"\r\ncontent-length: 0\r\n" in head.lower()


def test_upstream_without_a_key_gets_no_credential() -> None:
    _, head = fetch(b"HTTP/1.1 204 No Content\r\n\r\n")
    assert b"authorization" not in head.lower()


def test_redirect_is_an_answer_and_not_followed() -> None:
    result, head = fetch(b"HTTP/1.1 302 Found\r\nlocation: /other\r\ncontent-length: 0\r\n\r\n")
    assert result == Answer(302, b"")
    assert head.count(b"GET ") == 1


@pytest.mark.parametrize(
    "reply",
    [
        b"",
        b"SSH-2.0-x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nshort",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2000\r\n\r\n" + b"x" * 2000,
        b"HTTP/1.1 200 OK\r\nx: " + b"y" * 100_000,
    ],
    ids=["nothing", "no HTTP", "cut", "too long", "endless head"],
)
def test_answer_that_is_not_whole_or_not_bounded_is_an_error(reply: bytes) -> None:
    result, _ = fetch(reply)
    assert isinstance(result, FetchError)


def test_answers_share_a_room_and_one_that_does_not_fit_or_breaks_leaves_it() -> None:
    whole = b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\neleven"
    room = Room(10)
    assert fetch(whole, room=room)[0] == Answer(200, b"eleven")
    assert room.left == 4
    too_much, _ = fetch(whole, room=room)
    assert "too large together" in str(too_much)
    broken, _ = fetch(whole[:-4], room=room)
    assert isinstance(broken, FetchError)
    assert room.left == 4


def test_silent_upstream_is_an_error_after_the_timeout() -> None:
    result, _ = fetch(b"", timeout_s=0.05, is_silent=True)
    assert isinstance(result, FetchError)
    assert "0.05" in str(result)


def test_name_with_several_addresses_is_told_as_one_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_: object, **__: object) -> None:
        raise OSError(
            "Multiple exceptions: [Errno 111] Connect ('::1', 1), [Errno 111] Connect ('127.0.0.1', 1)"
        )

    monkeypatch.setattr(asyncio, "open_connection", fail)
    with pytest.raises(FetchError, match=r"^Connection refused$"):
        asyncio.run(UpstreamClient().get(Upstream(0, "id", "http://localhost:1"), "/", 5.0, 1000))


def test_names_whose_servers_are_silent_do_not_keep_others_from_being_looked_up() -> None:
    is_over = threading.Event()

    async def run() -> None:
        loop = asyncio.get_running_loop()
        give_lookups_threads(loop)
        silent = [loop.run_in_executor(None, is_over.wait) for _ in range(100)]
        try:
            assert await asyncio.wait_for(loop.getaddrinfo("localhost", 1), 10)
        finally:
            is_over.set()
            await asyncio.gather(*silent)

    asyncio.run(run())


def test_refused_connection_is_an_error() -> None:
    async def run() -> None:
        server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        server.close()
        await server.wait_closed()
        await UpstreamClient().get(Upstream(0, "id", f"http://127.0.0.1:{port}"), "/", 5.0, 1000)

    with pytest.raises(FetchError, match=r"^Connection refused$"):
        asyncio.run(run())


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


def fetch_over_tls(server: ssl.SSLContext, client: ssl.SSLContext) -> Answer | FetchError:
    async def play(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")

    async def run() -> Answer | FetchError:
        listening = await asyncio.start_server(play, "127.0.0.1", 0, ssl=server)
        async with listening:
            port = listening.sockets[0].getsockname()[1]
            try:
                upstream = Upstream(0, "id", f"https://127.0.0.1:{port}")
                return await UpstreamClient(lambda: client).get(upstream, "/health", 5.0, 1000)
            except FetchError as exc:
                return exc

    return asyncio.run(run())


def test_https_upstream_of_a_trusted_authority_answers(authority: Authority) -> None:
    assert fetch_over_tls(authority.server_context(), client_context((authority.path,))) == Answer(200, b"ok")


def test_https_upstream_with_another_name_or_authority_is_an_error(authority: Authority) -> None:
    named = fetch_over_tls(authority.server_context("llm.internal"), client_context((authority.path,)))
    assert "IP address mismatch" in str(named)
    unknown = fetch_over_tls(authority.server_context(), client_context(()))
    assert "unable to get local issuer" in str(unknown)


def test_https_upstream_that_asks_gets_our_certificate(authority: Authority) -> None:
    pair = authority.issue("meshd.internal")
    server = authority.server_context(asks_for_certificate=True)
    shown = fetch_over_tls(server, client_context((authority.path,), pair.cert, pair.key))
    assert shown == Answer(200, b"ok")
    assert isinstance(fetch_over_tls(server, client_context((authority.path,))), FetchError)


def test_files_that_have_become_unusable_are_an_error_of_the_probe() -> None:
    async def run() -> None:
        client = UpstreamClient(lambda: client_context(("/nowhere",)))
        await client.get(Upstream(0, "id", "https://127.0.0.1:9"), "/", 5.0, 1000)

    with pytest.raises(FetchError, match="/nowhere"):
        asyncio.run(run())
