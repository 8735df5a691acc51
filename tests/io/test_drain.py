"""The end of an I/O process, with requests and a pool that do what the test says, on a real loop."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from meshd.io import drain as module
from meshd.io.drain import drain


@pytest.fixture(autouse=True)
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "JOB_OVERTIME_SECS", 0.1)
    monkeypatch.setattr(module, "LAST_BYTES_SECS", 0.05)


class Story:
    """What happened, in order. ``jobs``: whether any job runs, as the pool says."""

    def __init__(self, *, jobs: bool = False) -> None:
        self.events: list[str] = []
        self.exchanges: set[Any] = set()
        self.server: Any = SimpleNamespace(is_busy=True, is_open=True, close_idle=self.close_idle)
        self.services: Any = SimpleNamespace(exchanges=self.exchanges)
        self.pool: Any = SimpleNamespace(has_jobs=jobs, close=lambda: self.events.append("pool closed"))

    def close_idle(self) -> None:
        if not self.exchanges:
            self.server.is_open = False

    def run(self, grace_s: float) -> list[str]:
        asyncio.run(drain(self.server, self.services, self.pool, grace_s))
        return self.events


class Exchange:
    def __init__(self, story: Story, name: str, prepared_at: float) -> None:
        self.story, self.name = story, name
        self.record = SimpleNamespace(body_at=1.0, prepared_at=prepared_at)

    def cut(self) -> None:
        self.story.events.append(f"{self.name} cut")
        self.story.exchanges.discard(self)


def test_the_pool_closes_when_all_requests_have_ended() -> None:
    story = Story()
    story.server.is_busy = False
    assert story.run(60) == ["pool closed"]


def test_after_the_grace_period_the_pool_closes_before_anyone_is_cut() -> None:
    story = Story()
    story.exchanges.add(Exchange(story, "relay", 2.0))
    assert story.run(0) == ["pool closed", "relay cut"]


def test_a_running_job_has_a_little_longer_than_the_rest() -> None:
    story = Story(jobs=True)
    story.exchanges |= {Exchange(story, "relay", 2.0), Exchange(story, "job", 0.0)}
    assert story.run(0) == ["pool closed", "relay cut", "job cut"]


def test_a_job_that_ends_in_that_time_lets_its_request_go_on_at_once() -> None:
    story = Story(jobs=True)
    story.exchanges.add(Exchange(story, "job", 0.0))

    async def run() -> float:
        loop = asyncio.get_running_loop()
        loop.call_later(0.01, setattr, story.pool, "has_jobs", False)
        started = loop.time()
        await drain(story.server, story.services, story.pool, 0)
        return loop.time() - started

    asyncio.run(run())
    assert story.events == ["pool closed", "job cut"]


def test_a_client_that_does_not_leave_blocks_nobody() -> None:
    story = Story()
    story.server.is_busy = False
    story.server.close_idle = lambda: None
    assert story.run(60) == ["pool closed"]
    assert story.server.is_open
