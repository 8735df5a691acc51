"""Write metrics: one process's own row of shared cells.

Handles (``Counter``, ``Gauge``, …) are resolved once and kept; using one is a few word stores without a
lock or a system call, or none at all: what is *buffered* is written by ``MetricRow.flush``, and lost if its
process is killed before. A row outlives its process: the next owner of the seat continues the counters and
histograms, and starts with all gauges at 0.

Not for threads: a row has one writer, the thread that runs its process's loop.
"""

from __future__ import annotations

from typing import Final

import orjson

from meshd.errors import StartupError
from meshd.memory import Segment
from meshd.metrics import layout
from meshd.metrics.family import OTHER, Catalog, Family, Kind, Label, Source
from meshd.metrics.layout import segment_size

__all__ = [
    "BufferedCounter",
    "BufferedHistogram",
    "Counter",
    "FloatCounter",
    "Gauge",
    "MetricRow",
    "segment_size",
]

MAX_VALUE_BYTES: Final = 512
ORDINARY_NAMES: Final = layout.NAMES_BYTES * 7 // 8
"""The rest of the name table, like that of the cells, is kept for series with the value ``other``."""
ORDINARY_CELLS: Final = layout.CELLS_END * 7 // 8


class Counter:
    """One object a cell, which only its row writes: so its value need not be read again."""

    __slots__ = ("_count", "_word")

    def __init__(self, words: memoryview[int], index: int) -> None:
        self._word = words[index : index + 1]  # 0 as its index, unlike ``index``, is no object to be made
        self._count = words[index]

    def inc(self, n: int = 1) -> None:
        self._count += n
        self._word[0] = self._count


class BufferedCounter:
    """A counter for hot paths: ``inc`` is an addition in this process's own memory."""

    __slots__ = ("_changed", "_counter", "_pending")

    def __init__(self, counter: Counter, changed: list[BufferedCounter]) -> None:
        self._counter = counter
        self._pending = 0
        self._changed = changed  # those that the next flush has to write

    def inc(self, n: int = 1) -> None:
        if not self._pending:
            self._changed.append(self)
        self._pending += n

    def flush(self) -> None:
        self._counter.inc(self._pending)
        self._pending = 0


class FloatCounter:
    """A counter of seconds, set to its new total."""

    __slots__ = ("_floats", "_index")

    def __init__(self, floats: memoryview[float], index: int) -> None:
        self._floats = floats
        self._index = index

    @property
    def total(self) -> float:
        return float(self._floats[self._index])

    def raise_to(self, total: float) -> None:
        """Store ``total`` if it is larger: a counter never goes back."""
        if total > self._floats[self._index]:
            self._floats[self._index] = total


class Gauge:
    __slots__ = ("_floats", "_index")

    def __init__(self, floats: memoryview[float], index: int) -> None:
        self._floats = floats
        self._index = index

    def set(self, value: float) -> None:
        self._floats[self._index] = value

    def add(self, delta: float) -> None:
        self._floats[self._index] += delta


class BufferedHistogram:
    """A histogram for hot paths: ``observe`` counts in this process's own memory.

    Most times of a request are of the first bucket, which is counted apart. The others are sought in order:
    compiled, a comparison of two floats costs less than to call bisect. Values kept until the next flush, and
    sorted then, cost four times as much.
    """

    __slots__ = (
        "_bounds",
        "_changed",
        "_counts",
        "_first_bound",
        "_first_count",
        "_floats",
        "_index",
        "_is_changed",
        "_sum",
        "_words",
    )

    def __init__(
        self,
        words: memoryview[int],
        floats: memoryview[float],
        index: int,
        bounds: tuple[float, ...],
        changed: list[BufferedHistogram],
    ) -> None:
        self._words = words
        self._floats = floats
        self._index = index
        self._first_bound = bounds[0]
        self._first_count = 0
        self._bounds = list(bounds[1:])
        self._counts = [0] * len(bounds)  # of the other buckets, and of what is over all bounds
        self._sum = 0.0
        self._is_changed = False
        self._changed = changed  # those that the next flush has to write

    def observe(self, value: float) -> None:
        if not self._is_changed:
            self._is_changed = True
            self._changed.append(self)
        self._sum += value
        if value <= self._first_bound:
            self._first_count += 1
            return
        place = 0
        for bound in self._bounds:
            if value <= bound:
                break
            place += 1
        counts = self._counts
        counts[place] = counts[place] + 1  # compiled, += would add objects

    def flush(self) -> None:
        words, place = self._words, self._index
        for count in (self._first_count, *self._counts):
            if count:
                words[place] += count
            place += 1
        self._floats[place] += self._sum
        self._first_count = 0
        self._counts = [0] * len(self._counts)
        self._sum = 0.0
        self._is_changed = False


