"""A real meshd, started as users start it, for tests that talk to it over sockets."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from prometheus_client.parser import text_string_to_metric_families

from meshd.control import BOARD_KIND, ProcessBoard, Role
from meshd.memory import Segment
from meshd.routing.registry import RegistryBoard
from meshd.routing.upstream import is_available
from meshd.supervisor.ps import processes_of
from tests.fakes.offspring import end_with_tests

Attached = TypeVar("Attached")
Series = tuple[str, tuple[tuple[str, str], ...]]

START_SECS = 120.0  # a second or two; much more where others run at the same time
UPSTREAM_SECS = 0.5
HELD = (
    "mesh_worker_requests_active",
    "mesh_admission_held",
    "mesh_admission_waiting",
    "mesh_body_memory_reserved_bytes",
    "mesh_prepare_queued_jobs",
    "mesh_prepare_dispatched_jobs",
    "mesh_prepare_busy_workers",
)


class Node:
    """One running ``meshd launch``; ports are chosen by the system and read from its ready line.

    ``is_settled``: wait until the proof of its tokenizers has ended too: after it no worker is renewed.
    """

    def __init__(self, *flags: str, env: dict[str, str] | None = None, is_settled: bool = True) -> None:
        command = [
            sys.executable, "-m", "meshd", "launch",
            "--host", "127.0.0.1", "--port", "0", "--prometheus-host", "127.0.0.1", "--prometheus-port", "0",
            "--json-log", "--shutdown-delay-secs", "0", *flags,
        ]  # fmt: skip
        self.process = subprocess.Popen(
            command,
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env={**os.environ, **(env or {})},
            start_new_session=True,
            preexec_fn=end_with_tests(),
        )
        self.lines: list[dict[str, Any]] = []
        self.raw_lines: list[str] = []
        self._ready: queue.Queue[dict[str, Any] | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        self._series: dict[str, Series] = {}
        self.url = self.metrics_url = ""
        try:
            ready = self._ready.get(timeout=START_SECS)
        except queue.Empty:
            ready = None
        if ready is None:
            self.kill()
            raise AssertionError("meshd did not become ready:\n" + "\n".join(self.raw_lines))
        self.url, self.metrics_url = ready["url"], ready["metrics"]
        self.host, self.port = "127.0.0.1", int(urlsplit(self.url).port or 0)
        if is_settled and any(line.get("event") == "tokenizer_loaded" for line in list(self.lines)):
            self.wait_until_proved()
        if count := _values_of("--worker-urls", flags):
            self._await_upstreams(count)

    def _await_upstreams(self, count: int) -> None:
        """Give the upstreams a moment to be taken in: who asks sooner finds none. Dead ones never are."""
        registry = RegistryBoard(self._attach("registry", lambda fd: Segment.attach(fd, "registry")))
        deadline = time.monotonic() + UPSTREAM_SECS
        while sum(map(is_available, registry.read().upstreams)) < count and time.monotonic() < deadline:
            time.sleep(0.01)

    def _read(self) -> None:
        assert self.process.stderr is not None
        for raw in self.process.stderr:
            text = raw.decode(errors="replace").rstrip("\n")
            self.raw_lines.append(text)
            try:
                line = json.loads(text)
            except ValueError:
                continue
            self.lines.append(line)
            if line.get("event") == "ready":
                self._ready.put(line)
        self._ready.put(None)

    def wait_until_proved(self, timeout: float = 180.0) -> None:
        """Wait until the proof of a tokenizer has ended and all workers have what it allows."""

        def is_in_force() -> bool:
            events = [line.get("event") for line in self.lines]
            return (
                "tokenizer_proved" in events
                and "tokenizers_in_force" in events[events.index("tokenizer_proved") :]
            )

        wait_until(is_in_force, "the proof of the tokenizer did not end", timeout)

    # ------------------------------------------------------------------------------------- observing

    def ps(self) -> list[dict[str, Any]]:
        """Return what ``meshd ps --json`` says of this instance, without the start of an interpreter."""
        return [asdict(process) for process in processes_of(self.board())]

    def board(self) -> ProcessBoard:
        """Attach to the board itself: what it says is what is so at this moment. For reading."""
        return self._attach(BOARD_KIND, ProcessBoard.attach)

    def _attach(self, kind: str, attach: Callable[[int], Attached]) -> Attached:
        for link in Path(f"/proc/{self.process.pid}/fd").iterdir():
            if os.readlink(link).startswith(f"/memfd:meshd:{kind} "):
                fd = os.open(link, os.O_RDWR)
                try:
                    return attach(fd)
                finally:
                    os.close(fd)
        raise AssertionError(f"the supervisor holds no {kind}")

    def descendants(self) -> set[int]:
        """Return the pids of all living processes below the supervisor."""
        found, todo = set(), [self.process.pid]
        while todo:
            pid = todo.pop()
            for task in _list(f"/proc/{pid}/task"):
                with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{task}/children") as file:
                    children = [int(word) for word in file.read().split()]
                    found.update(children)
                    todo += children
        return found

    def pids(self, role: str) -> list[int]:
        return [row["pid"] for row in self.ps() if row["role"] == role]

    def metrics(self) -> dict[Series, float]:
        """Scrape; samples by name and sorted labels.

        What a series is called is parsed once: tests poll, and the parser takes 30 ms for a whole page.
        """
        with urllib.request.urlopen(self.metrics_url, timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        found: dict[Series, float] = {}
        for line in lines:
            if line and line[0] != "#":
                name, _, value = line.rpartition(" ")
                series = self._series.get(name)
                if series is None:
                    series = self._series[name] = _parse_series(line)
                found[series] = float(value)
        return found

    def metric(self, name: str, **labels: str) -> float:
        """Return the sum of the samples of a name whose labels include ``labels``."""
        return sum(
            value
            for (sample, pairs), value in self.metrics().items()
            if sample == name and labels.items() <= dict(pairs).items()
        )

    def settle(self) -> None:
        """Wait until what has been counted so far is in the metrics: whoever counts has had a whole tick."""
        counting = (Role.IO, Role.PREPARE)
        rows = [row for row in self.board().rows() if row.role in counting and row.is_alive]
        for _ in range(2):  # the first beat begins the tick, the second shows that it has ended
            beats = [(row, row.pid, row.heartbeat_ns) for row in rows]
            wait_until(
                lambda: not any((row.pid, row.heartbeat_ns) == (pid, beat) for row, pid, beat in beats),  # noqa: B023
                "an I/O process or a prepare worker does not tick",
            )

    def held(self) -> dict[str, float]:
        """Return the gauges of load, tickets, body memory and jobs that are not 0; empty at rest."""
        return {name: value for (name, _), value in self.metrics().items() if name in HELD and value != 0}

    def access_lines(self) -> list[dict[str, Any]]:
        return [line for line in self.lines if line.get("event") == "access"]

    # ----------------------------------------------------------------------------------------- talking

    def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: dict[str, str] | None = None,
        timeout: float = 30,
    ) -> tuple[int, dict[str, str], bytes]:
        """One request on a fresh connection; a ``body`` that is not bytes is sent as JSON."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=timeout)
        try:
            data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
            fields = (
                {"content-type": "application/json", **(headers or {})} if data is not None else headers or {}
            )
            connection.request(method, path, data, fields)
            answer = connection.getresponse()
            return answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read()
        finally:
            connection.close()

    def connect(self, timeout: float = 10) -> socket.socket:
        return socket.create_connection((self.host, self.port), timeout=timeout)

    # ------------------------------------------------------------------------------------------ ending

    def stop(self, number: int = signal.SIGTERM, timeout: float = 30) -> int:
        self.process.send_signal(number)
        return self.process.wait(timeout)

    def kill(self) -> None:
        """End everything, whatever state it is in."""
        pids = self.descendants()
        with contextlib.suppress(OSError):
            self.process.kill()
        self.process.wait(10)
        for pid in pids:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)


