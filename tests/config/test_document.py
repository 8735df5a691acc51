from __future__ import annotations

from pathlib import Path

from meshd.config.document import document_text

_PAGE = Path(__file__).parents[2] / "docs" / "settings.md"


def test_the_page_of_settings_is_up_to_date() -> None:
    assert _PAGE.read_text() == document_text(), "run: python -m meshd.config.document > docs/settings.md"


def test_every_row_of_a_table_has_as_many_cells_as_its_head() -> None:
    width = 0
    for line in document_text().splitlines():
        if line.startswith("|"):
            width = width or line.count("|")
            assert line.count("|") == width, line
        else:
            width = 0
