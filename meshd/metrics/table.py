"""Read metrics: the rows of all processes, summed.

Counters and histograms count in every row that ever had an owner, so nothing goes back when a process
dies; gauges count in the rows of living processes alone. A reader takes no lock and waits for nobody: each
word is read whole, and series may lie a few stores apart (a histogram's sum may miss its latest count).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

import orjson

from meshd.memory import Segment
from meshd.metrics import layout
from meshd.metrics.family import OTHER, Catalog, Family, Kind, Label, Source

EMPTY: Final[Mapping[tuple[str, ...], list[float]]] = {}


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums of one scrape: for each family by name, the words of each series by its label values."""

    series: Mapping[str, dict[tuple[str, ...], list[float]]]

    def value(self, name: str, *values: str) -> float:
        """Return the sum of a counter or gauge; 0 if the series does not exist."""
        words = self.series.get(name, EMPTY).get(values)
        return words[0] if words else 0


class MetricTable:
    """Sums rows. Keeps, for each open label, the values it has shown, so that its limit holds node-wide."""

    def __init__(self, segment: Segment, rows: int, catalog: Catalog) -> None:
        self.catalog = catalog
        self._rows = [
            segment.bytes[layout.row_start(row) : layout.row_start(row) + layout.ROW_BYTES]
            for row in range(rows)
        ]
        self._preset = layout.PresetCells(catalog)
        self._labels = {label.name: label for family in catalog.families for label in family.labels}
        self._shown: dict[str, set[str]] = {}
        self._records: list[list[tuple[int, tuple[str, ...], int]]] = [[] for _ in range(rows)]
        self._read_to = [0] * rows

    def sum_rows(self, live_rows: Collection[int]) -> Totals:
        """Sum all rows; ``live_rows`` are those whose owner lives. O(rows · series)."""
        series: dict[str, dict[tuple[str, ...], list[float]]] = {
            family.name: {values: [0] * family.cell_words for values in family.preset_values()}
            for family in self.catalog.of_source(Source.ROW)
        }
        for row, memory in enumerate(self._rows):
            words = memory.cast("Q")
            if words[layout.FINGERPRINT] == self.catalog.fingerprint:
                self._read_names(row, words[layout.NAMES_END])
                self._add_row(row, memory, row in live_rows, series)
        return Totals(series)

    def _read_names(self, row: int, end: int) -> None:
        names = self._rows[row][layout.NAMES_OFFSET :]
        offset = self._read_to[row]
        while offset < end:
            number, key, cell, offset = layout.unpack_record(names, offset)
            family = self.catalog.families[number]
            values = self._fold(family, tuple(orjson.loads(key)))
            self._records[row].append((number, values, cell))
        self._read_to[row] = offset

    def bounded(self, name: str, value: str) -> str:
        """Return ``value``, or `other` if the open label ``name`` has shown as many values as it may."""
        return self._bound(self._labels[name], value)

    def _fold(self, family: Family, values: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(self._bound(*pair) for pair in zip(family.labels, values, strict=True))

    def _bound(self, label: Label, value: str) -> str:
        shown = self._shown.setdefault(label.name, set())
        if label.values is None and value != OTHER and value not in shown:
            if len(shown) >= label.limit:
                return OTHER
            shown.add(value)
        return value

    def _add_row(
        self,
        row: int,
        memory: memoryview,
        is_live: bool,
        series: dict[str, dict[tuple[str, ...], list[float]]],
    ) -> None:
        records = self._records[row]
        end = self._preset.end
        if records:
            number, _values, cell = records[-1]
            end = cell + self.catalog.families[number].cell_words
        used = memory[: end * layout.WORD]
        integers, floats = used.cast("Q").tolist(), used.cast("d").tolist()
        preset = ((number, values, cell) for (number, values), cell in self._preset.first.items())
        for part in (preset, records):
            for number, values, cell in part:
                family = self.catalog.families[number]
                if family.kind is Kind.GAUGE and not is_live:
                    continue
                sums = series[family.name].setdefault(values, [0] * family.cell_words)
                for word in range(family.cell_words):
                    source = integers if layout.is_integer(family, word) else floats
                    sums[word] += source[cell + word]
