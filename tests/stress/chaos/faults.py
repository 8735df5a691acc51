"""What is done to a node while traffic runs: children killed and stopped, code and upstreams replaced."""

from __future__ import annotations

import contextlib
import http.client
import json
import math
import os
import random
import signal
import threading
import time
from dataclasses import dataclass
from typing import Any, Final, Self
from urllib.parse import urlsplit

from meshd.control import Role
from tests.fakes.node import Backend, Node
from tests.stress.chaos.asks import MODEL
from tests.stress.chaos.bad_upstream import BadUpstream

KEY: Final = "secret-of-the-upstream"
STANDING_FAULTS: Final = (
    "status=500,times=15", "status=503,times=20", "status=429,retry-after=1,times=5", "reset,times=20",
    "close,times=10", "cut=500,times=10", "reset-at=100,times=10", "delay-head-ms=300,times=30",
    "token-delay-ms=10,times=40", "split=3,times=30", "malformed-head,times=5", "stall=200,times=5", "",
)  # fmt: skip
VICTIMS: Final = {Role.IO: 4, Role.PREPARE: 4, Role.LEADER: 2, Role.CONTROLLER: 3}
RENEWAL_EACH_SECS: Final = 30.0  # it costs some CPU seconds
PAUSES_S: Final = (0.2, 1.0)


@dataclass(frozen=True)
class Strike:
    """One act against a child. ``until``: when it was over; a kill is over once somebody sits there again."""

    at: float
    until: float
    act: str
    role: Role
    index: int


class Upstream:
    """A bundled upstream that can be killed, and started again on the port that it had."""

    def __init__(self, *flags: str, key: str = "") -> None:
        self.flags = ("--model", MODEL, *(("--api-key", key) if key else ()), *flags)
        self.key = key
        self.backend: Backend | None = Backend(*self.flags)
        self.url = self.backend.url

    def kill(self) -> None:
        if self.backend is not None:
            self.backend.stop()
            self.backend = None

    def start(self) -> None:
        if self.backend is None:
            self.backend = Backend(*self.flags, "--port", str(urlsplit(self.url).port))


