"""The declarations themselves, and the page that is generated from them."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshd.errors import CODES
from meshd.metrics.catalog import BUCKETS_D, MEANING_CODES, PREPARE_CODES, build_catalog
from meshd.metrics.document import metrics_page
from meshd.metrics.family import Catalog, Family, Kind


def test_names_follow_the_conventions_of_their_kind() -> None:
    for family in build_catalog().families:
        assert family.name.startswith("mesh_")
        assert family.name.endswith("_total") == (family.kind in (Kind.COUNTER, Kind.FLOAT_COUNTER))
        assert (family.kind is Kind.HISTOGRAM) == bool(family.buckets)
        assert family.help.endswith(".")


def test_reasons_of_preparation_are_codes_of_meshd() -> None:
    assert set(MEANING_CODES.split()) | set(PREPARE_CODES.split()) <= set(CODES)


def test_duration_buckets_replace_those_of_durations_and_no_others() -> None:
    catalog = build_catalog([1.0, 2.0])
    assert catalog.by_name["mesh_router_ttft_seconds"].buckets == (1.0, 2.0)
    assert catalog.by_name["mesh_admission_wait_seconds"].buckets != (1.0, 2.0)
    assert build_catalog().by_name["mesh_router_ttft_seconds"].buckets == BUCKETS_D


@pytest.mark.parametrize("bounds", [[2.0, 1.0], [1.0, 1.0], [0.0, 1.0]])
def test_duration_buckets_out_of_order_are_refused(bounds: list[float]) -> None:
    with pytest.raises(ValueError, match="ascending"):
        build_catalog(bounds)


def test_catalogs_with_other_cells_have_other_fingerprints() -> None:
    assert build_catalog().fingerprint == build_catalog().fingerprint
    assert build_catalog().fingerprint != build_catalog([1.0]).fingerprint


def test_family_declared_twice_is_refused() -> None:
    family = Family("mesh_x", Kind.GAUGE, "X.")
    with pytest.raises(ValueError, match="twice"):
        Catalog([family, family])


def test_page_of_metrics_is_up_to_date() -> None:
    page = Path(__file__).parents[2] / "docs" / "metrics.md"
    assert page.read_text() == metrics_page(build_catalog()), "run: python -m meshd.metrics.document"
