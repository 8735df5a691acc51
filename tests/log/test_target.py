from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshd.log.target import QUEUE_LINES, Target, open_file, open_stream

_LINE = b"x" * 1023 + b"\n"


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    yield reader, writer
    os.close(writer)
    try:
        os.close(reader)
    except OSError:  # the test closed it
        pass


def read_available(fd: int) -> bytes:
    os.set_blocking(fd, False)
    parts = []
    try:
        while part := os.read(fd, 65536):
            parts.append(part)
    except BlockingIOError:
        pass
    return b"".join(parts)


def test_a_full_pipe_keeps_the_lines_and_takes_them_in_order_later(pipe: tuple[int, int]) -> None:
    target = Target(open_stream(pipe[1]))
    lines = [b"%05d" % number + _LINE for number in range(300)]
    for line in lines:
        target.put(line)
    target.drain()
    assert 0 < len(target.queue) < 300
    got = b""
    while target.queue:
        got += read_available(pipe[0])
        target.drain()
    got += read_available(pipe[0])
    assert got == b"".join(lines)
    assert target.dropped == 0


def test_a_shared_pipe_keeps_its_flags(pipe: tuple[int, int]) -> None:
    before = fcntl.fcntl(pipe[1], fcntl.F_GETFL)
    target = Target(open_stream(pipe[1]))
    target.put(_LINE)
    target.drain()
    target.close()
    assert fcntl.fcntl(pipe[1], fcntl.F_GETFL) == before
    os.write(pipe[1], b"still open")


def test_beyond_the_queue_lines_are_dropped_and_counted(pipe: tuple[int, int]) -> None:
    target = Target(open_stream(pipe[1]))
    for _ in range(QUEUE_LINES + 3):
        target.put(_LINE)
    assert (len(target.queue), target.dropped) == (QUEUE_LINES, 3)


def test_a_pipe_without_a_reader_loses_the_lines_and_raises_nothing(pipe: tuple[int, int]) -> None:
    target = Target(open_stream(pipe[1]))
    os.close(pipe[0])
    target.put(_LINE)
    target.put(_LINE)
    target.drain()
    assert (len(target.queue), target.dropped) == (0, 2)


def test_no_stderr_at_all_loses_the_lines(pipe: tuple[int, int]) -> None:
    closed = os.dup(pipe[1])
    os.close(closed)
    target = Target(open_stream(closed))
    target.put(_LINE)
    target.drain()
    assert target.dropped == 1


def test_a_full_socket_keeps_the_lines_and_the_mode_of_the_socket() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        target = Target(open_stream(ours.fileno()))
        for _ in range(5000):
            target.put(_LINE)
        target.drain()
        assert target.queue
        assert ours.getblocking()
        waiting = len(target.queue)
        read_available(theirs.fileno())
        target.drain()
        assert len(target.queue) < waiting
        target.close()


def test_a_full_terminal_keeps_the_lines() -> None:
    master, slave = os.openpty()
    target = Target(open_stream(slave))
    for _ in range(200):
        target.put(_LINE)
    target.drain()
    waiting = len(target.queue)
    assert 0 < waiting < 200
    read_available(master)
    target.drain()
    assert len(target.queue) < waiting
    target.close()
    os.close(slave)
    os.close(master)


def test_lines_of_several_writers_of_a_file_are_all_there(tmp_path: Path) -> None:
    path = str(tmp_path / "meshd.log")
    targets = [Target(open_file(path)) for _ in range(2)]
    for number in range(10):
        targets[number % 2].put(b"%d\n" % number)
        targets[number % 2].drain()
    assert Path(path).read_bytes() == b"".join(b"%d\n" % number for number in range(10))


def test_closing_counts_what_could_not_be_written(pipe: tuple[int, int]) -> None:
    target = Target(open_stream(pipe[1]))
    target.put(_LINE)
    target.close()
    assert target.dropped == 1
