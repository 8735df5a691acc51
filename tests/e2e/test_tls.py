"""A real node with real certificates: https in front, https behind, and every way in which that fails."""

from __future__ import annotations

import http.client
import json
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.fakes.certificates import Authority, Pair
from tests.fakes.https_upstream import HttpsUpstream
from tests.fakes.node import Backend, Node, running, wait_until

SMALL = ("--io-processes", "1", "--prepare-workers", "1", "--health-check-interval-secs", "1",
         "--health-check-timeout-secs", "1")  # fmt: skip
CHAT = {"model": "m1", "messages": [{"role": "user", "content": "hello"}]}


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def files(authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """The files of the node's own certificate; a test may write others into them."""
    return _install(authority.issue(), tmp_path_factory.mktemp("node"))


@pytest.fixture(scope="module")
def node(files: Pair) -> Iterator[Node]:
    """A node with TLS in front of a plain backend."""
    backend = Backend("--model", "m1")
    flags = ("--tls-cert-path", files.cert, "--tls-key-path", files.key, "--log-level", "debug")
    with running(*SMALL, *flags, backends=(backend,)) as it:
        yield it
    backend.stop()


def ask(
    node: Node,
    context: ssl.SSLContext,
    body: object = CHAT,
    method: str = "POST",
    path: str = "/v1/chat/completions",
) -> tuple[int, bytes]:
    connection = http.client.HTTPSConnection(node.host, node.port, context=context, timeout=20)
    try:
        connection.request(method, path, json.dumps(body), {"content-type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def dial(node: Node, context: ssl.SSLContext) -> ssl.SSLSocket:
    return context.wrap_socket(node.connect(), server_hostname=node.host)


def test_https_client_is_served_and_large_bodies_arrive_whole(node: Node, authority: Authority) -> None:
    status, answer = ask(node, authority.client_context())
    assert status == 200, answer
    assert json.loads(answer)["object"] == "chat.completion"
    long = {"model": "m1", "prompt": "echo-" + "é" * 3_000_000}
    assert ask(node, authority.client_context(), long, path="/v1/completions")[0] == 200


def test_the_official_client_talks_to_the_node_over_https(node: Node, authority: Authority) -> None:
    client = openai.OpenAI(
        base_url=f"https://127.0.0.1:{node.port}/v1",
        api_key="k",
        http_client=openai.DefaultHttpxClient(verify=authority.client_context()),
        max_retries=0,
    )
    answer = client.chat.completions.create(model="m1", messages=[{"role": "user", "content": "hi"}])
    assert answer.choices[0].message.content
    stream = client.chat.completions.create(
        model="m1", messages=[{"role": "user", "content": "hi"}], stream=True
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)


def test_alpn_offers_http11_alone(node: Node, authority: Authority) -> None:
    with dial(node, authority.client_context("h2", "http/1.1")) as client:
        assert client.selected_alpn_protocol() == "http/1.1"
    with dial(node, authority.client_context("h2")) as client:
        assert client.selected_alpn_protocol() is None


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tls_11_is_refused(node: Node, authority: Authority) -> None:
    context = authority.client_context()
    context.set_ciphers("DEFAULT:@SECLEVEL=0")
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_1
    with pytest.raises(OSError), dial(node, context):
        pass
    context = authority.client_context()
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with dial(node, context) as client:
        assert client.version() == "TLSv1.2"


def test_plain_http_on_the_tls_port_is_closed_without_an_answer(node: Node) -> None:
    with node.connect() as client:
        client.sendall(b"GET /health HTTP/1.1\r\nhost: m\r\n\r\n")
        try:
            assert client.recv(1000) == b""
        except ConnectionResetError:
            pass
    wait_until(
        lambda: any(line.get("event") == "tls_handshake_failed" for line in node.lines), "nothing was logged"
    )


def test_sighup_takes_new_files_and_refuses_bad_ones(node: Node, files: Pair, authority: Authority) -> None:
    def names() -> str:
        with dial(node, authority.client_context()) as client:
            return str(client.getpeercert()["subjectAltName"])  # type: ignore[index]

    def events(name: str) -> list[str]:
        return [line["process"] for line in node.lines if line.get("event") == name]

    assert "new.internal" not in names()
    _install(authority.issue("127.0.0.1", "new.internal"), Path(files.cert).parent)
    node.process.send_signal(signal.SIGHUP)
    wait_until(lambda: "new.internal" in names(), "the new certificate is not shown")
    wait_until(lambda: "io0" in events("certificates_read"), "the new files are not told of")
    Path(files.key).write_bytes(Path(authority.issue().key).read_bytes())
    node.process.send_signal(signal.SIGHUP)
    wait_until(lambda: "io0" in events("certificates_refused"), "nothing was logged")
    assert "new.internal" in names()
    assert ask(node, authority.client_context())[0] == 200


def test_one_of_certificate_and_key_alone_is_a_startup_error(authority: Authority) -> None:
    pair = authority.issue()
    ended = subprocess.run(
        [sys.executable, "-m", "meshd", "--tls-cert-path", pair.cert],
        capture_output=True, text=True, timeout=30,
    )  # fmt: skip
    assert ended.returncode == 2
    assert ended.stderr == "--tls-cert-path is given without --tls-key-path: give both or neither\n"


def test_https_upstream_of_a_known_authority_becomes_healthy_and_is_used(authority: Authority) -> None:
    with HttpsUpstream(authority.server_context()) as upstream:
        flags = ("--worker-urls", upstream.url(), "--ca-cert-paths", authority.path)
        with running(*SMALL, *flags) as node:
            _until_ready(node)
            body = {**CHAT, "padding": "x" * 9_000_000}
            status, _, answer = node.request("POST", "/v1/chat/completions", body)
            assert status == 200, answer
            assert json.loads(upstream.posts.get(timeout=10)) == body
            assert upstream.servernames[-1] == "localhost"


@pytest.mark.parametrize("fault", ["authority", "name"])
def test_upstream_that_is_not_trusted_gives_502_and_never_gets_the_request(
    authority: Authority, tmp_path: Path, fault: str
) -> None:
    context = Authority(tmp_path / "stranger").server_context() if fault == "authority" else (
        authority.server_context("other.internal")
    )  # fmt: skip
    with HttpsUpstream(context) as upstream:
        flags = ("--worker-urls", upstream.url(), "--ca-cert-paths", authority.path, "--disable-health-check")
        with running(*SMALL, *flags) as node:
            _until_ready(node)
            status, fields, _ = node.request("POST", "/v1/chat/completions", CHAT)
            assert (status, fields["x-mesh-error-code"]) == (502, "upstream_connection_failed")
            assert upstream.posts.empty()


def test_upstream_that_is_not_trusted_never_becomes_healthy(authority: Authority, tmp_path: Path) -> None:
    with HttpsUpstream(Authority(tmp_path / "stranger").server_context()) as upstream:
        flags = ("--worker-urls", upstream.url(), "--ca-cert-paths", authority.path, "--log-level", "debug")
        with running(*SMALL, *flags) as node:
            wait_until(
                lambda: any(
                    line.get("event") == "probe_failed" and "local issuer" in line["problem"]
                    for line in node.lines
                ),
                "no probe failed for the right reason",
            )
            assert node.request("GET", "/readiness")[0] == 503


def test_upstream_that_asks_gets_our_certificate_from_probes_and_requests(authority: Authority) -> None:
    pair = authority.issue("meshd.internal")
    with HttpsUpstream(authority.server_context(asks_for_certificate=True)) as upstream:
        flags = ("--worker-urls", upstream.url("127.0.0.1"), "--ca-cert-paths", authority.path)
        ours = ("--client-cert-path", pair.cert, "--client-key-path", pair.key)
        with running(*SMALL, *flags, *ours) as node:
            _until_ready(node)
            assert node.request("POST", "/v1/chat/completions", CHAT)[0] == 200
            assert "meshd.internal" in str(upstream.peers.get(timeout=10))


def test_client_that_leaves_a_stream_ends_it_at_the_upstream_over_tls_on_both_sides(
    authority: Authority,
) -> None:
    pair = authority.issue()
    with HttpsUpstream(authority.server_context(), is_endless=True) as upstream:
        flags = ("--worker-urls", upstream.url(), "--ca-cert-paths", authority.path)
        front = ("--tls-cert-path", pair.cert, "--tls-key-path", pair.key)
        with running(*SMALL, *flags, *front) as node:
            wait_until(
                lambda: ask(node, authority.client_context(), None, "GET", "/readiness")[0] == 200,
                "not ready",
            )
            while not upstream.ends.empty():
                upstream.ends.get()
            for leaves in ("close_notify", "tcp", "reset"):
                body = json.dumps({**CHAT, "stream": True}).encode()
                client = dial(node, authority.client_context())
                client.sendall(
                    b"POST /v1/chat/completions HTTP/1.1\r\nhost: m\r\ncontent-type: application/json\r\n"
                    b"content-length: %d\r\n\r\n%b" % (len(body), body)
                )
                assert client.recv(100).startswith(b"HTTP/1.1 200")
                left_at = time.monotonic()
                if leaves == "close_notify":
                    client.setblocking(False)
                    try:
                        client.unwrap()
                    except ssl.SSLError:
                        pass
                elif leaves == "tcp":
                    socket.socket.shutdown(client, socket.SHUT_WR)
                else:
                    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                    client.close()
                upstream.ends.get(timeout=5)
                took_s = time.monotonic() - left_at
                client.close()
                assert took_s < 2.0, (leaves, took_s)
            wait_until(lambda: not node.held(), "something is still held")


def _until_ready(node: Node) -> None:
    wait_until(lambda: node.request("GET", "/readiness")[0] == 200, "the upstream did not become healthy")


def _install(pair: Pair, directory: Path) -> Pair:
    installed = Pair(str(directory / "node.pem"), str(directory / "node.key"))
    shutil.copy(pair.cert, installed.cert)
    shutil.copy(pair.key, installed.key)
    return installed