class MetricRow:
    """The writing end of row ``row``. One process at a time may hold it, from start to exit.

    Series with open labels get their cells when they are first asked for and keep them. Over the limit of
    a label, or when the row is full, the open values become ``other``. Raises StartupError when the row
    was laid out by another catalog.
    """

    def __init__(self, segment: Segment, row: int, catalog: Catalog) -> None:
        start = layout.row_start(row)
        mine = segment.bytes[start : start + layout.ROW_BYTES]
        self._catalog = catalog
        self._words = mine.cast("Q")
        self._floats = mine.cast("d")
        self._names = mine[layout.NAMES_OFFSET :]
        preset = layout.PresetCells(catalog)
        self._cells: dict[tuple[int, tuple[str, ...]], int] = dict(preset.first)
        self._cells_end = preset.end
        self._seen: dict[str, set[str]] = {}
        self._histograms: dict[int, BufferedHistogram] = {}
        self._counters: dict[int, Counter] = {}
        self._changed: list[BufferedCounter] = []
        self._observed: list[BufferedHistogram] = []
        self._take_over()

    def counter(self, name: str, **labels: str) -> Counter:
        """Resolve a counter that is written at once; those that share a cell are one object."""
        cell = self._find(name, Kind.COUNTER, labels)[0]
        counter = self._counters.get(cell)
        if counter is None:
            counter = self._counters[cell] = Counter(self._words, cell)
        return counter

    def buffered_counter(self, name: str, **labels: str) -> BufferedCounter:
        """Resolve a counter that is written by ``flush``."""
        return BufferedCounter(self.counter(name, **labels), self._changed)

    def float_counter(self, name: str, **labels: str) -> FloatCounter:
        return FloatCounter(self._floats, self._find(name, Kind.FLOAT_COUNTER, labels)[0])

    def gauge(self, name: str, **labels: str) -> Gauge:
        return Gauge(self._floats, self._find(name, Kind.GAUGE, labels)[0])

    def buffered_histogram(self, name: str, **labels: str) -> BufferedHistogram:
        """Resolve a histogram that is written by ``flush``; those that share cells are one object."""
        cell, family = self._find(name, Kind.HISTOGRAM, labels)
        histogram = self._histograms.get(cell)
        if histogram is None:
            histogram = BufferedHistogram(self._words, self._floats, cell, family.buckets, self._observed)
            self._histograms[cell] = histogram
        return histogram

    def flush(self) -> None:
        """Write what is buffered; its process calls this several times a second."""
        for counter in self._changed:
            counter.flush()
        self._changed.clear()
        for histogram in self._observed:
            histogram.flush()
        self._observed.clear()

    def __repr__(self) -> str:
        return f"MetricRow({len(self._cells)} series, {self._words[layout.OWNERS]} owners)"

    def _take_over(self) -> None:
        found = self._words[layout.FINGERPRINT]
        if found not in (0, self._catalog.fingerprint):
            raise StartupError("the metric cells were made by another version of meshd; restart meshd whole")
        end = self._words[layout.NAMES_END]
        offset = 0
        while offset < end:
            number, key, cell, offset = layout.unpack_record(self._names, offset)
            family = self._catalog.families[number]
            values = tuple(orjson.loads(key))
            self._remember(family, number, values, cell)
        for (number, _values), cell in self._cells.items():
            if self._catalog.families[number].kind is Kind.GAUGE:
                self._floats[cell] = 0.0
        self._words[layout.OWNERS] += 1
        self._words[layout.FINGERPRINT] = self._catalog.fingerprint

    def _find(self, name: str, kind: Kind, labels: dict[str, str]) -> tuple[int, Family]:
        family = self._catalog.by_name[name]
        if family.kind is not kind or family.source is not Source.ROW or len(labels) != len(family.labels):
            raise ValueError(f"{name} is a {family.kind} with labels {family.label_names}")
        number = self._catalog.numbers[name]
        values = tuple(self._admit(label, labels[label.name]) for label in family.labels)
        cell = self._cells.get((number, values))
        if cell is None:
            cell = self._intern(family, number, values)
        return cell, family

    def _admit(self, label: Label, value: str) -> str:
        if label.values is not None:
            if value in label.values:
                return value
            if label.fallback is None:
                raise ValueError(f"{value!r} is no value of label {label.name}")
            return label.fallback
        seen = self._seen.get(label.name, ())
        if value in seen or value == OTHER:
            return value
        value = value.encode("utf-8", "replace").decode()
        is_short = len(value.encode()) <= MAX_VALUE_BYTES
        return value if is_short and len(seen) < label.limit else OTHER

    def _intern(self, family: Family, number: int, values: tuple[str, ...]) -> int:
        """Give a new series its cells; O(1), once a series."""
        if self._publish(family, number, values, ORDINARY_NAMES, ORDINARY_CELLS):
            return self._cells[number, values]
        pairs = zip(family.labels, values, strict=True)
        folded = tuple(value if label.values is not None else OTHER for label, value in pairs)
        if (number, folded) in self._cells or self._publish(
            family, number, folded, layout.NAMES_BYTES, layout.CELLS_END - layout.SINK_WORDS
        ):
            return self._cells[number, folded]
        return layout.CELLS_END - layout.SINK_WORDS

    def _publish(
        self, family: Family, number: int, values: tuple[str, ...], names_limit: int, cells_limit: int
    ) -> bool:
        cell = self._cells_end
        record = layout.pack_record(number, orjson.dumps(values), cell)
        offset = self._words[layout.NAMES_END]
        end = offset + len(record)
        if end > names_limit or cell + family.cell_words > cells_limit:
            return False
        self._names[offset:end] = record
        self._words[layout.NAMES_END] = end
        self._remember(family, number, values, cell)
        return True

    def _remember(self, family: Family, number: int, values: tuple[str, ...], cell: int) -> None:
        self._cells[number, values] = cell
        self._cells_end = max(self._cells_end, cell + family.cell_words)
        for label, value in zip(family.labels, values, strict=True):
            if label.values is None and value != OTHER:
                self._seen.setdefault(label.name, set()).add(value)
