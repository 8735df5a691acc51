"""The bytes of a row: records and cells."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from meshd.metrics import layout
from meshd.metrics.catalog import build_catalog

records = st.lists(
    st.tuples(st.integers(0, 65535), st.binary(max_size=600), st.integers(0, 2**32 - 1)), max_size=20
)


@given(records)
def test_records_written_one_after_the_other_read_back_equal(wanted: list[tuple[int, bytes, int]]) -> None:
    names = b"".join(layout.pack_record(number, key, cell) for number, key, cell in wanted)
    found, offset = [], 0
    while offset < len(names):
        number, key, cell, offset = layout.unpack_record(names, offset)
        assert offset % layout.WORD == 0
        found.append((number, key, cell))
    assert found == wanted


def test_cells_of_preset_series_do_not_overlap() -> None:
    catalog = build_catalog()
    preset = layout.PresetCells(catalog)
    used = set()
    for (number, _values), cell in preset.first.items():
        words = set(range(cell, cell + catalog.families[number].cell_words))
        assert not words & used
        used |= words
    assert min(used) == layout.FIRST_CELL
    assert max(used) == preset.end - 1


def test_histogram_is_counts_and_then_one_float() -> None:
    family = build_catalog().by_name["mesh_admission_wait_seconds"]
    kinds = [layout.is_integer(family, word) for word in range(family.cell_words)]
    assert kinds == [True] * (len(family.buckets) + 1) + [False]
