"""Idle clients: their requests, and how their connections are watched."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys

import pytest

from bench import BenchError
from bench.idle_clients import (
    CLIENTS,
    _is_closed,
    _read_answer,
    flags_for,
    private_kib,
    request_of,
)
from meshd.io.process import connection_cap

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n"


def test_a_request_has_a_body_of_the_wanted_size() -> None:
    head, _, body = request_of(1024).partition(b"\r\n\r\n")
    assert len(body) == 1024
    assert b"content-length: 1024" in head


@pytest.mark.parametrize(
    ("limit", "processes"), [(1 << 20, "1"), (20_000, "2"), (10_500, "3"), (resource.RLIM_INFINITY, None)]
)
def test_io_processes_are_as_many_as_the_descriptors_ask_for(limit: int, processes: str | None) -> None:
    flags = flags_for(limit)
    found = flags[flags.index("--io-processes") + 1] if "--io-processes" in flags else None
    assert found == processes
    assert processes is None or int(processes) * connection_cap(limit) > CLIENTS


def test_an_answer_is_read_to_its_end() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(ANSWER + b"0123456789")
        _read_answer(ours)
        assert not _is_closed(ours)


def test_a_bad_answer_and_a_closed_connection_are_told_apart() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n")
        with pytest.raises(BenchError, match="503"):
            _read_answer(ours)
        theirs.sendall(ANSWER)
        theirs.close()
        with pytest.raises(ConnectionError):
            _read_answer(ours)
        assert _is_closed(ours)


def test_private_memory_is_that_of_the_whole_tree() -> None:
    holds = "import sys; kept = bytearray(b'x' * (8 << 20)); print(flush=True); sys.stdin.read()"
    with subprocess.Popen(
        ["sh", "-c", f'{sys.executable} -c "{holds}"; true'],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert private_kib(child.pid) > 8 << 10
        child.communicate()
    assert private_kib(os.getpid()) > 0


def test_too_low_a_hard_limit_is_said_before_anything_starts() -> None:
    script = (
        "import resource; from bench.idle_clients import raise_descriptor_limit as r\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (256, 1000)); r(400); print(resource.getrlimit(7)[0])\n"
        "r(10_000)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "900"
    assert "10500 open files are needed, the hard limit is 1000" in done.stderr
