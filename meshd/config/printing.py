"""The texts of ``--print-config`` and ``--help``."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any, Final

from meshd.config.command_line import SPECIAL_FLAGS
from meshd.config.declaration import Kind, Setting
from meshd.config.settings import SETTINGS
from meshd.config.sources import LoadResult
from meshd.config.values import bounds_text, to_toml

_UNIT_WORDS: Final = {"s": "SECONDS", "ms": "MILLISECONDS", "bytes": "BYTES"}
_INDENT: Final = 8

_EXAMPLES: Final = """\
  meshd --demo 2
        Try it: two bundled servers on this host, requests to port 30000.
  meshd --worker-urls http://10.0.0.1:8000 http://10.0.0.2:8000
        Serve two inference servers.
  meshd --config /etc/meshd/meshd.toml --print-config
        Check a configuration file and show every setting with its source.
"""
_USAGE: Final = """\
Usage: meshd [launch | start] [flags]   run the gateway (the word may be left out)
       meshd backend [flags]            run the bundled inference server
       meshd ps                         show the processes of the running gateway
"""
_PLACES: Final = (
    "A flag --some-name is also the variable MESHD_SOME_NAME and the key some_name of the file;"
    " a flag wins over the variable, the variable over the file. A list takes several words, and may be"
    " repeated. Switches: --name, --name=false or --no-name. In brackets: the default."
)


def config_text(result: LoadResult, derived: Mapping[str, Any]) -> str:
    """Return one line for each setting, ``name = value  # source``; a TOML file by itself.

    ``derived``: values that this host gives to settings which leave it to the host.
    """
    lines = []
    for setting in SETTINGS:
        name = setting.name
        held = derived.get(name, getattr(result.settings, name))
        value = to_toml(dict(held) if setting.kind is Kind.PAIRS else held, setting.is_secret)
        lines.append(f"{name} = {value}  # {'derived' if name in derived else result.sources[name]}\n")
    return "".join(lines)


def help_text(version: str, width: int) -> str:
    """Return the help, wrapped to ``width`` columns."""
    width = max(40, width)
    parts = [f"meshd {version}: request front end for LLM inference servers\n", _EXAMPLES, _USAGE]
    parts.append(textwrap.fill(_PLACES, width) + "\n")
    for section, settings in sections():
        entries = [_entry(each, width) for each in settings if each.has_flag]
        parts.append(f"{section}\n{''.join(entries)}")
    parts.append(
        "Other\n" + "".join(_item(_special_head(name), text, width) for name, text in SPECIAL_FLAGS.items())
    )
    return "\n".join(parts)


def sections() -> Iterator[tuple[str, list[Setting]]]:
    """Yield each section with its settings, in order of declaration."""
    for section, settings in groupby(SETTINGS, key=lambda each: each.section):
        yield section, list(settings)


def default_text(setting: Setting) -> str:
    """Say the default for a reader; empty if there is none."""
    if setting.default_text:
        return setting.default_text
    if setting.kind is Kind.BOOLEAN:
        return "on" if setting.default else "off"
    if setting.kind is Kind.PAIRS:
        return " ".join(f"{name}={text}" for name, text in setting.default)
    if setting.kind.is_list:
        return " ".join(_plain(item) for item in setting.default)
    if setting.name == "demo" or setting.kind is Kind.TABLES:
        return ""
    return _plain(setting.default)


def details_text(setting: Setting) -> str:
    """Say choices, or bounds with the unit; empty if there are none."""
    if setting.choices:
        return ", ".join(setting.choices)
    return " ".join(part for part in (setting.unit, bounds_text(setting)) if part)


def _plain(value: Any) -> str:
    return f"{value:.15g}" if isinstance(value, float) else str(value)


def _entry(setting: Setting, width: int) -> str:
    text = setting.help
    if setting.choices:
        text += f" One of: {', '.join(setting.choices)}."
    if setting.aliases:
        text += f" Also {', '.join('--' + alias for alias in setting.aliases)}."
    default = default_text(setting)
    if default:
        text += f" [{default}]"
    return _item(f"{setting.flag} {_metavar(setting)}".rstrip(), text, width)


def _metavar(setting: Setting) -> str:
    if setting.kind is Kind.BOOLEAN:
        return ""
    number = _UNIT_WORDS.get(setting.unit, "N")
    name = setting.metavar or ("CHOICE" if setting.choices else number)
    return f"{name} …" if setting.kind.is_list else name


def _special_head(name: str) -> str:
    return f"--{name} FILE" if name == "config" else f"--{name}"


def _item(head: str, text: str, width: int) -> str:
    indent = " " * _INDENT
    body = textwrap.fill(text, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
    return f"  {head}\n{body}\n"
