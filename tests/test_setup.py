"""What mypyc would compile wrongly without a word. Holds for the sources as for the compiled build."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from enum import Enum
from pathlib import Path

import pytest

import meshd

ROOT = Path(meshd.__file__).parents[1]


@pytest.fixture(scope="module")
def compiled() -> frozenset[str]:
    """The names of the modules that a compiled build compiles."""
    setup = importlib.import_module("setup")
    return frozenset(path.removesuffix(".py").replace("/", ".") for path in setup.modules(ROOT))


def classes() -> Iterator[type]:
    for found in pkgutil.walk_packages(meshd.__path__, "meshd."):
        if not found.name.endswith("__main__"):
            module = importlib.import_module(found.name)
            for value in vars(module).values():
                if isinstance(value, type) and value.__module__ == found.name:
                    yield value


def test_every_pattern_stands_for_modules(compiled: frozenset[str]) -> None:
    setup = importlib.import_module("setup")
    assert all(any((ROOT / "meshd").glob(pattern)) for pattern in setup.HOT)
    assert "meshd.io.exchange" in compiled and "meshd.io.process" not in compiled


def test_class_that_is_not_compiled_has_no_compiled_base(compiled: frozenset[str]) -> None:
    """Its instances would be refused wherever the base is expected."""
    refused = [
        (cls, base)
        for cls in classes()
        for base in cls.__mro__[1:]
        if base.__module__ in compiled and cls.__module__ not in compiled
    ]
    assert refused == []


def test_compiled_class_has_no_foreign_base_with_fields(compiled: frozenset[str]) -> None:
    """mypyc puts its table of methods where the fields of such a base are; those below it knows."""
    broken = [
        (cls, base)
        for cls in classes()
        for base in cls.__mro__[1:]
        if cls.__module__ in compiled
        and not base.__module__.startswith("meshd")
        and base.__basicsize__ != object.__basicsize__
        and not issubclass(base, (BaseException, tuple, Enum))
    ]
    assert broken == []
