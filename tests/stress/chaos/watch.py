"""What is looked at while traffic runs: counters, gauges, liveness, memory."""

from __future__ import annotations

import http.client
import threading
import time
from dataclasses import dataclass
from typing import Self

from tests.fakes.node import Node

LIVENESS_SECS = 10.0
NEGATIVE = ("mesh_worker_health", "mesh_worker_cb_state")  # -1: an upstream that left

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


@dataclass(frozen=True)
class Probe:
    """One ``GET /liveness`` on a fresh connection; ``what``: empty when it was good."""

    at: float
    until: float
    what: str


class Watch:
    """Looks at a node while the block runs. ``faults``: what must never be seen."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._is_over = threading.Event()
        self.faults: list[str] = []
        self.probes: list[Probe] = []
        self.scrapes = 0
        self.anonymous: list[tuple[float, int]] = []  # of the supervisor: when, bytes
        self._before: Samples = {}
        self._threads = [
            threading.Thread(target=self._every, args=(act, pause_s), daemon=True)
            for act, pause_s in ((self.scrape, 0.7), (self._probe, 0.1), (self._weigh, 0.5))
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join(30)

    def _every(self, act: object, pause_s: float) -> None:
        assert callable(act)
        while not self._is_over.wait(pause_s):
            try:
                act()
            except Exception as fault:
                self.faults.append(f"{act.__name__}: {fault!r}")
                raise

    def scrape(self) -> None:
        """Compare all samples with those before; a scrape may meet the death of the controller."""
        try:
            now = self._node.metrics()
        except (OSError, http.client.HTTPException):
            return
        self.scrapes += 1
        for (name, labels), value in now.items():
            is_counter = name.endswith(("_total", "_count", "_bucket", "_sum")) and "age_count" not in name
            before = self._before.get((name, labels), 0.0)
            if is_counter and value < before - 1e-6:
                self.faults.append(f"{name}{labels} fell from {before} to {value}")
            if value < 0 and name not in NEGATIVE:
                self.faults.append(f"{name}{labels} is {value}")
        self._before = now

    def _probe(self) -> None:
        at, what = time.monotonic(), ""
        try:
            path = ("/liveness", "/health")[len(self.probes) % 2]
            status, _, body = self._node.request("GET", path, timeout=LIVENESS_SECS)
            what = "" if status == 200 else f"{status} {body!r}"
        except (OSError, http.client.HTTPException) as error:
            what = repr(error)
        self.probes.append(Probe(at, time.monotonic(), what))

    def _weigh(self) -> None:
        self.anonymous.append((time.monotonic(), anonymous_bytes(self._node.process.pid)))


def anonymous_bytes(pid: int) -> int:
    """Return the proportional share of anonymous memory: what a leak would show in, and no file page."""
    with open(f"/proc/{pid}/smaps_rollup") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("Pss_Anon:"))
