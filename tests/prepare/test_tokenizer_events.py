from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from meshd.memory import Segment
from meshd.metrics.catalog import build_catalog
from meshd.metrics.cells import MetricRow, segment_size
from meshd.metrics.table import MetricTable
from meshd.prepare.tokenizer_events import ENGINE_ERROR, MATCH, MISMATCH, NO_SAFE_CUT, CountedEvents

FALLBACKS = "mesh_prepare_fallbacks_total"
BYTES = "mesh_prepare_bounded_bytes_total"
CROSSCHECKS = "mesh_tokenizer_crosscheck_total"


class Worker:
    """A metric row with its events, and what they wrote."""

    def __init__(self) -> None:
        self.catalog = build_catalog()
        self.segment = Segment.create("metrics", segment_size(1))
        self.lines: list[tuple[str, dict[str, Any]]] = []
        self.events = CountedEvents(MetricRow(self.segment, 0, self.catalog), self._log)

    def _log(self, event: str, **fields: Any) -> None:
        self.lines.append((event, fields))

    def values(self, name: str) -> dict[str, float]:
        series = MetricTable(self.segment, 1, self.catalog).sum_rows({0}).series[name]
        return {labels[0]: words[0] for labels, words in series.items() if words[0]}


@pytest.fixture
def worker() -> Iterator[Worker]:
    worker = Worker()
    yield worker
    worker.segment.close()


def test_fallbacks_are_counted_by_their_reason(worker):
    worker.events.fallback(NO_SAFE_CUT)
    worker.events.fallback(ENGINE_ERROR)
    worker.events.fallback(NO_SAFE_CUT)
    assert worker.values(FALLBACKS) == {"no_safe_cut": 2, "engine_error": 1}


def test_bytes_offered_and_tokenized_add_up(worker):
    worker.events.bounded(1 << 20, 4000)
    worker.events.bounded(100, 100)
    assert worker.values(BYTES) == {"offered": (1 << 20) + 100, "tokenized": 4100}


def test_crosschecks_are_counted_by_their_result(worker):
    for result in (MATCH, MATCH, MISMATCH):
        worker.events.crosscheck(result)
    assert worker.values(CROSSCHECKS) == {"match": 2, "mismatch": 1}


def test_an_engine_that_is_switched_off_is_one_error_line(worker):
    worker.events.engine_off("/models/m1/tokenizer.json")
    [(event, fields)] = worker.lines
    assert event == "tokenizer_engine_off"
    assert fields["path"] == "/models/m1/tokenizer.json"
