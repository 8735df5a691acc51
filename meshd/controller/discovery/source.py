"""What a source of discovery is, and how the set of upstreams follows it.

A source reads something outside (a file, DNS answers, pods) and says what it lists: announcements by key. A
reconciler compares that with the upstreams that this source has in the registry, announces what is missing
and withdraws what is no longer listed. It never touches those of others, so all sources work side by side,
and since it compares with the registry, a new controller goes on where a killed one left it.

    source ── want(scope, listed) ──> Reconciler ── announce, withdraw ──> controller/sources.py

A *scope* is what is read as a whole and can be unreadable by itself, such as the A records of one name; it
is the beginning of the keys in it. A scope that has not been read keeps all that it has, since nothing is
known about it. Keys of no scope belonged to a former configuration and are withdrawn.

The keeper of announcements has the memory: what waits for a URL that is taken, what a user removed though
it is listed, and what a former controller announced.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from meshd.controller.announcement import Announcement
from meshd.log import Log
from meshd.metrics.cells import Counter, Gauge

FIRST_BACKOFF_S: Final = 1.0
LAST_BACKOFF_S: Final = 30.0

Listed = Mapping[str, Announcement]


class Keeper(Protocol):
    """What sources need of ``controller.sources.Sources``."""

    def announce(self, source: str, key: str, announcement: Announcement) -> object:
        """Have an upstream in the set, as announced."""

    def withdraw(self, source: str, key: str) -> object:
        """Drain an upstream of a source, or forget one that waits."""

    def keys_of(self, source: str) -> Collection[str]:
        """Return the keys that a source has announced and not withdrawn."""


@dataclass(frozen=True, slots=True)
class SourceMetrics:
    discovered: Gauge
    registrations: Counter
    deregistrations: Counter


class Reconciler:
    """Makes the registry follow one source; every method is idempotent and runs on the controller's loop."""

    def __init__(self, source: str, scopes: Sequence[str], keeper: Keeper, metrics: SourceMetrics) -> None:
        self._source = source
        self._scopes = tuple(scopes)
        self._keeper = keeper
        self._metrics = metrics
        self._lists: dict[str, Listed] = {}
        self._announced: dict[str, Announcement] = {}  # as last told to the keeper

    def want(self, scope: str, listed: Listed) -> None:
        """Take what a scope lists now: all of it, each key beginning behind the scope."""
        self._lists[scope] = {scope + key: announcement for key, announcement in listed.items()}
        self._metrics.discovered.set(sum(len(each) for each in self._lists.values()))
        self.settle()

    def settle(self) -> None:
        """Withdraw what is not listed any more and announce what is missing. O(upstreams of the source)."""
        wanted = {key: each for listed in self._lists.values() for key, each in listed.items()}
        present = set(self._keeper.keys_of(self._source))
        gone = [key for key in sorted(present) if key not in wanted and not self._is_unread(key)]
        for key in gone:
            self._keeper.withdraw(self._source, key)
        self._metrics.deregistrations.inc(len(gone))
        for key, announcement in wanted.items():
            if key not in present or self._announced.get(key) != announcement:
                self._keeper.announce(self._source, key, announcement)
        self._metrics.registrations.inc(len(wanted.keys() - present))
        self._announced = wanted

    def __repr__(self) -> str:
        unread = [scope for scope in self._scopes if scope not in self._lists]
        return f"Reconciler({self._source}, unread={unread}, listed={sorted(self._announced)})"

    def _is_unread(self, key: str) -> bool:
        return any(key.startswith(scope) for scope in self._scopes if scope not in self._lists)


class Backoff:
    """Delays between attempts to read a source: doubling from 1 to 30 s, spread so that nodes differ."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._next_s = FIRST_BACKOFF_S

    def take(self) -> float:
        """Return the next delay in seconds."""
        limit_s = self._next_s
        self._next_s = min(2 * limit_s, LAST_BACKOFF_S)
        return max(FIRST_BACKOFF_S, limit_s * (1 - self._rng.random() / 2))

    def reset(self) -> None:
        self._next_s = FIRST_BACKOFF_S


class Outage:
    """Tells in the log that something cannot be read: once for each problem, and when that is over."""

    def __init__(self, source: str, name: str, log: Log) -> None:
        self._source = source
        self._name = name
        self._log = log
        self._problem = ""

    def note(self, problem: str) -> None:
        """Take the problem of an attempt; empty: it was read."""
        if problem == self._problem:
            return
        self._problem = problem
        if problem:
            self._log.warning("discovery_unreadable", source=self._source, name=self._name, problem=problem)
        else:
            self._log.info("discovery_readable", source=self._source, name=self._name)
