"""Where lines go: a stderr shared with others, or a file; writing never waits for a reader.

The shared stderr must not be made non-blocking: the flag belongs to the open file description, and so to
the other processes and to whoever started us. A pipe is therefore opened once more for this process
alone, a socket is asked with MSG_DONTWAIT, and only a terminal is polled before it is written.
"""

from __future__ import annotations

import os
import select
import socket
import stat
from collections import deque
from typing import Final

from meshd.log.line import MAX_LINE_BYTES

QUEUE_LINES: Final = 10_000


class Target:
    """A place that takes lines, and the lines it has not taken yet."""

    __slots__ = ("_writer", "dropped", "queue")

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self.queue: deque[bytes] = deque()
        self.dropped = 0

    def put(self, line: bytes) -> None:
        if len(self.queue) >= QUEUE_LINES:
            self.dropped += 1
        else:
            self.queue.append(line)

    def drain(self) -> None:
        """Write until the queue is empty or the target is full; a target that fails loses the lines."""
        while self.queue:
            count, chunk = self._next_chunk()
            try:
                if not self._writer.try_write(chunk):
                    return
            except OSError:  # no reader, no space, no descriptor: a log must not stop the service
                self.dropped += count
            for _ in range(count):
                self.queue.popleft()

    def _next_chunk(self) -> tuple[int, bytes]:
        size = 0
        lines: list[bytes] = []
        for line in self.queue:
            size += len(line)
            if size > MAX_LINE_BYTES and lines:
                break
            lines.append(line)
        return len(lines), b"".join(lines)

    def replace(self, writer: Writer) -> None:
        self._writer.close()
        self._writer = writer

    def close(self) -> None:
        self.dropped += len(self.queue)
        self.queue.clear()
        self._writer.close()


class Writer:
    """Writes to a descriptor that cannot block for long: a file, or a terminal after a poll."""

    __slots__ = ("_fd", "_is_owner", "_poll")

    def __init__(self, fd: int, is_owner: bool, is_polled: bool) -> None:
        self._fd = fd
        self._is_owner = is_owner
        self._poll = select.poll() if is_polled else None
        if self._poll:
            self._poll.register(fd, select.POLLOUT)

    def try_write(self, chunk: bytes) -> bool:
        """Write all of ``chunk``, at most PIPE_BUF bytes; False if the target is full now."""
        if self._poll and not self._poll.poll(0):
            return False
        try:
            os.write(self._fd, chunk)
        except BlockingIOError:
            return False
        return True

    def close(self) -> None:
        if self._is_owner:
            os.close(self._fd)


class _SocketWriter(Writer):
    """Writes to a stream socket, such as the journal's, without waiting."""

    __slots__ = ("_socket",)

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=os.dup(fd))
        super().__init__(self._socket.fileno(), is_owner=False, is_polled=False)

    def try_write(self, chunk: bytes) -> bool:
        try:
            self._socket.send(chunk, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return False
        return True

    def close(self) -> None:
        self._socket.close()


def open_stream(fd: int) -> Writer:
    """Return a writer for an inherited descriptor, which stays open and keeps its flags."""
    try:
        mode = os.fstat(fd).st_mode
    except OSError:  # started without stderr: every line counts as dropped
        return Writer(fd, is_owner=False, is_polled=False)
    if stat.S_ISSOCK(mode):
        return _SocketWriter(fd)
    if stat.S_ISFIFO(mode):
        try:
            own = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:  # the pipe belongs to another user: a poll is nearly as good
            return Writer(fd, is_owner=False, is_polled=True)
        return Writer(own, is_owner=True, is_polled=False)
    return Writer(fd, is_owner=False, is_polled=not stat.S_ISREG(mode))


def open_file(path: str) -> Writer:
    """Open a file for appending; several processes may append to it."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
    return Writer(os.open(path, flags, 0o640), is_owner=True, is_polled=False)
