"""What settings and discovery want in the set, compared with what is there.

A source knows its upstreams by keys of its own: the settings by URL, Kubernetes by the UID of a pod. Each
adds and drains only its own. An announced upstream whose URL is still taken, by one that drains for
instance, waits for it.
"""

from __future__ import annotations

from collections.abc import Iterable

from meshd.controller.announcement import CONFIG, Announcement
from meshd.controller.registration import filled_fields
from meshd.controller.registry_keeper import Refusal, RegistryKeeper
from meshd.log import Log

_MEMO = "told"  # in the memo: source → key → digest of what it announced; without those that wait


class Sources:
    """The set as its sources see it."""

    def __init__(self, keeper: RegistryKeeper, log: Log) -> None:
        self._keeper = keeper
        self._log = log
        self._queued: dict[tuple[str, str], Announcement] = {}
        self._told: dict[str, dict[str, str]] = {}

    def start(self, wanted: Iterable[Announcement]) -> None:
        """Go on with the set a predecessor published, bring in what the settings changed since, publish."""
        self._keeper.resume()
        self._told = {source: dict(keys) for source, keys in self._keeper.memo.get(_MEMO, {}).items()}
        self._keeper.memo[_MEMO] = self._told
        self._compare_settings({announcement.base_url: announcement for announcement in wanted})
        self._keeper.publisher.now()

    def announce(self, source: str, key: str, announcement: Announcement) -> None:
        """Have the upstream that ``source`` knows as ``key`` in the set, as ``announcement`` says.

        One that is there takes over what was changed, and keeps load, health and model. A new one waits while
        its URL is taken or the set is full.
        """
        told, digest = self._told.setdefault(source, {}), announcement.digest()
        if (source, key) in self._queued:
            self._queued[source, key] = announcement
        elif key not in told:
            outcome = self._keeper.register(announcement, source, key)
            if isinstance(outcome, Refusal):
                self._log.warning(
                    "registration_waits", upstream=announcement.base_url, source=source, reason=str(outcome)
                )
                self._queued[source, key] = announcement
            else:
                told[key] = digest
        elif told[key] != digest:
            told[key] = digest
            self._revise(source, key, announcement)

    def withdraw(self, source: str, key: str) -> None:
        """Drain the upstream that ``source`` knows as ``key``; harmless when there is none."""
        self._queued.pop((source, key), None)
        self._told.get(source, {}).pop(key, None)
        upstreams = self._keeper.upstreams
        self._keeper.drain([u for u in upstreams if (u.source, u.source_key) == (source, key)])

    def keys_of(self, source: str) -> set[str]:
        """Return the keys that ``source`` has announced and not withdrawn, whatever became of them."""
        return {key for name, key in self._queued if name == source}.union(self._told.get(source, ()))

    def sweep(self) -> None:
        """Let those in that waited; call it often."""
        for (source, key), announcement in list(self._queued.items()):
            outcome = self._keeper.register(announcement, source, key)
            if outcome is Refusal.FULL:
                return  # the others need not be tried: there may be thousands of them, ten times a second
            if not isinstance(outcome, Refusal):
                del self._queued[source, key]
                self._told[source][key] = announcement.digest()

    def _compare_settings(self, wanted: dict[str, Announcement]) -> None:
        """Add what the settings name anew, drain what they no longer name, revise what they changed."""
        for url in self.keys_of(CONFIG) - wanted.keys():
            self.withdraw(CONFIG, url)
        for url, announcement in wanted.items():
            self.announce(CONFIG, url, announcement)

    def _revise(self, source: str, key: str, announcement: Announcement) -> None:
        labels = dict(announcement.labels)
        filled = filled_fields(labels)
        for upstream in self._keeper.present(announcement.base_url):
            if (upstream.source, upstream.source_key) == (source, key):
                self._keeper.change(
                    upstream,
                    api_key=announcement.api_key,
                    labels={**upstream.labels, **labels},
                    priority=filled["priority"] if announcement.priority is None else announcement.priority,
                    cost=filled["cost"] if announcement.cost is None else announcement.cost,
                    probing=dict(announcement.probing),
                )

    def __repr__(self) -> str:
        told = {source: len(keys) for source, keys in self._told.items()}
        return f"Sources({told}, {len(self._queued)} waiting)"
