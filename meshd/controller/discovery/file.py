"""Upstreams listed in a file: TOML or JSON with ``workers``, each as in ``[[workers]]`` of the configuration.

The file is looked at again and again; it is read when its size, its time or its inode is another one and
has stayed so for a moment, so that a file that is just being written is not taken for a shorter list. A
ConfigMap, which is replaced by turning a link, and a renamed file show another inode.

A file that cannot be opened is tried again with back-off. One that can, but is no list of upstreams, is
told once for each change of it; both change nothing.
"""

from __future__ import annotations

import asyncio
import os
import random
import stat
import tomllib
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, Final

import orjson

from meshd.config import SETTINGS, WorkerSpec
from meshd.config.names import unknown
from meshd.config.values import from_file
from meshd.controller.announcement import Announcement
from meshd.controller.discovery.source import Backoff, Outage, Reconciler
from meshd.log import Log

SOURCE: Final = "file"
SCOPES: Final = ("",)  # the file is read as a whole; keys are URLs
SETTLE_S: Final = 0.2
MAX_FILE_BYTES: Final = 8 << 20  # 1,024 upstreams with 8 KiB each

_WORKERS: Final = next(each for each in SETTINGS if each.name == "workers")

Signature = tuple[int, int, int, int]  # device, inode, size, time in ns


class FileSource:
    """Follows one file. ``announce``: makes an announcement of what a table says."""

    def __init__(
        self,
        path: str,
        interval_s: float,
        reconciler: Reconciler,
        announce: Callable[[WorkerSpec], Announcement],
        log: Log,
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        rng: random.Random | None = None,
    ) -> None:
        self._path = path
        self._interval_s = interval_s
        self._reconciler = reconciler
        self._announce = announce
        self._log = log
        self._sleep = sleep
        self._outage = Outage(SOURCE, path, log)
        self._backoff = Backoff(rng or random.Random())
        self._seen: Signature | None = None  # by the look before
        self._taken: Signature | None = None  # of the file as it was last read, good or bad

    async def run(self) -> None:
        """Look at the file until cancelled."""
        while True:
            await self._sleep(await self.look())

    async def look(self) -> float:
        """Read the file if it has changed; return the seconds until the next look."""
        try:
            # In a thread: a file on a network may keep whoever touches it waiting.
            found = await asyncio.to_thread(_signature, self._path)
            if found == self._taken:
                self._note("")
                return self._interval_s
            if found != self._seen:
                self._seen = found
                return min(SETTLE_S, self._interval_s)
            data = await asyncio.to_thread(_read, self._path)
        except (OSError, ValueError) as exc:  # ValueError: a path with a NUL
            self._note(getattr(exc, "strerror", None) or str(exc))
            return self._backoff.take()
        self._note("")
        self._taken = found
        self._take(data)
        return self._interval_s

    def _note(self, problem: str) -> None:
        self._outage.note(problem)
        if not problem:
            self._backoff.reset()

    def _take(self, data: bytes) -> None:
        try:
            specs = read_workers(self._path, data)
        except ValueError as exc:
            self._log.warning(
                "discovery_refused", source=SOURCE, name=self._path, problem=f"{exc}; nothing changed"
            )
            return
        self._log.info("discovery_read", source=SOURCE, name=self._path, upstreams=len(specs))
        self._reconciler.want("", {spec.url: self._announce(spec) for spec in specs})


def read_workers(path: str, data: bytes) -> tuple[WorkerSpec, ...]:
    """Read a discovery file. Raises ``ValueError`` with the words of the configuration file."""
    document = _parse(path, data)
    for key in document:
        if key != "workers":
            raise ValueError(unknown("key", key, ["workers"], otherwise="the only one is workers"))
    if "workers" not in document:
        raise ValueError("has no workers (a list without any is written workers = [])")
    try:
        specs: tuple[WorkerSpec, ...] = from_file(_WORKERS, document["workers"])
    except ValueError as exc:
        raise ValueError(f"workers: {exc}") from exc
    for url, count in Counter(spec.url for spec in specs).items():
        if count > 1:
            raise ValueError(f"workers: the upstream {url} is given more than once")
    for spec in specs:
        if spec.worker_type != "regular":
            raise ValueError(
                f"workers: {spec.url}: worker_type {spec.worker_type} needs prefill/decode topology"
            )
    return specs


def _parse(path: str, data: bytes) -> dict[str, Any]:
    if len(data) > MAX_FILE_BYTES:
        raise ValueError(f"is larger than {MAX_FILE_BYTES} bytes")
    # No TOML document begins with a brace.
    if path.endswith(".json") or data.lstrip().startswith(b"{"):
        try:
            document = orjson.loads(data)
        except orjson.JSONDecodeError as fault:
            raise ValueError(f"is not JSON: {fault}") from fault
        if not isinstance(document, dict):
            raise ValueError("is not a JSON object")
        return document
    try:
        return tomllib.loads(data.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise ValueError(f"is not TOML: {exc}") from exc


def _signature(path: str) -> Signature:
    found = os.stat(path)
    if not stat.S_ISREG(found.st_mode):  # opening a pipe would wait for its writer
        raise ValueError("is not a regular file")
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read(MAX_FILE_BYTES + 1)
