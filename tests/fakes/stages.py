"""Stage times as a prepare worker counts them, and as a scrape finds them."""

from __future__ import annotations

from meshd.memory import Segment
from meshd.metrics.catalog import build_catalog
from meshd.metrics.cells import MetricRow, segment_size
from meshd.metrics.table import MetricTable
from meshd.prepare.stage_counts import StageCounts
from meshd.prepare.stopwatch import STAGES


class CountedStages:
    """The metric row of one worker."""

    def __init__(self) -> None:
        catalog = build_catalog()
        segment = Segment.create("metrics", segment_size(1))
        self._row = MetricRow(segment, 0, catalog)
        self._table = MetricTable(segment, 1, catalog)
        self.counts = StageCounts(self._row)

    def seconds(self) -> dict[str, float]:
        """Return the seconds counted for each stage that was counted at all."""
        self._row.flush()
        series = self._table.sum_rows(()).series["mesh_prepare_stage_seconds"]
        found = {name: series[name,] for name in STAGES if (name,) in series}
        return {name: cells[-1] for name, cells in found.items() if any(cells[:-1])}
