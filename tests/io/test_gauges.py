"""What one look tells the metrics, with fakes for what is looked at."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from meshd.io.gauges import AGES_SECS, Gauges


class Recorded:
    """Metrics by name: what was set, what was counted in all; and the ages of requests."""

    def __init__(self) -> None:
        self.levels: dict[str, float] = {}
        self.counts: dict[str, int] = {}
        self.ages: list[list[float]] = []

    def requests_in_flight(self, ages: list[float]) -> None:
        self.ages.append(ages)

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(
            set=lambda value: self.levels.update({name: value}),
            inc=lambda count: self.counts.update({name: self.counts.get(name, 0) + count}),
        )


class Looked:
    """An I/O process as far as gauges look at it."""

    def __init__(self, is_traced: bool = True) -> None:
        self.metrics = Recorded()
        self.lines: list[tuple[str, str]] = []
        self.index = SimpleNamespace(evictions=0)
        self.spans = SimpleNamespace(dropped=0, trouble="")
        self.log = SimpleNamespace(
            dropped=0,
            warning=lambda event, cause: self.lines.append((event, cause)),
            info=lambda event: self.lines.append((event, "")),
        )
        self.exchanges: set[Any] = set()
        self.services: Any = SimpleNamespace(
            director=SimpleNamespace(held_tickets=3, waiting_requests=2, reserved_bytes=4096),
            metrics=self.metrics,
            log=self.log,
            exchanges=self.exchanges,
        )
        index: Any = self.index
        spans: Any = self.spans
        self.gauges = Gauges(self.services, index, spans if is_traced else None)


class Running:
    def __init__(self, started_at: float) -> None:
        self.record = SimpleNamespace(started_at=started_at)


def test_levels_of_the_director_are_set_at_each_look() -> None:
    looked = Looked()
    looked.gauges.look(1.0)
    assert looked.metrics.levels == {"tickets_held": 3, "requests_waiting": 2, "body_reserved": 4096}


def test_ages_of_running_requests_are_counted_once_a_second() -> None:
    looked = Looked(is_traced=False)
    looked.exchanges.add(Running(3.0))
    for now in (10.0, 10.1, 10.0 + AGES_SECS):
        looked.gauges.look(now)
    assert looked.metrics.ages == [[7.0], [8.0]]


def test_losses_are_counted_once_each() -> None:
    looked = Looked()
    looked.index.evictions, looked.log.dropped, looked.spans.dropped = 5, 2, 1
    looked.gauges.look(1.0)
    looked.gauges.look(1.1)
    looked.index.evictions = 6
    looked.gauges.look(1.2)
    assert looked.metrics.counts == {"index_evictions": 6, "log_drops": 2, "trace_drops": 1}


def test_a_collector_that_stops_and_resumes_is_told_once_each() -> None:
    looked = Looked()
    for trouble in ("", "unavailable", "refused", "", ""):
        looked.spans.trouble = trouble
        looked.gauges.look(1.0)
    assert looked.lines == [("spans_not_taken", "unavailable"), ("spans_taken_again", "")]
