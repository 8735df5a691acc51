from __future__ import annotations

from dataclasses import dataclass

import pytest

from meshd.config.declaration import Kind, declared_settings, setting


@dataclass(frozen=True)
class _Few:
    is_on: bool = setting(False, section="A", help="h", takes_effect="live")
    size_secs: float = setting(1.5, section="A", help="h", takes_effect="live", unit="s")
    names: tuple[str, ...] = setting((), section="B", help="h", takes_effect="restart")
    bounds: tuple[float, ...] = setting((1.0,), section="B", help="h", takes_effect="restart")
    labels: tuple[tuple[str, str], ...] = setting((), section="B", help="h", takes_effect="restart")


def test_name_kind_and_default_come_from_the_attribute() -> None:
    found = [(each.name, each.kind, each.default) for each in declared_settings(_Few)]
    assert found == [
        ("is_on", Kind.BOOLEAN, False),
        ("size_secs", Kind.NUMBER, 1.5),
        ("names", Kind.LIST, ()),
        ("bounds", Kind.NUMBERS, (1.0,)),
        ("labels", Kind.PAIRS, ()),
    ]


def test_flag_and_variable_derive_from_the_name() -> None:
    each = declared_settings(_Few)[1]
    assert (each.flag, each.variable) == ("--size-secs", "MESHD_SIZE_SECS")


def test_a_setting_without_a_section_cannot_be_declared() -> None:
    with pytest.raises(TypeError):
        setting(1, help="h", takes_effect="live")  # type: ignore[call-arg]
