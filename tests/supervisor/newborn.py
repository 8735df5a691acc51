"""A child that begins in ``meshd.birth``: ``RECORD --manifest-fd N``, otherwise as ``fake_child.py``."""

from __future__ import annotations

from collections.abc import Sequence

from tests.supervisor import fake_child


def main(argv: Sequence[str]) -> int:
    record, *rest = argv
    return fake_child.main("serve", record, list(rest))
