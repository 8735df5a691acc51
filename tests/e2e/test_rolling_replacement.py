"""SIGUSR2 under load: every child is replaced, and no request notices (cli.md §6, behaviour 17)."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import DEMO_TOKENIZER
from tests.fakes.certificates import Authority
from tests.fakes.load import SteadyLoad
from tests.fakes.node import Backend, Node, running, wait_until
from tests.fakes.scripted_upstream import Script, ScriptedUpstream, Seen

FLAGS = ("--io-processes", "2", "--prepare-workers", "2", "--disable-health-check")
TOKENS = ("--policy", "prefix_hash", "--tokenizer-path", DEMO_TOKENIZER)


@pytest.fixture(scope="module")
def rolling_node(backends: tuple[Backend, Backend]) -> Iterator[Node]:
    with running(*FLAGS, *TOKENS, backends=backends) as node:
        yield node


def count(node: Node, event: str) -> int:
    return sum(line.get("event") == event for line in list(node.lines))


def begin_replacement(node: Node) -> int:
    """Send SIGUSR2; return how many replacements have ended before."""
    done = count(node, "replacement_done")
    node.process.send_signal(signal.SIGUSR2)
    return done


def wait_done(node: Node, before: int) -> None:
    wait_until(lambda: count(node, "replacement_done") > before, "the replacement does not end", 60)


def children(node: Node) -> set[tuple[str, int]]:
    return {(row["role"], row["pid"]) for row in node.ps() if row["role"] != "supervisor"}


def segments(node: Node) -> int:
    """How many memory segments the supervisor holds."""
    found = 0
    for link in Path(f"/proc/{node.process.pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            found += os.readlink(link).startswith("/memfd:")
    return found


def test_two_replacements_under_load_fail_no_request_and_leave_nothing_behind(rolling_node):
    node = rolling_node
    memory, first = segments(node), children(node)
    former, counted = first, node.metrics()
    for _ in range(2):
        with SteadyLoad(node) as kept, SteadyLoad(node, connections=4, reuses=False) as fresh:
            kept.wait_for_more(20)
            wait_done(node, begin_replacement(node))
            kept.wait_for_more(20)
            fresh.wait_for_more(5)
        assert (kept.failures, kept.refused, fresh.failures, fresh.refused) == ([], [], [], [])
        now = children(node)
        assert len(now) == len(first) and not now & former
        former = now
    assert segments(node) == memory
    after = node.metrics()
    fallen = [key for key, value in counted.items() if key[0].endswith("_total") and after[key] < value]
    assert fallen == []
    for kind in ("controller", "leader", "io"):
        assert node.metric("mesh_process_restarts_total", kind=kind) == 0, "no death was involved"
    wait_until(lambda: not node.held(), f"left behind: {node.held()}")


class EndlessStream:
    """Streams that go on until they are told to end."""

    def __init__(self) -> None:
        self.is_over = threading.Event()

    def reply(self, seen: Seen) -> Iterable[bytes]:
        yield b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        while not self.is_over.wait(0.05):
            yield b"9\r\ndata: 1\n\n\r\n"
        yield b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


def test_streams_and_idle_connections_of_the_old_process_live_on():
    """The old process serves them to their end; new connections are the new one's."""
    streams = EndlessStream()
    ask = b"GET /liveness HTTP/1.1\r\nhost: h\r\n\r\n"
    with (
        ScriptedUpstream(Script(streams.reply)) as upstream,
        running(*FLAGS, "--worker-urls", upstream.url) as node,
        node.connect(60) as stream,
        node.connect() as idle,
        node.connect() as unused,
    ):
        stream.sendall(post(b'{"model": "m1", "prompt": "a", "stream": true}'))
        assert stream.recv(4096).startswith(b"HTTP/1.1 200")
        idle.sendall(ask)
        assert b"connection: close" not in idle.recv(4096).lower()
        before = begin_replacement(node)
        wait_until(lambda: "draining" in states(node) and states(node).count("ready") == 2, "no switch", 60)
        assert node.request("GET", "/readiness")[0] == 200
        for connection in (idle, unused):
            connection.sendall(ask)
            answer = read_to_end(connection)
            assert answer.startswith(b"HTTP/1.1 200") and b"connection: close" in answer.lower()
        assert drainers(node) > 0, "the stream goes on"
        streams.is_over.set()
        received = b""
        while b"data: [DONE]\n\n" not in received:
            piece = stream.recv(65536)
            assert piece, "the stream was cut"
            received += piece
        stream.close()
        wait_done(node, before)


def post(body: bytes) -> bytes:
    head = "POST /v1/completions HTTP/1.1\r\nhost: h\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


def states(node: Node) -> list[str]:
    return sorted(row["state"] for row in node.ps() if row["role"] == "io")


def drainers(node: Node) -> int:
    return states(node).count("draining")


def read_to_end(connection: socket.socket) -> bytes:
    data = b""
    while piece := connection.recv(4096):
        data += piece
    return data


def test_sigterm_during_a_replacement_wins(backends):
    flags = (*FLAGS, *TOKENS, "--shutdown-grace-period-secs", "5")
    with running(*flags, backends=backends, is_settled=False) as node:
        node.process.send_signal(signal.SIGUSR2)
        wait_until(lambda: count(node, "replacement_started") == 1, "not begun")
        assert node.stop() == 0
        assert not node.descendants()


def test_a_generation_that_cannot_boot_leaves_the_old_one_serving(backends, tmp_path):
    authorities = Authority(tmp_path).path
    with running(*FLAGS, "--ca-cert-paths", authorities, backends=backends) as node:
        before = children(node)
        Path(authorities).write_text("no certificate any more")
        with SteadyLoad(node, connections=4) as load:
            load.wait_for_more(10)
            node.process.send_signal(signal.SIGUSR2)
            wait_until(lambda: count(node, "replacement_given_up") == 1, "not given up", 60)
            load.wait_for_more(10)
        assert load.failures == [] and load.refused == []
        wait_until(lambda: children(node) == before, "the old ones alone remain")


# ----------------------------------------------------------------------------------------- the watchdog


def test_a_hung_io_process_is_killed_and_replaced_and_others_lose_no_connection(rolling_node):
    """cli.md behaviour 16, reliability.md §1 (8): what it was holding is harmed, nothing else."""
    node = rolling_node
    stopped, other = (row for row in node.board().rows() if row.role == "io" and row.pid)
    pids = stopped.pid, other.pid
    with SteadyLoad(node, connections=8, paced_s=0.05) as load:
        load.wait_for_more(20)
        os.kill(stopped.pid, signal.SIGSTOP)
        stopped_at = time.monotonic()
        wait_until(lambda: stopped.pid not in (0, pids[0]) and stopped.state == 2, "not replaced", 30)
        took = time.monotonic() - stopped_at
        replaced_at = time.monotonic()
    assert took > 9
    assert other.pid == pids[1]
    late = [failure for failure in load.failures if failure.asked_at > replaced_at]
    assert late == [] and load.refused == []
    served = {int(line["client"].rpartition(":")[2]): line["io_process"] for line in node.access_lines()}
    assert {served[f.port] for f in load.failures if f.port in served} <= {stopped.index}
