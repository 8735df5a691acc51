"""The bytes of the segment "metrics": one row of cells a process, written by its owner alone.

::

    segment   0        4096                 4096 + ROW_BYTES
              | header | row 0              | row 1              | …

    row       word 0   fingerprint of the catalog; 0: nobody ever owned the row
              word 1   names_end: published bytes of the name table
              word 2   owners: how many processes have owned the row
              word 8…  cells of the preset series, in the order of the catalog, then cells of the open
                       series in the order in which they appeared
              NAMES_OFFSET…ROW_BYTES  name table: one record an open series

    record    word 0   family number (bits 0–15) | key length in bytes (16–31) | first cell, as a word of the
                       row (32–63)
              word 1…  key: JSON array of the label values, padded to a whole word

    series    counter  one u64 (a counter of seconds: one f64)
              gauge    one f64
              histogram  a u64 count a bucket (not cumulative), one for +Inf, then the f64 sum

The name table only grows. The owner writes a record whole and then stores ``names_end``, one aligned
64-bit store that x86-64 keeps in order, so a reader that stops at ``names_end`` never sees half a record.
A record that was not published when its owner died is overwritten by the next one.

Memory is sparse: a page that nobody touched costs nothing, so rows are sized for the bound, not the use
(256 models times 8 endpoints need about 1.6 MB of cells).
"""

from __future__ import annotations

from typing import Final

from meshd.metrics.family import Catalog, Family, Source

WORD: Final = 8
ROWS_OFFSET: Final = 4096
ROW_BYTES: Final = 2 << 20
NAMES_BYTES: Final = 512 << 10
NAMES_OFFSET: Final = ROW_BYTES - NAMES_BYTES

FINGERPRINT: Final = 0
NAMES_END: Final = 1
OWNERS: Final = 2
FIRST_CELL: Final = 8

CELLS_END: Final = NAMES_OFFSET // WORD
SINK_WORDS: Final = 128
"""The last cells: where a series writes that found no room even under ``other``; never read."""


def segment_size(rows: int) -> int:
    """Bytes of a segment for ``rows`` processes."""
    return ROWS_OFFSET + rows * ROW_BYTES


def row_start(row: int) -> int:
    """Byte offset of a row in its segment."""
    return ROWS_OFFSET + row * ROW_BYTES


class PresetCells:
    """Where the preset series of a catalog live in every row."""

    def __init__(self, catalog: Catalog) -> None:
        self.first: dict[tuple[int, tuple[str, ...]], int] = {}
        cell = FIRST_CELL
        for number, family in enumerate(catalog.families):
            if family.source is not Source.ROW:
                continue
            for values in family.preset_values():
                self.first[number, values] = cell
                cell += family.cell_words
        self.end = cell
        widest = max((family.cell_words for family in catalog.families), default=1)
        if cell > CELLS_END // 2 or widest > SINK_WORDS:
            raise ValueError("the catalog does not fit its rows")


def pack_record(number: int, key: bytes, cell: int) -> bytes:
    """Build the bytes of a record; ``key``: below 64 KiB."""
    word = number | len(key) << 16 | cell << 32
    return word.to_bytes(WORD, "little") + key + bytes(-len(key) % WORD)


def unpack_record(names: memoryview | bytes, offset: int) -> tuple[int, bytes, int, int]:
    """Read the record at ``offset``: family number, key, first cell, offset of the next record."""
    word = int.from_bytes(names[offset : offset + WORD], "little")
    length = word >> 16 & 0xFFFF
    start = offset + WORD
    key = bytes(names[start : start + length])
    return word & 0xFFFF, key, word >> 32, start + length + -length % WORD


def is_integer(family: Family, word: int) -> bool:
    """Tell whether a word of a series of ``family`` is a u64 count; the others are f64."""
    from_end = family.cell_words - 1 - word
    return family.kind == "counter" or (family.kind == "histogram" and from_end > 0)
