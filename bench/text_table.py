"""Tables in Markdown."""

from __future__ import annotations

from collections.abc import Sequence


def text_table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A pipe in a cell becomes a slash, since it would end the cell."""
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join("| " + " | ".join(cell.replace("|", "/") for cell in row) + " |" for row in rows)
