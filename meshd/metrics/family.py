"""What a metric family is: its name, kind, labels with their bounds, and the cells of one series."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from itertools import product
from typing import Final

OTHER: Final = "other"


class Kind(StrEnum):
    COUNTER = "counter"
    FLOAT_COUNTER = "counter of seconds"  # a counter on the wire; its cell is a float
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Source(StrEnum):
    ROW = "row"
    SCRAPE = "scrape"


@dataclass(frozen=True, slots=True)
class Label:
    """A label and what it may hold.

    ``values``: the closed list, or None for an open label (at most ``limit`` values since start).
    ``fallback``: what stands for a value outside the list or over the limit; None makes such a value a
    programming error. ``is_preset``: series of all values exist from start.
    """

    name: str
    values: tuple[str, ...] | None = None
    fallback: str | None = OTHER
    limit: int = 256
    is_preset: bool = False
    note: str = ""


@dataclass(frozen=True, slots=True)
class Family:
    name: str
    kind: Kind
    help: str
    labels: tuple[Label, ...] = ()
    buckets: tuple[float, ...] = ()
    source: Source = Source.ROW

    @property
    def label_names(self) -> tuple[str, ...]:
        return tuple(label.name for label in self.labels)

    @property
    def is_preset(self) -> bool:
        """All series are known and present, with 0, from start."""
        return all(label.is_preset for label in self.labels)

    def preset_values(self) -> list[tuple[str, ...]]:
        """The label values of each series that exists from start, in the order of the catalog."""
        if not self.is_preset:
            return []
        return list(product(*(label.values or () for label in self.labels)))

    @property
    def cell_words(self) -> int:
        """64-bit words of one series: a histogram has a count a bucket, one for +Inf, and the sum."""
        return len(self.buckets) + 2 if self.kind is Kind.HISTOGRAM else 1


class Catalog:
    """All families by name; a family's number is its place. Equal fingerprints mean equal cell layouts."""

    def __init__(self, families: Iterable[Family]) -> None:
        self.families: tuple[Family, ...] = tuple(families)
        self.by_name = {family.name: family for family in self.families}
        self.numbers = {family.name: number for number, family in enumerate(self.families)}
        if len(self.by_name) != len(self.families):
            raise ValueError("a metric family is declared twice")
        shape = repr([(f.name, f.kind, f.labels, f.buckets, f.source) for f in self.families])
        self.fingerprint = zlib.crc32(shape.encode()) | 1 << 32  # never 0: 0 marks a row nobody owned

    def of_source(self, source: Source) -> list[Family]:
        return [family for family in self.families if family.source is source]
