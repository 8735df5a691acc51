"""How children begin: alone, and forked from one that has imported for several."""

from __future__ import annotations

import gc
from types import ModuleType

import pytest

from meshd import birth


def test_the_module_is_imported_without_the_collector_and_told_the_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[list[str]] = []
    module = ModuleType("newborn")

    def find(name: str) -> ModuleType:
        assert name == "newborn" and not gc.isenabled()
        return module

    monkeypatch.setattr(module, "main", lambda argv: told.append(argv) or 7, raising=False)
    monkeypatch.setattr(birth, "import_module", find)
    try:
        assert birth.main(["newborn", "--manifest-fd", "9"]) == 7
    finally:
        gc.unfreeze()
    assert told == [["--manifest-fd", "9"]] and gc.isenabled()