class Backend:
    """One ``meshd backend`` process of its own."""

    def __init__(self, *flags: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "meshd", "backend", "--port", "0", *flags],
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=end_with_tests(),
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert "listening on" in line, line
        self.url = line.rsplit(" ", 1)[1].strip()

    def control(self, method: str, path: str, body: bytes | None = None) -> Any:
        request = urllib.request.Request(self.url + path, data=body, method=method)
        with urllib.request.urlopen(request, timeout=10) as answer:
            data = answer.read()
        return json.loads(data) if data else None

    def fault(self, spec: str) -> None:
        self.control("PUT", "/_backend/fault", spec.encode())

    def requests(self) -> list[dict[str, Any]]:
        answer = self.control("GET", "/_backend/requests")
        return answer["requests"] if isinstance(answer, dict) else answer

    def stats(self) -> dict[str, Any]:
        return self.control("GET", "/_backend/stats")

    def stop(self) -> None:
        self.process.kill()
        self.process.wait(10)


@contextlib.contextmanager
def running(
    *flags: str,
    backends: Sequence[Backend] = (),
    env: dict[str, str] | None = None,
    is_settled: bool = True,
) -> Iterator[Node]:
    """Run a node in front of ``backends`` until the block ends."""
    urls = ["--worker-urls", *(backend.url for backend in backends)] if backends else []
    node = Node(*flags, *urls, env=env, is_settled=is_settled)
    try:
        yield node
    finally:
        node.kill()


def wait_until(condition: Any, what: str, timeout: float = 30.0) -> None:
    """Poll until ``condition()`` is true; fail with ``what`` when it does not become so."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def _values_of(flag: str, flags: Sequence[str]) -> int:
    """How many values follow a flag."""
    if flag not in flags:
        return 0
    values = flags[flags.index(flag) + 1 :]
    return next((count for count, value in enumerate(values) if value.startswith("--")), len(values))


def _parse_series(line: str) -> Series:
    (family,) = text_string_to_metric_families(line + "\n")
    (sample,) = family.samples
    return sample.name, tuple(sorted(sample.labels.items()))


def _list(path: str) -> list[str]:
    try:
        return os.listdir(path)
    except OSError:
        return []
