"""Write ``docs/metrics.md`` from the catalog: ``python -m meshd.metrics.document > docs/metrics.md``."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from meshd.metrics.catalog import BUCKETS_D, BUCKETS_F, build_catalog
from meshd.metrics.family import Catalog, Family, Kind, Label

HEAD = """# Metrics

Generated from `meshd/metrics/catalog.py`; do not edit: `python -m meshd.metrics.document > docs/metrics.md`.

`GET /metrics` on the metrics port answers in the Prometheus text format. Every process counts in cells of
its own; a scrape sums them and waits for nobody. Counters and histograms never go back when a process dies;
gauges of a dead process become 0 within a second. Series of closed labels are there from start.

| name | type | labels | meaning |
|---|---|---|---|
"""


def metrics_page(catalog: Catalog) -> str:
    """Return the whole page."""
    rows = "".join(_row(family) for family in catalog.families)
    return f"{HEAD}{rows}\n## Buckets\n\n{_buckets()}\n## Labels\n\n{''.join(_labels(catalog))}"


def _row(family: Family) -> str:
    kind = "counter" if family.kind is Kind.FLOAT_COUNTER else str(family.kind)
    if family.kind is Kind.HISTOGRAM:
        kind += " F" if family.buckets == BUCKETS_F else " D"
    labels = ", ".join(family.label_names) or "–"
    return f"| `{family.name}` | {kind} | {labels} | {family.help} |\n"


def _buckets() -> str:
    bounds_d, bounds_f = (" ".join(f"{bound:g}" for bound in bounds) for bounds in (BUCKETS_D, BUCKETS_F))
    return f"- D: {bounds_d}, or `--prometheus-duration-buckets`\n- F: {bounds_f}\n"


def _labels(catalog: Catalog) -> Iterator[str]:
    yield "| label | of | values |\n|---|---|---|\n"
    users: dict[Label, list[str]] = {}
    for family in catalog.families:
        for label in family.labels:
            users.setdefault(label, []).append(f"`{family.name}`")
    for label, names in sorted(users.items(), key=lambda item: item[0].name):
        of = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
        yield f"| `{label.name}` | {of} | {_values(label)} |\n"


def _values(label: Label) -> str:
    if label.values is None:
        return f"{label.note}; at most {label.limit} since start, later ones `other`"
    return label.note or " ".join(f"`{value}`" for value in label.values)


if __name__ == "__main__":
    sys.stdout.write(metrics_page(build_catalog()))
