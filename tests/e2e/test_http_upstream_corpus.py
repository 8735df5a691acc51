"""Every shape of tests/corpus/http_upstream, played by a raw upstream behind a real node.

A `.http` file holds what the upstream sends after a request, the `.expect` file beside it what the client
must get, and whether the connection may serve another request (``reused``). ``ending``: what it does then
(`keep`, `close`, `reset`). ``is_cut``: the client must see that the answer is not whole.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h11
import pytest

from tests.fakes.node import Node, running, wait_until
from tests.fakes.scripted_upstream import Script, ScriptedUpstream, Seen
from tests.fakes.wire import Client, post

CORPUS = Path(__file__).parents[1] / "corpus" / "http_upstream"
NAMES = sorted(path.stem for path in CORPUS.glob("*.http"))
BODY = b'{"model":"m1","prompt":"a"}'
REQUEST = post(b"/v1/completions", BODY)
GOOD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"


@pytest.fixture(scope="module")
def scripted() -> Iterator[tuple[Node, ScriptedUpstream]]:
    flags = ("--io-processes", "1", "--prepare-workers", "1", "--disable-health-check")
    flags += ("--disable-retries", "--disable-circuit-breaker")  # each shape is one exchange
    with ScriptedUpstream(Script(GOOD)) as upstream, running(*flags, "--worker-urls", upstream.url) as node:
        yield node, upstream
        assert upstream.faults == []


def load(name: str) -> tuple[bytes, dict[str, Any]]:
    return (CORPUS / f"{name}.http").read_bytes(), json.loads((CORPUS / f"{name}.expect").read_text())


def judge(node: Node, upstream: ScriptedUpstream, expected: dict[str, Any], script: Script) -> None:
    """Play ``script`` for one request, then see on a good one whether the connection was used again."""
    upstream.forget()
    upstream.script = script
    with Client(node.host, node.port) as client:
        client.send(REQUEST)
        if expected.get("is_cut"):
            check_cut(client)
        else:
            check_answer(client, expected, upstream.url)
            assert not client.has_more
        first = upstream.take()
        upstream.script = Script(GOOD)
        if expected.get("is_cut"):
            with Client(node.host, node.port) as other:
                other.send(REQUEST)
                assert other.read().body == b"{}"
        else:
            client.send(REQUEST)
            assert client.read().body == b"{}", "the client's connection is fine whatever the upstream did"
        second = upstream.take()
        assert (second.connection == first.connection) == expected["reused"]
    assert upstream.seen.empty(), "a request was sent twice"


def check_cut(client: Client) -> None:
    """The client must see a cut answer; if the fault was known before its head went out, an error instead."""
    try:
        answer = client.read()
    except (h11.RemoteProtocolError, ConnectionResetError):
        return
    assert answer.status == 502
    assert answer.code in ("upstream_protocol_error", "upstream_connection_failed")


def check_answer(client: Client, expected: dict[str, Any], url: str) -> None:
    answer = client.read()
    assert answer.status == expected["status"], answer
    assert answer.code == expected.get("code"), answer
    assert answer.interim == []
    if answer.code == "upstream_protocol_error":
        assert answer.json()["error"]["code"] == answer.code
        assert url.rsplit("/", 1)[1].encode() not in answer.body
        return
    assert answer.body == expected["body"].encode("latin-1")
    assert answer.reason.decode("latin-1") == expected.get("reason", answer.reason.decode("latin-1"))
    assert answer.value("connection") is None
    assert answer.value("date") and answer.value("x-request-id") not in ("theirs", None)
    wanted = [tuple(field) for field in expected.get("fields", ())]
    names = {name for name, _ in wanted}
    found = [(name.decode(), value.decode("latin-1")) for name, value in answer.fields]
    assert [field for field in found if field[0] in names] == wanted
    assert not {name for name, _ in found} & set(expected.get("absent", ()))
    for name in expected.get("once", ()):
        assert len(answer.values(name)) == 1, name


@pytest.mark.parametrize("name", NAMES)
def test_shape_is_relayed_or_refused_and_its_connection_reused_or_not(scripted, name):
    wire, expected = load(name)
    ending = expected.get("ending", "keep")
    for pieces in (0, 1, 1 + len(wire) * 5 // 7) if len(wire) < 2000 else (0, 1000):
        judge(*scripted, expected, Script(wire, ending, pieces))


def test_corpus_has_an_expectation_for_every_file():
    assert len(NAMES) > 100
    assert {path.stem for path in CORPUS.glob("*.expect")} == set(NAMES)


def refused() -> dict[str, Any]:
    return {"status": 502, "code": "upstream_protocol_error", "reused": False}


def relayed() -> dict[str, Any]:
    return {"status": 200, "body": "{}", "reused": True}


def padded_head(size: int) -> bytes:
    head = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nx: "
    return head + b"y" * (size - len(head) - 4) + b"\r\n\r\n"


def test_response_head_of_64_kib_passes_and_one_byte_more_is_502(scripted):
    assert len(padded_head(65536)) == 65536
    judge(*scripted, relayed(), Script(padded_head(65536) + b"{}"))
    judge(*scripted, refused(), Script(padded_head(65537) + b"{}"))
    judge(*scripted, refused(), Script(padded_head(65537) + b"{}", pieces=4000))
    judge(*scripted, refused(), Script(b"HTTP/1.1 200 OK\r\nx: " + b"y" * 100_000))


def test_location_of_the_upstream_itself_loses_its_address(scripted):
    node, upstream = scripted
    for own, seen in ((upstream.url + "/a/b?c=d", "/a/b?c=d"), (upstream.url, "/"), ("/x", "/x"), ("y", "y")):
        fields = b"location: %b\r\nContent-Location: %b\r\n" % (own.encode(), own.encode())
        reply = b"HTTP/1.1 303 See Other\r\n%bcontent-length: 2\r\n\r\n{}" % fields
        wanted = {
            "status": 303,
            "body": "{}",
            "reused": True,
            "fields": [["location", seen], ["content-location", seen]],
        }
        judge(node, upstream, wanted, Script(reply))


def test_early_answer_is_relayed_and_that_connection_not_reused(scripted):
    node, upstream = scripted
    body = b'{"model":"m1","prompt":"%b"}' % (b"x" * (6 << 20))
    upstream.forget()
    reply = b"HTTP/1.1 413 Content Too Large\r\ncontent-length: 2\r\n\r\n{}"
    upstream.script = Script(reply, answers_early=True)
    with Client(node.host, node.port, timeout=30) as client:
        client.send(post(b"/v1/completions", body))
        answer = client.read()
        assert (answer.status, answer.body, answer.value("connection")) == (413, b"{}", None)
        first = upstream.take()
        upstream.script = Script(GOOD)
        client.send(REQUEST)
        assert client.read().body == b"{}"
        assert upstream.take().connection != first.connection
    wait_until(lambda: not node.held(), f"left behind: {node.held()}")


def test_stale_idle_connection_is_replaced_without_the_client_noticing(scripted):
    node, upstream = scripted
    upstream.forget()
    for ending in ("keep", "close", "reset", "keep", "close", "keep"):
        upstream.script = Script(GOOD, ending)
        with Client(node.host, node.port) as client:
            client.send(REQUEST)
            assert client.read().body == b"{}"
        upstream.take()


def test_http10_client_gets_an_unknown_length_delimited_by_close(scripted):
    node, upstream = scripted
    upstream.script = Script(
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\nx: y\r\n\r\n"
    )
    with Client(node.host, node.port) as client:
        client.send(REQUEST.replace(b"HTTP/1.1", b"HTTP/1.0"))
        answer = client.read()
        assert (answer.status, answer.body, answer.value("connection")) == (200, b"{}", "close")
        assert answer.value("transfer-encoding") is None and answer.value("content-length") is None
        assert client.ends()


def test_http10_client_sees_a_cut_as_a_reset(scripted):
    node, upstream = scripted
    upstream.script = Script(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n", "close")
    with Client(node.host, node.port) as client:
        client.send(REQUEST.replace(b"HTTP/1.1", b"HTTP/1.0"))
        with pytest.raises(ConnectionResetError):
            while client.socket.recv(65536):
                pass


def echo(seen: Seen) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(seen.body), seen.body)


def test_back_to_back_requests_share_one_connection_on_both_sides(scripted):
    node, upstream = scripted
    upstream.forget()
    upstream.script = Script(echo)
    with Client(node.host, node.port) as client:
        numbers = set()
        for number in range(500):
            body = b'{"prompt":"%d"}' % number
            client.send(post(b"/v1/completions", body))
            assert client.read().body == body
            numbers.add(upstream.take().connection)
    assert len(numbers) == 1
