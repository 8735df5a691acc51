"""From a written value to a checked one, and from a value to TOML."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from typing import Any, Final

from meshd.config.declaration import MAX_INTEGER, MAX_NUMBER, Kind, Setting
from meshd.config.workers import WorkerSpec, read_worker

_TRUE: Final = frozenset(("1", "true", "yes", "on"))
_FALSE: Final = frozenset(("0", "false", "no", "off"))
_DIGITS: Final = r"[0-9]+(?:_[0-9]+)*"
_INTEGER: Final = re.compile(rf"[+-]?{_DIGITS}")
_NUMBER: Final = re.compile(rf"[+-]?(?:{_DIGITS}(?:\.(?:{_DIGITS})?)?|\.{_DIGITS})(?:[eE][+-]?[0-9]+)?")
_BARE_KEY: Final = re.compile(r"[A-Za-z0-9_-]+")


def from_text(setting: Setting, text: str) -> Any:
    """Read one flag value or variable, and check it. Raises ``ValueError`` with words."""
    return (
        from_words(setting, text.split())
        if setting.kind.is_list
        else check(setting, _read(setting.kind, text))
    )


def from_words(setting: Setting, words: Sequence[str]) -> Any:
    """Read the items of a list given as words, and check it."""
    try:
        return _from_items(setting, words)
    except ValueError as exc:
        if _is_parted_by_commas(setting, words):
            raise ValueError(f"separate {_plural(setting)} by spaces, not commas") from exc
        raise


def _from_items(setting: Setting, words: Sequence[str]) -> Any:
    if setting.kind is Kind.PAIRS:
        return check(setting, tuple(_read_pair(word) for word in words))
    kind = Kind.NUMBER if setting.kind is Kind.NUMBERS else Kind.TEXT
    return check(setting, tuple(_read(kind, word) for word in words))


def _read_pair(word: str) -> tuple[str, str]:
    name, has_value, text = _read(Kind.TEXT, word).partition("=")
    if not has_value:
        raise ValueError(f"{word!r} is not written name=value")
    return name, text


def _is_parted_by_commas(setting: Setting, words: Sequence[str]) -> bool:
    items = ",".join(words).split(",")
    try:
        _from_items(setting, [item for item in items if item])
    except ValueError:
        return False
    return len(items) > len(words)


def _plural(setting: Setting) -> str:
    return "URLs" if setting.metavar == "URL" else f"{setting.metavar or 'number'}s".lower()


def from_file(setting: Setting, value: object) -> Any:
    """Take a value that the TOML parser made, and check it."""
    return check(setting, _convert(setting.kind, value))


def check(setting: Setting, value: Any) -> Any:
    """Hold a value of the right type against bounds, choices and the setting's own check."""
    if setting.kind is Kind.NUMBERS:
        for item in value:
            _check_bounds(setting, item)
    elif setting.kind in (Kind.INTEGER, Kind.NUMBER):
        _check_bounds(setting, value)
    elif setting.choices:
        value = dict(setting.choice_aliases).get(value, value)
        if value not in setting.choices and value != setting.default:  # which may stand for "derive it"
            near = dict(setting.choice_hints).get(value)
            hint = f"; the nearest to it is {near}" if near else ""
            raise ValueError(f"{value!r} is not one of {', '.join(setting.choices)}{hint}")
    return setting.check(value) if setting.check else value


def bounds_text(setting: Setting) -> str:
    """Say the declared bounds, such as ``0 to 65535``, ``above 0`` or nothing."""
    if setting.above is not None:
        return f"above {setting.above:g}"
    if setting.minimum is not None and setting.maximum is not None:
        return f"{setting.minimum:g} to {setting.maximum:g}"
    return "" if setting.minimum is None else f"at least {setting.minimum:g}"


def _read(kind: Kind, text: str) -> Any:
    try:
        text.encode()
    except UnicodeEncodeError as exc:
        raise ValueError("is not UTF-8") from exc
    if kind is Kind.BOOLEAN:
        return _read_boolean(text)
    if kind is Kind.INTEGER:
        if not _INTEGER.fullmatch(text):
            raise ValueError(f"{text!r} is not a whole number")
        return int(text)
    if kind is Kind.NUMBER:
        if not _NUMBER.fullmatch(text):
            raise ValueError(f"{text!r} is not a number")
        return float(text)
    return text


def _read_boolean(text: str) -> bool:
    word = text.lower()
    if word in _TRUE:
        return True
    if word in _FALSE:
        return False
    raise ValueError(f"{text!r} is not true or false")


def _convert(kind: Kind, value: object) -> Any:
    if kind is Kind.TABLES:
        return _read_tables(value)
    if kind is Kind.PAIRS:
        return _convert_pairs(value)
    if kind.is_list:
        if not isinstance(value, list):
            raise ValueError("must be an array")
        return tuple(_convert(Kind.NUMBER if kind is Kind.NUMBERS else Kind.TEXT, item) for item in value)
    if kind is Kind.BOOLEAN:
        return _typed(value, bool, "true or false")
    if kind is Kind.TEXT:
        return _typed(value, str, "a string")
    if isinstance(value, bool):
        raise ValueError(f"must be a {kind}")
    if kind is Kind.INTEGER:
        return _typed(value, int, "a whole number")
    number = float(_typed(value, (int, float), "a number"))
    if not math.isfinite(number):
        raise ValueError("must be a finite number")
    return number


def _convert_pairs(value: object) -> tuple[tuple[str, str], ...]:
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise ValueError("must be a table of strings")
    return tuple(value.items())


def _typed(value: object, types: type | tuple[type, ...], words: str) -> Any:
    if not isinstance(value, types):
        raise ValueError(f"must be {words}")
    return value


def _read_tables(value: object) -> tuple[WorkerSpec, ...]:
    if not isinstance(value, list):
        raise ValueError("must be tables, each written [[workers]]")
    specs = []
    for position, table in enumerate(value, start=1):
        try:
            specs.append(read_worker(table))
        except ValueError as exc:
            raise ValueError(f"table {position}: {exc}") from exc
    return tuple(specs)


def _check_bounds(setting: Setting, value: float) -> None:
    largest = MAX_INTEGER if setting.kind is Kind.INTEGER else MAX_NUMBER
    is_low = (setting.above is not None and value <= setting.above) or (
        setting.minimum is not None and value < setting.minimum
    )
    if is_low or (setting.maximum is not None and value > setting.maximum):
        raise ValueError(f"{value:.15g} is out of bounds: {bounds_text(setting)}")
    if abs(value) > largest:
        raise ValueError(f"{value:.15g} is too large: at most {largest:.15g}")


def to_toml(value: Any, is_secret: bool = False) -> str:
    """Write a value as TOML on one line; a secret that is set becomes ``"***"``."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        return _quoted("***" if is_secret and value else value)
    if isinstance(value, WorkerSpec):
        members = {name: member for name, member in value.to_dict().items() if member is not None}
        members["api_key"] = "***" if value.api_key else ""
        return to_toml(members)
    if isinstance(value, dict):
        inside = ", ".join(f"{_key(name)} = {to_toml(item)}" for name, item in value.items())
        return f"{{ {inside} }}" if inside else "{}"
    return "[" + ", ".join(to_toml(item, is_secret) for item in value) + "]"


def _quoted(text: str) -> str:
    # JSON strings are TOML basic strings, except that TOML wants DEL escaped too.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _key(name: str) -> str:
    return name if _BARE_KEY.fullmatch(name) else _quoted(name)
