"""Merge the Prometheus texts of several inference servers into one.

Text format 0.0.4. Samples keep their text; names lose their colons, and each sample gets the label
``worker_addr``. It is read line by line with one expression: the parser of prometheus_client takes some 40 µs
a line, and a fleet has a million lines. A text with one wrong line is no Prometheus text and is left out as a
whole, with a comment; so is a family that two servers declare differently.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Final

_LABEL: Final = r'[a-zA-Z_][a-zA-Z0-9_]*\s*=\s*"(?:[^"\\]|\\.)*"'
_SAMPLE: Final = re.compile(
    rf"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:[ \t]*\{{[ \t]*((?:{_LABEL}[ \t]*(?:,[ \t]*|(?=\}})))*)\}}[ \t]*|[ \t]+)"
    r"([-+0-9.a-zA-Z]+)([ \t]+-?[0-9]+)?"
)
_METADATA: Final = re.compile(r"#[ \t]+(HELP|TYPE)[ \t]+([a-zA-Z_:][a-zA-Z0-9_:]*)(?:[ \t]+(.*))?")
_LABELS: Final = re.compile(_LABEL)
_KINDS: Final = ("counter", "gauge", "histogram", "summary")
_UNTYPED: Final = "untyped"
_SUFFIXES: Final = {"histogram": ("_bucket", "_sum", "_count"), "summary": ("_sum", "_count")}


class NotMetrics(ValueError):
    """A text is not in the Prometheus text format."""


@dataclass(slots=True)
class _Family:
    """``series``: name and labels → value and timestamp; the first of equal ones counts."""

    help: str = ""
    kinds: set[str] = field(default_factory=set)
    series: dict[str, str] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        return next(iter(self.kinds), _UNTYPED)


@dataclass(slots=True)
class _Text:
    """One server's text, read: metadata, and samples as name, labels, value."""

    helps: dict[str, str] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)
    samples: list[tuple[str, str, str]] = field(default_factory=list)


def merge(texts: MutableMapping[str, bytes], failures: Mapping[str, str]) -> tuple[bytes, int]:
    """Return the merged text and how many of ``texts``, by URL, are in it; ``failures`` become comments.

    ``texts`` is empty in the end: what has been read is let go of, for its parts take several times as much.
    """
    left_out = dict(failures)
    read: dict[str, _Text] = {}
    for url in list(texts):
        try:
            read[url] = _read(texts.pop(url))
        except NotMetrics as fault:
            left_out[url] = str(fault)
    count = len(read)
    merged = bytearray()
    for url, reason in left_out.items():
        merged += f"# left out: worker {url}: {_one_line(reason)}\n".encode()
    families = _families(read)
    for name in list(families):
        merged += "".join(f"{line}\n" for line in _lines(name, families.pop(name))).encode()
    return bytes(merged), count


def _read(text: bytes) -> _Text:
    """Raises ``NotMetrics``."""
    found = _Text()
    try:
        lines = text.decode().split("\n")
    except UnicodeDecodeError as fault:
        raise NotMetrics("its metrics are not UTF-8") from fault
    for number, line in enumerate(lines, 1):
        line = line.strip()
        if line.startswith("#"):
            _read_metadata(line, found)
        elif line:
            match = _SAMPLE.fullmatch(line)
            if match is None or not _is_number(match[3]):
                raise NotMetrics(f"line {number} of its metrics is not a sample")
            found.samples.append((_name(match[1]), match[2] or "", match[3] + (match[4] or "")))
    return found


def _read_metadata(line: str, found: _Text) -> None:
    match = _METADATA.fullmatch(line)
    if match is None:
        return
    name, rest = _name(match[2]), match[3] or ""
    if match[1] == "HELP":
        found.helps.setdefault(name, rest)
    else:
        found.kinds.setdefault(name, rest if rest in _KINDS else _UNTYPED)


def _families(texts: dict[str, _Text]) -> dict[str, _Family]:
    """Gather the samples of all by family; ``texts`` is empty in the end."""
    families: dict[str, _Family] = {}
    for text in texts.values():
        for name, help_text in text.helps.items():
            family = families.setdefault(name, _Family())
            family.help = family.help or help_text
        for name, kind in text.kinds.items():
            families.setdefault(name, _Family()).kinds.add(kind)
    bases = {
        name + suffix: family
        for name, family in families.items()
        for kind in family.kinds
        for suffix in _SUFFIXES.get(kind, ())
    }
    for url in list(texts):
        address = f'worker_addr="{url}"'
        for name, labels, value in texts.pop(url).samples:
            family = bases.get(name) or families.setdefault(name, _Family())
            if "worker_addr" in labels:
                labels = ",".join(_renamed(label) for label in _LABELS.findall(labels))
            inside = f"{address},{labels}".rstrip(", \t")
            family.series.setdefault(f"{name}{{{inside}}}", value)
    return families


def _lines(name: str, family: _Family) -> Iterator[str]:
    if len(family.kinds) > 1:
        yield f"# left out: family {name}: its types disagree: {', '.join(sorted(family.kinds))}"
    elif family.series:
        yield from _metadata(name, family)
        for series, value in family.series.items():
            yield f"{series} {value}"


def _metadata(name: str, family: _Family) -> Iterable[str]:
    if family.help:
        yield f"# HELP {name} {family.help}"
    yield f"# TYPE {name} {family.kind}"


def _renamed(label: str) -> str:
    """Keep a label that has the name of ours under another one, as Prometheus does."""
    name, equals, value = label.partition("=")
    return f"exported_{label}" if name.strip() == "worker_addr" else name + equals + value


def _name(name: str) -> str:
    return name.replace(":", "_")


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _one_line(text: str) -> str:
    return " ".join(text.split())
