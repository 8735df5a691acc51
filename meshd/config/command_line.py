"""The words of a command line, read by the table of settings.

A list takes the words after its flag up to the next one that starts with ``--``, and repeats add up; any
other flag takes one word, and the last of several wins. ``--x=value`` gives exactly one value. Booleans
are written ``--x``, ``--x=false`` or ``--no-x``. After a faulty flag its words are skipped, so that one
mistake is one line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from meshd.config.declaration import Kind, Setting
from meshd.config.names import unknown
from meshd.config.unsupported import reason_unsupported
from meshd.config.values import from_text, from_words

#: Flags that are no settings: what they do, in the order of help.
SPECIAL_FLAGS: Final[Mapping[str, str]] = {
    "config": "TOML file with settings; also MESHD_CONFIG.",
    "print-config": "Print every setting with its source, and start nothing.",
    "version": "Print the version.",
    "help": "Print this.",
}


@dataclass(slots=True)
class CommandLine:
    """What the words said: checked values by setting, the file, the special flags that were asked."""

    values: dict[str, Any] = field(default_factory=dict)
    config_path: str | None = None
    asked: set[str] = field(default_factory=set)
    errors: list[str] = field(default_factory=list)
    failed: set[str] = field(default_factory=set)  # settings whose value was refused


class CommandLineReader:
    """Reads one command line; ``by_name`` maps names and aliases (``some-name``) to settings."""

    def __init__(self, by_name: Mapping[str, Setting]) -> None:
        self._by_name = by_name
        self._lists: dict[str, tuple[Setting, list[str]]] = {}

    def read(self, argv: Sequence[str]) -> CommandLine:
        """Read all words; faults are collected in the result, none is raised."""
        line = CommandLine()
        words = list(argv)
        while words:
            self._read_flag(words, line)
        for setting, items in self._lists.values():
            if items:
                self._store(line, setting, items)
        return line

    def _read_flag(self, words: list[str], line: CommandLine) -> None:
        word = words.pop(0)
        if word == "-h":
            word = "--help"
        if not word.startswith("--") or word == "--":
            line.errors.append(f"unexpected word {word!r}")
            return
        name, has_value, text = word[2:].partition("=")
        value = text if has_value else None
        if name in SPECIAL_FLAGS:
            self._read_special(name, value, words, line)
        elif name in self._by_name:
            self._read_setting(self._by_name[name], f"--{name}", value, words, line)
        elif name.startswith("no-") and self._is_boolean(name[3:]):
            line.values[self._by_name[name[3:]].name] = False
            if has_value:
                line.errors.append(f"--{name} takes no value")
        else:
            _take_words(words)
            line.errors.append(self._unknown(name))

    def _is_boolean(self, name: str) -> bool:
        return name in self._by_name and self._by_name[name].kind is Kind.BOOLEAN

    def _read_special(self, name: str, value: str | None, words: list[str], line: CommandLine) -> None:
        if name == "config":
            line.config_path = value if value is not None else _take_word(words)
            if not line.config_path:
                line.errors.append("--config needs a path")
        elif value is None:
            line.asked.add(name)
        else:
            line.errors.append(f"--{name} takes no value")

    def _read_setting(
        self, setting: Setting, flag: str, value: str | None, words: list[str], line: CommandLine
    ) -> None:
        if setting.kind is Kind.BOOLEAN:
            self._store(line, setting, "true" if value is None else value)
        elif setting.kind.is_list:
            items = [value] if value is not None else _take_words(words)
            if not items:
                line.errors.append(f"{flag} needs at least one value")
                line.failed.add(setting.name)
            self._lists.setdefault(setting.name, (setting, []))[1].extend(items)
        else:
            text = value if value is not None else _take_word(words)
            if text is None:
                line.errors.append(f"{flag} needs a value")
                line.failed.add(setting.name)
            else:
                self._store(line, setting, text)

    def _store(self, line: CommandLine, setting: Setting, given: str | list[str]) -> None:
        try:
            read = from_text(setting, given) if isinstance(given, str) else from_words(setting, given)
        except ValueError as exc:
            line.errors.append(f"{setting.flag}: {exc}")
            line.failed.add(setting.name)
        else:
            line.values[setting.name] = read

    def _unknown(self, name: str) -> str:
        reason = reason_unsupported(name)
        if reason:
            return f"--{name} is not supported by meshd: {reason}"
        known = [*self._by_name, *SPECIAL_FLAGS]
        known += [f"no-{each}" for each in self._by_name if self._is_boolean(each)]
        return unknown("flag", name, known, prefix="--")


def _take_word(words: list[str]) -> str | None:
    return words.pop(0) if words and not words[0].startswith("--") else None


def _take_words(words: list[str]) -> list[str]:
    taken = []
    while words and not words[0].startswith("--"):
        taken.append(words.pop(0))
    return taken
