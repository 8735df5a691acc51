"""The log of one process: life-cycle lines at once, access lines in batches; it never waits for a reader.

Every process writes whole lines to the stderr that all of them share, and to ``meshd.log`` under
``--log-dir``. One ``write`` carries one or several whole lines and at most ``PIPE_BUF`` bytes, which a
pipe takes entirely or not at all, so that lines of different processes never mix.

Lines that a target does not take stay in its queue of 10,000; beyond that they are dropped and counted.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Final

from meshd.errors import StartupError
from meshd.log.line import Timestamp, cut_free_text, encode_line
from meshd.log.target import QUEUE_LINES, Target, Writer, open_file, open_stream

DEBUG, INFO, WARNING, ERROR = 10, 20, 30, 40
_RANKS: Final[Mapping[str, int]] = {
    "debug": DEBUG,
    "info": INFO,
    "warn": WARNING,
    "warning": WARNING,
    "error": ERROR,
    "critical": ERROR,
}
_NAMES: Final = {DEBUG: "debug", INFO: "info", WARNING: "warn", ERROR: "error"}


class Log:
    """Writes the lines of one process.

    ``process``: its name in life-cycle lines, such as ``io0``. ``wall_clock``: nanoseconds since 1970.
    ``dropped`` counts lines lost for any target since the start.
    """

    __slots__ = (
        "_access",
        "_clock",
        "_is_json",
        "_lost",
        "_path",
        "_process",
        "_rank",
        "_targets",
        "_timestamp",
    )

    def __init__(
        self,
        process: str,
        level: str = "info",
        is_json: bool = False,
        stream_fd: int = 2,
        *,
        log_dir: str = "",
        wall_clock: Callable[[], int] = time.time_ns,
    ) -> None:
        self._process = process
        self._rank = _RANKS[level]
        self._is_json = is_json
        self._clock = wall_clock
        self._timestamp = Timestamp()
        self._access: deque[tuple[int, int, dict[str, Any]]] = deque()
        self._lost = 0
        self._path = os.path.join(log_dir, "meshd.log") if log_dir else ""
        self._targets = [Target(open_stream(stream_fd))]
        if self._path:
            self._targets.append(Target(self._open_file()))

    def __repr__(self) -> str:
        return (
            f"Log({self._process} level={_NAMES[self._rank]} waiting={self.waiting} dropped={self.dropped})"
        )

    @property
    def dropped(self) -> int:
        return self._lost + sum(target.dropped for target in self._targets)

    @property
    def waiting(self) -> int:
        """Lines that are not yet written everywhere."""
        return len(self._access) + max(len(target.queue) for target in self._targets)

    def debug(self, event: str, **fields: Any) -> None:
        if self._rank <= DEBUG:
            self._write(DEBUG, event, fields)

    def info(self, event: str, **fields: Any) -> None:
        if self._rank <= INFO:
            self._write(INFO, event, fields)

    def warning(self, event: str, **fields: Any) -> None:
        if self._rank <= WARNING:
            self._write(WARNING, event, fields)

    def error(self, event: str, **fields: Any) -> None:
        self._write(ERROR, event, fields)

    def wants_access(self, is_routine: bool = False) -> bool:
        """Whether an access line would be written; ask before building one."""
        return (DEBUG if is_routine else INFO) >= self._rank

    def access(self, fields: dict[str, Any], *, is_routine: bool = False) -> None:
        """Keep the line of a finished request until ``flush``; the log owns ``fields`` from now on.

        ``is_routine``: health, readiness and metrics requests, which are debug. Fields that are None or
        empty are left out. Well under 1 µs; the line itself costs about 10 µs, later.
        """
        rank = DEBUG if is_routine else INFO
        if rank < self._rank:
            return
        if len(self._access) >= QUEUE_LINES:
            self._lost += 1
            return
        self._access.append((self._clock(), rank, fields))

    def flush(self, max_lines: int = 500) -> bool:
        """Write up to ``max_lines`` access lines; return whether more could be written at once.

        Called by the process's loop, some ten times a second or when lines wait.
        """
        for _ in range(min(max_lines, len(self._access))):
            at_ns, rank, fields = self._access.popleft()
            cut_free_text(fields)
            ts = self._timestamp.text(at_ns)
            self._put({"ts": ts, "level": _NAMES[rank], "event": "access", **fields})
        for target in self._targets:
            target.drain()
        return bool(self._access)

    def configure(self, level: str, is_json: bool) -> None:
        """Write from now on as a changed configuration wants it."""
        self._rank = _RANKS[level]
        self._is_json = is_json

    def reopen(self) -> None:
        """Open ``meshd.log`` anew, after it was moved away; if that fails, say so and keep the old file."""
        if not self._path:
            return
        try:
            self._targets[1].replace(self._open_file())
        except StartupError as exc:
            self.error("log_not_reopened", message=str(exc))

    def close(self) -> None:
        """Write what the targets take and close them; the shared stderr itself stays open."""
        while self.flush():
            pass
        for target in self._targets:
            target.close()

    def _open_file(self) -> Writer:
        try:
            return open_file(self._path)
        except OSError as exc:
            raise StartupError(f"the log file {self._path} cannot be opened: {exc.strerror}") from exc

    def _write(self, rank: int, event: str, fields: dict[str, Any]) -> None:
        head = {"ts": self._timestamp.text(self._clock()), "level": _NAMES[rank], "event": event}
        self._put({**head, "process": self._process, **fields})
        for target in self._targets:
            target.drain()

    def _put(self, fields: dict[str, Any]) -> None:
        line = encode_line(fields, self._is_json)
        for target in self._targets:
            target.put(line)
