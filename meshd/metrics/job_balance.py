"""How many preparation jobs of a metric row have been counted as submitted, but under no outcome.

While the owner of the row lives, these are its jobs in flight. Once it is dead nothing moves in the row any
more, and they are the jobs that died with it: the difference is exact whatever the process was doing when it
was killed, for it is taken from the very cells whose balance it restores.
"""

from __future__ import annotations

from meshd.memory import Segment
from meshd.metrics import layout
from meshd.metrics.catalog import PREPARE_CODES
from meshd.metrics.family import Catalog


class JobBalance:
    """Reads the rows of the segment ``metrics``; any process may."""

    def __init__(self, segment: Segment, catalog: Catalog) -> None:
        self._words = segment.words
        cells = layout.PresetCells(catalog).first
        numbers = catalog.numbers
        self._submitted = cells[numbers["mesh_prepare_jobs_total"], ()]
        runs = cells[numbers["mesh_prepare_run_seconds"], ()]
        buckets = len(catalog.by_name["mesh_prepare_run_seconds"].buckets) + 1
        errors = numbers["mesh_prepare_errors_total"]
        self._outcomes = (
            *range(runs, runs + buckets),
            *(cells[errors, (reason,)] for reason in PREPARE_CODES.split()),
        )

    def open_jobs(self, row: int) -> int:
        """Return submissions minus outcomes, over all who ever owned the row; O(outcomes)."""
        words, start = self._words, layout.row_start(row) // layout.WORD
        balance: int = words[start + self._submitted] - sum(words[start + cell] for cell in self._outcomes)
        return balance
