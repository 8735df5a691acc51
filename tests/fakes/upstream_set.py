"""The controller's set of upstreams on memory of its own, with a clock that only the test moves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from meshd.controller.announcement import Announcement
from meshd.controller.registering import Registrations
from meshd.controller.registration import Discovered
from meshd.controller.registry_keeper import RegistryKeeper
from meshd.controller.sources import Sources
from meshd.log import Log
from meshd.memory import Segment
from meshd.routing.registry import SEGMENT_BYTES, Registry, RegistryBoard, Upstream

WALL_S = 1790000000.5


def quiet_log() -> Log:
    return Log("test", "error", stream_fd=-1)


@dataclass
class UpstreamSet:
    """``restart`` makes what the next controller makes. ``busy``: numbers that somebody holds load on;
    ``remembered``: those of which something is kept elsewhere.

    What is scheduled runs when ``run_due`` is called, or at once if ``is_prompt``.
    """

    segment: Segment = field(default_factory=lambda: Segment.create("registry", SEGMENT_BYTES))
    is_dp_aware: bool = False
    is_prompt: bool = False
    now_s: float = 100.0
    bells: int = 0
    due: list[Callable[[], None]] = field(default_factory=list)
    busy: set[int] = field(default_factory=set)
    remembered: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self.due.clear()
        self.keeper = RegistryKeeper(
            RegistryBoard(self.segment),
            quiet_log(),
            is_idle=lambda number: number not in self.busy,
            schedule=self._schedule,
            ring_bells=self._ring,
            clock=lambda: self.now_s,
            wall_clock=lambda: WALL_S + self.now_s - 100.0,
            is_clean=lambda number: number not in self.remembered,
        )
        self.sources = Sources(self.keeper, quiet_log())
        self.registrations = Registrations(self.keeper, quiet_log(), is_dp_aware=self.is_dp_aware)

    def start(self, *wanted: Announcement | str) -> None:
        """Start with announcements, or plain ones of URLs; published once, for a thousand take seconds."""
        is_prompt, self.is_prompt = self.is_prompt, False
        self.sources.start(Announcement(each) if isinstance(each, str) else each for each in wanted)
        self.is_prompt = is_prompt
        if is_prompt:
            self.run_due()

    def activate(self, url: str, *models: str, **facts: Any) -> None:
        self.registrations.activate(url, Discovered(models, **facts))

    def pass_time(self, seconds: float) -> None:
        """Let time pass, and do what the controller does several times a second."""
        self.now_s += seconds
        self.keeper.sweep()
        self.sources.sweep()
        self.run_due()

    def run_due(self) -> int:
        calls, self.due = self.due, []
        for call in calls:
            call()
        return len(calls)

    def published(self) -> Registry:
        return RegistryBoard(self.segment).read()

    def the(self, url: str) -> Upstream:
        (found,) = [upstream for upstream in self.keeper.upstreams if upstream.url == url]
        return found

    def urls(self) -> list[str]:
        return [upstream.url for upstream in self.keeper.upstreams]

    def _schedule(self, delay_s: float, call: Callable[[], None]) -> None:
        if self.is_prompt:
            call()
        else:
            self.due.append(call)

    def _ring(self) -> None:
        self.bells += 1
