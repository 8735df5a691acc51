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

_MEMO = "config"  # in the memo: URL → digest of what the settings asked for


class Sources:
    """The set as its sources see it."""

    def __init__(self, keeper: RegistryKeeper, log: Log) -> None:
        self._keeper = keeper
        self._log = log
        self._queued: dict[tuple[str, str], Announcement] = {}
        self._config: dict[str, str] = {}

    def start(self, wanted: Iterable[Announcement]) -> None:
        """Go on with the set a predecessor published, bring in what the settings changed since, publish."""
        self._keeper.resume()
        self._config = dict(self._keeper.memo.get(_MEMO, {}))
        self._compare_settings({announcement.base_url: announcement for announcement in wanted})
        self._keeper.publisher.now()

    def announce(self, source: str, key: str, announcement: Announcement) -> None:
        """Have the upstream that ``source`` knows as ``key`` in the set; one that is there stays as it is.

        It waits while its URL is taken or the set is full.
        """
        if key in self.keys_of(source):
            return
        outcome = self._keeper.register(announcement, source, key)
        if isinstance(outcome, Refusal):
            self._log.warning(
                "registration_waits", upstream=announcement.base_url, source=source, reason=str(outcome)
            )
            self._queued[source, key] = announcement

    def withdraw(self, source: str, key: str) -> None:
        """Drain the upstream that ``source`` knows as ``key``; harmless when there is none."""
        self._queued.pop((source, key), None)
        upstreams = self._keeper.upstreams
        self._keeper.drain([u for u in upstreams if (u.source, u.source_key) == (source, key)])

    def keys_of(self, source: str) -> set[str]:
        """Return the keys that ``source`` has announced and not withdrawn and nobody has removed."""
        waiting = {key for name, key in self._queued if name == source}
        return waiting | {
            u.source_key for u in self._keeper.upstreams if u.source == source and u.state != "draining"
        }

    def sweep(self) -> None:
        """Let those in that waited; call it often."""
        for (source, key), announcement in list(self._queued.items()):
            if not isinstance(self._keeper.register(announcement, source, key), Refusal):
                del self._queued[source, key]
                self._write_memo()

    def _compare_settings(self, wanted: dict[str, Announcement]) -> None:
        """Add what the settings name anew, drain what they no longer name, revise what they changed.

        Compared is what they said when the set was last compared: a server that a user removed since stays
        removed, one that a user changed stays changed.
        """
        former = self._config
        digests = {url: announcement.digest() for url, announcement in wanted.items()}
        for url in former.keys() - wanted.keys():
            self.withdraw(CONFIG, url)
        for url, announcement in wanted.items():
            if url not in former:
                self.announce(CONFIG, url, announcement)
            elif former[url] != digests[url]:
                self._revise(announcement)
        self._config = digests
        self._write_memo()

    def _revise(self, announcement: Announcement) -> None:
        labels = dict(announcement.labels)
        filled = filled_fields(labels)
        for upstream in self._keeper.present(announcement.base_url):
            if upstream.source == CONFIG:
                self._keeper.change(
                    upstream,
                    api_key=announcement.api_key,
                    labels={**upstream.labels, **labels},
                    priority=filled["priority"] if announcement.priority is None else announcement.priority,
                    cost=filled["cost"] if announcement.cost is None else announcement.cost,
                    probing=dict(announcement.probing),
                )

    def _write_memo(self) -> None:
        """One that waits is left out: a successor announces it again."""
        waiting = {key for source, key in self._queued if source == CONFIG}
        self._keeper.memo[_MEMO] = {url: d for url, d in self._config.items() if url not in waiting}

    def __repr__(self) -> str:
        return f"Sources({len(self._config)} of the settings, {len(self._queued)} waiting)"
