"""The stage times of jobs in the metric row of the prepare worker that ran them."""

from __future__ import annotations

from meshd.metrics.cells import MetricRow
from meshd.prepare.stopwatch import StageTimes


class StageCounts:
    """One histogram for each stage; written when ``row`` is flushed."""

    def __init__(self, row: MetricRow) -> None:
        name = "mesh_prepare_stage_seconds"
        self._json_parse = row.buffered_histogram(name, stage="json_parse")
        self._view = row.buffered_histogram(name, stage="view")
        self._template = row.buffered_histogram(name, stage="template")
        self._encode = row.buffered_histogram(name, stage="encode")
        self._decode = row.buffered_histogram(name, stage="decode")

    def count(self, times: StageTimes) -> None:
        """Count the stages of one job that ran."""
        if times.json_parse:
            self._json_parse.observe(times.json_parse * 1e-9)
        if times.view:
            self._view.observe(times.view * 1e-9)
        if times.template:
            self._template.observe(times.template * 1e-9)
        if times.encode:
            self._encode.observe(times.encode * 1e-9)
        if times.decode:
            self._decode.observe(times.decode * 1e-9)
