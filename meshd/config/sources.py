"""Where settings come from: flag over environment over file over default, and every fault at once."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final

from meshd.config.command_line import CommandLineReader
from meshd.config.declaration import Setting
from meshd.config.errors import ConfigErrors
from meshd.config.names import unknown
from meshd.config.rules import broken_rules, warnings_of
from meshd.config.settings import SETTINGS, Settings
from meshd.config.unsupported import reason_unsupported
from meshd.config.values import from_file, from_text

_PREFIX: Final = "MESHD_"
_FILE_VARIABLE: Final = "MESHD_CONFIG"
# Kubernetes sets these in every pod beside a service called meshd.
_SERVICE_VARIABLE: Final = re.compile(r"MESHD_(SERVICE|PORT)_.+")


class Action(Enum):
    """What the command line asks for."""

    RUN = "run"
    PRINT_CONFIG = "print-config"
    HELP = "help"
    VERSION = "version"


@dataclass(frozen=True, slots=True)
class LoadResult:
    """The settings; for each name its source (flag, env, file, default); the file, if there was one."""

    settings: Settings
    sources: Mapping[str, str]
    action: Action
    config_path: str | None = None
    warnings: tuple[str, ...] = ()

    @property
    def wants_print_config(self) -> bool:
        return self.action is Action.PRINT_CONFIG


@dataclass(slots=True)
class _Place:
    """What one place gave."""

    values: dict[str, Any] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    failed: set[str] = field(default_factory=set)


def load_settings(argv: Sequence[str], environ: Mapping[str, str]) -> LoadResult:
    """Read all places for a command line without its program name and command word.

    Raises ``ConfigErrors`` with every fault found; help and version are granted despite faults.
    """
    by_name = {name: each for each in SETTINGS for name in _names(each)}
    flags = CommandLineReader({name: each for name, each in by_name.items() if each.has_flag}).read(argv)
    for action in (Action.HELP, Action.VERSION):
        if action.value in flags.asked:
            return LoadResult(Settings(), {each.name: "default" for each in SETTINGS}, action)
    path = flags.config_path or environ.get(_FILE_VARIABLE) or None
    variables = _read_environment(environ, by_name)
    keys = _read_file(path, by_name) if path else _Place()
    values: dict[str, Any] = {}
    sources = {each.name: "default" for each in SETTINGS}
    for source, given in (("file", keys.values), ("env", variables.values), ("flag", flags.values)):
        values.update(given)
        sources.update(dict.fromkeys(given, source))
    settings = Settings(**values)
    errors = [*flags.errors, *variables.errors, *keys.errors]
    errors += broken_rules(settings, sources, flags.failed | variables.failed | keys.failed)
    if errors:
        raise ConfigErrors(errors)
    action = Action.PRINT_CONFIG if Action.PRINT_CONFIG.value in flags.asked else Action.RUN
    return LoadResult(settings, sources, action, path, tuple(warnings_of(settings, sources)))


def _names(setting: Setting) -> tuple[str, ...]:
    return (setting.name.replace("_", "-"), *setting.aliases)


def _read_environment(environ: Mapping[str, str], by_name: Mapping[str, Setting]) -> _Place:
    place = _Place()
    for variable in sorted(environ):
        if not variable.startswith(_PREFIX) or variable == _FILE_VARIABLE:
            continue
        text = environ[variable]
        name = variable.removeprefix(_PREFIX).lower().replace("_", "-")
        setting = by_name.get(name) if variable.isupper() else None
        if _is_of_kubernetes(variable, text, setting):
            continue
        if setting is None or not setting.has_flag:
            known = [_as_variable(each) for each, found in by_name.items() if found.has_flag]
            place.errors.append(_unknown("variable", variable, name, [*known, _FILE_VARIABLE]))
        else:
            _store(place, setting, variable, from_text, text)
    return place


def _is_of_kubernetes(variable: str, text: str, setting: Setting | None) -> bool:
    if variable == "MESHD_PORT":
        return text.startswith("tcp://")
    return setting is None and _SERVICE_VARIABLE.fullmatch(variable) is not None


def _as_variable(name: str) -> str:
    return _PREFIX + name.upper().replace("-", "_")


def _read_file(path: str, by_name: Mapping[str, Setting]) -> _Place:
    place = _Place()
    try:
        with open(path, "rb") as file:
            table = tomllib.load(file)
    except OSError as failure:
        place.errors.append(f"{path}: cannot be read: {failure.strerror}")
        return place
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
        place.errors.append(f"{path}: is not TOML: {exc}")
        return place
    for key, value in table.items():
        name = key.replace("_", "-")
        setting = by_name.get(name)
        if setting is None:
            known = [each.replace("-", "_") for each in by_name]
            place.errors.append(f"{path}: {_unknown('key', key.replace('-', '_'), name, known)}")
        else:
            _store(place, setting, f"{path}: {key}", from_file, value)
    return place


def _unknown(what: str, written: str, name: str, known: list[str]) -> str:
    reason = reason_unsupported(name)
    return f"{written} is not supported by meshd: {reason}" if reason else unknown(what, written, known)


def _store(
    place: _Place, setting: Setting, label: str, read: Callable[[Setting, Any], Any], given: Any
) -> None:
    if setting.name in place.values or setting.name in place.failed:
        place.errors.append(f"{label}: {setting.name} is given twice")
    try:
        place.values[setting.name] = read(setting, given)
    except ValueError as exc:
        place.errors.append(f"{label}: {exc}")
        place.failed.add(setting.name)
