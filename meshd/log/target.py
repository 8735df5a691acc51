"""Where lines go: a stderr shared with others, or a file; writing never waits for a reader.

The shared stderr must not be made non-blocking: the flag belongs to the open file description, and so to
the other processes and to whoever started us. A pipe or terminal is therefore opened once more for this
process alone, a socket is asked with MSG_DONTWAIT, and what cannot be opened again is polled first.
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

    __slots__ = ("_rest", "_writer", "dropped", "queue")

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._rest = b""  # of a chunk that was taken in part, which a terminal or socket may do
        self.queue: deque[bytes] = deque()
        self.dropped = 0

    def put(self, line: bytes) -> None:
        if len(self.queue) >= QUEUE_LINES:
            self.dropped += 1
        else:
            self.queue.append(line)

    def drain(self) -> None:
        """Write until the queue is empty or the target is full; a target that fails loses the lines."""
        while self._rest or self.queue:
            chunk = self._rest or self._next_chunk()
            try:
                written = self._writer.write_some(chunk)
            except OSError:  # no reader, no space, no descriptor: a log must not stop the service
                self.dropped += chunk.count(b"\n")
                written = len(chunk)
            self._rest = chunk[written:]
            if self._rest:
                return

    def _next_chunk(self) -> bytes:
        lines = [self.queue.popleft()]
        size = len(lines[0])
        while self.queue and size + len(self.queue[0]) <= MAX_LINE_BYTES:
            size += len(self.queue[0])
            lines.append(self.queue.popleft())
        return b"".join(lines)

    def replace(self, writer: Writer) -> None:
        self._writer.close()
        self._writer = writer

    def close(self) -> None:
        self.dropped += len(self.queue) + self._rest.count(b"\n")
        self.queue.clear()
        self._rest = b""
        self._writer.close()


class Writer:
    """Writes to a descriptor that does not block: a file, or one opened so, or one polled first."""

    __slots__ = ("_fd", "_is_owner", "_poll")

    def __init__(self, fd: int, is_owner: bool, is_polled: bool) -> None:
        self._fd = fd
        self._is_owner = is_owner
        self._poll = select.poll() if is_polled else None
        if self._poll:
            self._poll.register(fd, select.POLLOUT)

    def write_some(self, chunk: bytes) -> int:
        """Write ``chunk``, at most PIPE_BUF bytes; return how many were taken, 0 if the target is full."""
        if self._poll and not self._poll.poll(0):
            return 0
        try:
            return os.write(self._fd, chunk)
        except BlockingIOError:
            return 0

    def close(self) -> None:
        if self._is_owner:
            os.close(self._fd)


class _SocketWriter(Writer):
    """Writes to a stream socket, such as the journal's, without waiting."""

    __slots__ = ("_socket",)

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=os.dup(fd))
        super().__init__(self._socket.fileno(), is_owner=False, is_polled=False)

    def write_some(self, chunk: bytes) -> int:
        try:
            return self._socket.send(chunk, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return 0

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
    if stat.S_ISREG(mode):
        return Writer(fd, is_owner=False, is_polled=False)
    try:
        flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        return Writer(os.open(f"/proc/self/fd/{fd}", flags), is_owner=True, is_polled=False)
    except OSError:  # it belongs to another user: a poll is nearly as good
        return Writer(fd, is_owner=False, is_polled=True)


def open_file(path: str) -> Writer:
    """Open a file for appending; several processes may append to it."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
    return Writer(os.open(path, flags, 0o640), is_owner=True, is_polled=False)