class Chaos:
    """Acts on ``node`` for as long as the block runs, then leaves all as it was: `settle`.

    ``fixed`` are the upstreams of the node's settings, ``registered`` those added by its API.
    """

    def __init__(
        self,
        node: Node,
        rng: random.Random,
        fixed: list[Upstream],
        registered: list[Upstream],
        bad: BadUpstream,
        seconds: float,
    ) -> None:
        self._node, self._rng = node, rng
        self._fixed, self._registered, self._bad = fixed, registered, bad
        self._board = node.board()
        self._is_over = threading.Event()
        renewals = math.ceil(seconds / RENEWAL_EACH_SECS)
        self._renewals_at = sorted(time.monotonic() + seconds * rng.random() for _ in range(renewals))
        self.strikes: list[Strike] = []
        self.acts: list[str] = []
        self.faults: list[str] = []
        self._dead_upstreams: list[tuple[float, Upstream]] = []
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join(60)
        assert not self._thread.is_alive()

    @property
    def urls(self) -> dict[str, str]:
        """The upstreams that are added by the API, and their keys."""
        return {each.url: each.key for each in self._registered} | {self._bad.url: ""}

    def settle(self) -> None:
        """End all faults."""
        self._bad.is_good = True
        for upstream in (*self._fixed, *self._registered):
            upstream.start()
            assert upstream.backend is not None
            upstream.backend.fault("")
            upstream.backend.control("PUT", "/_backend/health", b'{"status":200}')
        deadline = time.monotonic() + 30
        while missing := self._missing():
            assert time.monotonic() < deadline, f"not registered: {missing}"
            for url in missing:
                if url in self.urls:  # the others are there without anybody's doing
                    self.register(url)
            time.sleep(0.1)

    def register(self, url: str) -> None:
        members = {"url": url} | ({"api_key": self.urls[url]} if self.urls[url] else {})
        self._call("POST", "/workers", members)

    def _missing(self) -> list[str]:
        listed = self._workers()
        wanted = [*(each.url for each in self._fixed), *self.urls]
        return [url for url in wanted if listed is None or listed.get(url, {}).get("state") != "active"]

    def _workers(self) -> dict[str, dict[str, Any]] | None:
        answer = self._call("GET", "/workers")
        return None if answer is None else {info["url"]: info for info in answer["workers"]}

    # -------------------------------------------------------------------------------------------- acts

    def _run(self) -> None:
        try:
            while not self._is_over.wait(self._rng.uniform(*PAUSES_S)):
                self._revive_upstreams()
                if self._renewals_at and time.monotonic() > self._renewals_at[0]:
                    self._renewals_at.pop(0)
                    self.acts.append("SIGUSR2")
                    self._node.process.send_signal(signal.SIGUSR2)
                    continue
                acts = (self._strike_child, self._fault_upstream, self._kill_upstream, self._change_workers)
                self._rng.choices(acts, (6, 5, 2, 3))[0]()
        except Exception as fault:
            self.faults.append(repr(fault))
            raise

    def _strike_child(self) -> None:
        role = self._rng.choices(tuple(VICTIMS), tuple(VICTIMS.values()))[0]
        rows = [row for row in self._board.rows() if row.role is role and row.pid]
        is_kill, stop_s = self._rng.random() < 0.5, 0.02 + self._rng.random() ** 2 * 1.5
        if not rows:
            return
        row = self._rng.choice(rows)
        pid, index, at = row.pid, row.index, time.monotonic()
        with contextlib.suppress(ProcessLookupError):
            if is_kill:
                os.kill(pid, signal.SIGKILL)
                self._note("kill", role, index, at)
                return
            os.kill(pid, signal.SIGSTOP)
            try:
                self._is_over.wait(stop_s)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
            self._note("stop", role, index, at)

    def _note(self, act: str, role: Role, index: int, at: float) -> None:
        self.acts.append(f"{act} {role}{index}")
        self.strikes.append(Strike(at, time.monotonic(), act, role, index))

    def _fault_upstream(self) -> None:
        upstream, spec = (
            self._rng.choice((*self._fixed, *self._registered)),
            self._rng.choice(STANDING_FAULTS),
        )
        health = b'{"status":%d}' % self._rng.choice((200, 200, 200, 503))
        if upstream.backend is not None:
            self.acts.append(f"fault {spec}")
            upstream.backend.fault(spec)
            upstream.backend.control("PUT", "/_backend/health", health)

    def _kill_upstream(self) -> None:
        upstream, rest_s = self._rng.choice((*self._fixed, *self._registered)), self._rng.uniform(0.1, 4)
        if upstream.backend is not None and len(self._dead_upstreams) < 2:
            self.acts.append("kill upstream")
            upstream.kill()
            self._dead_upstreams.append((time.monotonic() + rest_s, upstream))

    def _revive_upstreams(self) -> None:
        now = time.monotonic()
        for due in [each for each in self._dead_upstreams if each[0] <= now]:
            self._dead_upstreams.remove(due)
            due[1].start()

    def _change_workers(self) -> None:
        """Take away one of the registered upstreams if it is there, else add it."""
        url, is_forced = self._rng.choice(tuple(self.urls)), self._rng.random() < 0.3
        listed = self._workers()
        if listed is None:
            return
        if url not in listed:
            self.acts.append("add worker")
            self.register(url)
        elif listed[url]["state"] != "draining":
            self.acts.append(f"remove worker force={is_forced}")
            self._call("DELETE", f"/workers/{listed[url]['id']}" + ("?force=true" if is_forced else ""))

    def _call(self, method: str, path: str, body: Any = None) -> Any:
        """Return the JSON of an answer below 400; None when the way there was hit, or it was refused."""
        try:
            status, _, data = self._node.request(method, path, body, timeout=20)
        except TimeoutError:
            self.faults.append(f"{method} {path} hangs")
            return None
        except (OSError, http.client.HTTPException):
            return None
        if status >= 400 and status not in (404, 409, 503):
            self.faults.append(f"{method} {path}: {status} {data!r}")
        return json.loads(data) if status < 400 else None
