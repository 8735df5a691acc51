"""SIGTERM under load (cli.md §6, behaviours 13 to 15; reliability.md §4 (9))."""

from __future__ import annotations

import signal
import socket
import time

import pytest

from tests.fakes.load import SteadyLoad
from tests.fakes.node import Backend, Node, running, wait_until
from tests.fakes.scripted_upstream import Script, ScriptedUpstream, Seen

FLAGS = ("--io-processes", "2", "--prepare-workers", "1", "--disable-health-check")
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
EVENT = b"9\r\ndata: 1\n\n\r\n"
END = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


def post(path: str = "/v1/completions") -> bytes:
    body = b'{"model": "m1", "prompt": "a", "stream": true}'
    head = f"POST {path} HTTP/1.1\r\nhost: h\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


def read_to_end(connection: socket.socket) -> bytes:
    data = b""
    while piece := connection.recv(65536):
        data += piece
    return data


def steady(seen: Seen, seconds: float):
    yield HEAD
    for _ in range(int(seconds / 0.05)):
        yield EVENT
        time.sleep(0.05)
    yield END


def test_sigterm_under_load_loses_no_request_that_was_sent_before_the_listeners_closed(
    backends: tuple[Backend, Backend],
):
    with (
        running(*FLAGS, "--shutdown-delay-secs", "2", backends=backends) as node,
        SteadyLoad(node) as kept,
        SteadyLoad(node, connections=4, reuses=False) as fresh,
    ):
        kept.wait_for_more(30)
        node.process.send_signal(signal.SIGTERM)
        signalled_at = time.monotonic()
        wait_until(lambda: node.request("GET", "/readiness")[0] == 503, "readiness does not fail", 1.8)
        status, headers, body = node.request("GET", "/readiness")
        assert (status, headers["connection"]) == (503, "close") and b"draining" in body
        assert node.request("POST", "/v1/completions", {"model": "m1", "prompt": "a"})[0] == 200
        served = kept.completed
        assert node.process.wait(30) == 0
        kept.stop()
        fresh.stop()
        assert kept.completed > served, "connections are accepted for the delay"
    lost = [f for f in kept.failures + fresh.failures if f.asked_at < signalled_at + 2]
    assert lost == []
    assert not node.descendants()


def test_a_running_stream_ends_and_new_connections_are_refused_meanwhile():
    with (
        ScriptedUpstream(Script(lambda seen: steady(seen, 3))) as upstream,
        running(*FLAGS, "--worker-urls", upstream.url) as node,
        node.connect(30) as stream,
    ):
        stream.sendall(post())
        assert stream.recv(4096).startswith(b"HTTP/1.1 200")
        node.process.send_signal(signal.SIGTERM)
        wait_until(lambda: is_refused(node), "new connections are not refused", 2.8)
        assert read_to_end(stream).endswith(END)
        assert node.process.wait(10) == 0


def is_refused(node: Node) -> bool:
    try:
        node.connect().close()
    except ConnectionRefusedError:
        return True
    return False


@pytest.mark.parametrize("signals", [1, 2])
def test_a_stream_longer_than_the_grace_period_or_met_by_a_second_signal_is_cut_with_an_error_event(signals):
    """One signal: at the end of the grace period of 1 s; two: at once, however long it is."""
    grace_s = 1 if signals == 1 else 60
    with (
        ScriptedUpstream(Script(lambda seen: steady(seen, 30))) as upstream,
        running(*FLAGS, "--shutdown-grace-period-secs", str(grace_s), "--worker-urls", upstream.url) as node,
        node.connect(30) as stream,
    ):
        stream.sendall(post())
        assert stream.recv(4096).startswith(b"HTTP/1.1 200")
        started_at = time.monotonic()
        node.process.send_signal(signal.SIGTERM)
        if signals == 2:
            wait_until(lambda: is_refused(node), "draining has not begun")
            node.process.send_signal(signal.SIGTERM)
        received = read_to_end(stream)
        assert node.process.wait(10) == 0
        took = time.monotonic() - started_at
    assert b"data: [DONE]" not in received
    assert b'"error"' in received and b"admission_closed" in received
    assert took <= (grace_s + 2 if signals == 1 else 3)
