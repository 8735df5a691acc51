"""What a long run has measured so far: one file of JSON lines, appended round by round, read to go on.

The first line tells under which conditions the rounds were taken; a run under other conditions must not add
to them. A line that a crash left unfinished is cut off.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench import BenchError
from bench.rounds import Round, round_from


@dataclass(frozen=True, slots=True)
class Entry:
    """The round of that number of a front end at a point. ``why_absent``: it could not be measured at all."""

    point: str
    front_end: str
    number: int
    round: Round | None
    why_absent: str = ""


class State:
    """The file. ``conditions`` must be what JSON gives back: only text, numbers, lists and dicts."""

    def __init__(self, path: Path, conditions: Mapping[str, Any], machine: Mapping[str, Any]) -> None:
        self._path = path
        self.machine = dict(machine)
        self.entries: list[Entry] = []
        if path.exists() and path.stat().st_size:
            kept = read(path)
            if differing := differences(kept.conditions, conditions):
                raise BenchError(
                    f"{path} was made under other conditions ({', '.join(differing)}); "
                    "give --restart to measure anew, or --state another file"
                )
            self.machine, self.entries = kept.machine, kept.entries
            _cut_unfinished_line(path)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            head = {"conditions": conditions, "machine": machine}
            path.write_text(json.dumps(head, ensure_ascii=False) + "\n")
        self._done = {(one.point, one.front_end, one.number) for one in self.entries}

    def has(self, point: str, front_end: str, number: int) -> bool:
        return (point, front_end, number) in self._done

    def add(self, entry: Entry) -> None:
        """Keep it, on disk first."""
        with self._path.open("a") as file:
            file.write(json.dumps(asdict(entry), ensure_ascii=False) + "\n")
        self.entries.append(entry)
        self._done.add((entry.point, entry.front_end, entry.number))


@dataclass(frozen=True, slots=True)
class Kept:
    """All that a state file says."""

    conditions: dict[str, Any]
    machine: dict[str, Any]
    entries: list[Entry]


def read(path: Path) -> Kept:
    """Read a state file; raises `BenchError` when it is none."""
    lines = list(_whole_lines(path))
    try:
        head = json.loads(lines[0])
        entries = [_entry_from(json.loads(line)) for line in lines[1:]]
        return Kept(head["conditions"], head["machine"], entries)
    except (IndexError, KeyError, TypeError, ValueError) as error:
        raise BenchError(f"{path} is no state of `python -m bench table`: {error}") from error


def write(kept: Kept, path: Path) -> None:
    """As a state file."""
    head = {"conditions": kept.conditions, "machine": kept.machine}
    lines = [head, *(asdict(entry) for entry in kept.entries)]
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))


def merged(files: Sequence[Kept]) -> Kept:
    """All in one. What several have of a front end at a point comes from the first of them.

    Only the length of rounds may differ; raises `BenchError` when other conditions do.
    """
    first = files[0]
    entries = list(first.entries)
    for other in files[1:]:
        if differing := [
            name for name in differences(first.conditions, other.conditions) if name != "seconds"
        ]:
            raise BenchError(f"made under different conditions ({', '.join(differing)}): no common report")
        have = {(one.point, one.front_end) for one in entries}
        entries += [one for one in other.entries if (one.point, one.front_end) not in have]
    seconds = sorted({one.conditions["seconds"] for one in files} - {first.conditions["seconds"]})
    conditions = {**first.conditions, **({"other_seconds": seconds} if seconds else {})}
    return Kept(conditions, first.machine, entries)


def differences(kept: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """The names of the conditions that differ."""
    return sorted(name for name in {*kept, *wanted} if kept.get(name) != wanted.get(name))


def _entry_from(found: Mapping[str, Any]) -> Entry:
    done = round_from(found["round"]) if found["round"] else None
    return Entry(found["point"], found["front_end"], found["number"], done, found["why_absent"])


def _whole_lines(path: Path) -> Iterator[str]:
    text = path.read_text()
    yield from text[: text.rfind("\n") + 1].splitlines()


def _cut_unfinished_line(path: Path) -> None:
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        path.write_bytes(whole)
