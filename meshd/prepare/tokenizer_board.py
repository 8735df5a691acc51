"""The segment ``tokenizers``: which tokenizers the node should have, and what each leader has made of it.

::

       0  segment header                                                         memory.py
      64  check line: leaders, removals                                          who creates; the controller
     128  engine words, 1024: serial of the copy whose fast engine is off        any prepare worker
    8320  removal words, 1024: serial of the copy that was removed               the controller
   16512  desired: a publication of the entries                                  the controller
      …   reports: a publication for each leader seat                            that leader

An *entry* is a name. A *copy* is one load of one source; it has a serial, which is never used again, and
words at ``serial % 1024``: two copies that live at once cannot meet there unless a thousand loads lie between
them. An entry has a ``current`` copy, which serves, and may have a ``next`` one, which the leaders load::

    next ──all leaders have loaded it──> current ──every worker was forked after that──> "in force"
      └──one of them failed──> forgotten, the current one stays

The controller alone makes these moves; leaders report. What a removed copy is asked for is decided by its
removal word, so it is out of use at once, in workers that still hold it too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final, Literal

from meshd.errors import StartupError
from meshd.memory import HEADER_BYTES, Segment
from meshd.publication import Publication

SEGMENT_KIND: Final = "tokenizers"
MAX_ENTRIES: Final = 256
MAX_TEXT_BYTES: Final = 1024
"""Of a name, a source or a path on the board."""

_SLOTS: Final = 1024
_ENGINES: Final = 2 * HEADER_BYTES
_REMOVALS: Final = _ENGINES + 8 * _SLOTS
_DESIRED: Final = _REMOVALS + 8 * _SLOTS
_DESIRED_BYTES: Final = 8 << 20  # 256 entries with two copies of 2 KiB each, twice; sparse
_REPORT_BYTES: Final = 2 << 20
_MESSAGE_BYTES: Final = 512
_LEADERS_WORD: Final = HEADER_BYTES // 8
_REMOVALS_WORD: Final = _LEADERS_WORD + 1

Origin = Literal["flag", "label", "api"]
Status = Literal["pending", "processing", "completed", "failed"]
LoadState = Literal["loading", "loaded", "failed"]


@dataclass(frozen=True, slots=True)
class Copy:
    """One load of one source. ``chat_template_path``: empty for the tokenizer's own."""

    serial: int
    source: str
    chat_template_path: str = ""
    generation: int = 1


@dataclass(frozen=True, slots=True)
class Entry:
    """A named tokenizer as the controller wants it.

    ``asked_for``: the source of the last load, ``status`` and ``message``: what became of it. ``engine`` and
    ``vocab_size``: of the current copy, once the leaders have told. No ``current`` one: none was ever loaded.
    """

    id: str
    name: str
    asked_for: str
    current: Copy | None
    next: Copy | None = None
    origin: Origin = "api"
    status: Status = "pending"
    message: str = ""
    engine: str = ""
    vocab_size: int = 0

    @property
    def generation(self) -> int:
        """How often the name was loaded, this time included; 0 if that never succeeded."""
        copy = self.next or self.current
        return 0 if copy is None else copy.generation

    @property
    def source(self) -> str:
        """Where what serves comes from, or what is to serve first."""
        return self.asked_for if self.current is None else self.current.source

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> Entry:
        current, following = row["current"], row["next"]
        copies = {"current": current and Copy(**current), "next": following and Copy(**following)}
        return cls(**{**row, **copies})


@dataclass(frozen=True, slots=True)
class Desired:
    """All entries, in order of registration.

    ``last_serial``: the highest ever given. ``dismissed``: automatic entries that somebody deleted, name to
    source: they are not to come back by themselves. ``flag_source``: what the settings named last.
    """

    entries: tuple[Entry, ...] = ()
    last_serial: int = 0
    dismissed: Mapping[str, str] = field(default_factory=dict)
    flag_source: str = ""


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a leader says of one copy. ``proof``: the members of a ``Proof``, for leaders to come."""

    state: LoadState
    engine: str = ""
    vocab_size: int = 0
    message: str = ""
    proof: Mapping[str, str] | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """What a leader says. ``in_force``: serials that each of its workers has, and no older ones."""

    pid: int = 0
    copies: Mapping[int, Loaded] = field(default_factory=dict)
    in_force: frozenset[int] = frozenset()

    def with_copy(self, serial: int, loaded: Loaded) -> Report:
        cut = replace(loaded, message=loaded.message.encode()[:_MESSAGE_BYTES].decode(errors="ignore"))
        return replace(self, copies={**self.copies, serial: cut})


class EngineSwitch:
    """Whether the fast engine of one copy is off; one word for all workers of the node."""

    __slots__ = ("_serial", "_word", "_words")

    def __init__(self, words: memoryview, word: int, serial: int) -> None:
        self._words = words
        self._word = word
        self._serial = serial

    @property
    def is_off(self) -> bool:
        return bool(self._words[self._word] == self._serial)

    def turn_off(self) -> None:
        """Take effect for the next encode of every worker. Any number of workers may do it at once."""
        self._words[self._word] = self._serial

    def __repr__(self) -> str:
        return f"EngineSwitch({self._serial}, {'off' if self.is_off else 'on'})"


class TokenizerBoard:
    """One process's view of the segment. ``publish`` and ``remove`` are for the controller alone."""

    def __init__(self, segment: Segment) -> None:
        self._words = segment.words
        self._desired = Publication(segment, _DESIRED, _DESIRED_BYTES)
        self.leaders = int(segment.words[_LEADERS_WORD])
        if not 0 < self.leaders <= (segment.size - _DESIRED - _DESIRED_BYTES) // _REPORT_BYTES:
            raise StartupError("the segment of the tokenizers is damaged; restart meshd whole")
        self._reports = [
            Publication(segment, _DESIRED + _DESIRED_BYTES + leader * _REPORT_BYTES, _REPORT_BYTES)
            for leader in range(self.leaders)
        ]
        self._latest: tuple[int, Desired] = (0, Desired())
        self._latest_reports: list[tuple[int, Report]] = [(0, Report())] * self.leaders
        self._known: tuple[int, ...] = ()
        self._has_any = False

    @classmethod
    def create(cls, leaders: int) -> Segment:
        """Make the segment for so many leader seats."""
        segment = Segment.create(SEGMENT_KIND, _DESIRED + _DESIRED_BYTES + leaders * _REPORT_BYTES)
        segment.words[_LEADERS_WORD] = leaders
        return segment

    @classmethod
    def attach(cls, fd: int) -> TokenizerBoard:
        return cls(Segment.attach(fd, SEGMENT_KIND))

    # -------------------------------------------------------------------------------------- the controller

    def publish(self, desired: Desired) -> None:
        """Put the entries in force. Raises ``publication.DoesNotFit``; the old ones stay then."""
        self._desired.publish(asdict(desired))

    def remove(self, serial: int) -> None:
        """Take a copy out of use, at once and for ever."""
        self._words[_REMOVALS // 8 + serial % _SLOTS] = serial
        self._words[_REMOVALS_WORD] += 1

    # ---------------------------------------------------------------------------------------- the leaders

    def report(self, leader: int, report: Report) -> None:
        """Publish what the leader in that seat (0, 1, …) has to say."""
        copies = {str(serial): asdict(loaded) for serial, loaded in report.copies.items()}
        self._reports[leader].publish(
            {"pid": report.pid, "copies": copies, "in_force": sorted(report.in_force)}
        )

    # -------------------------------------------------------------------------------------------- readers

    def generation(self) -> int:
        """Return the generation of the entries, 0 before the controller has spoken; one load."""
        return self._desired.generation()

    def desired(self) -> Desired:
        """Return the entries; the same object while nothing changes."""
        if self._desired.generation() != self._latest[0]:
            generation, value = self._desired.read()
            entries = tuple(Entry.from_row(row) for row in value["entries"])
            self._latest = generation, Desired(**{**value, "entries": entries})
        return self._latest[1]

    def reports(self) -> Sequence[Report]:
        """Return the last report of each leader seat, of dead leaders too."""
        for leader, publication in enumerate(self._reports):
            if publication.generation() != self._latest_reports[leader][0]:
                generation, value = publication.read()
                copies = {int(serial): Loaded(**row) for serial, row in value["copies"].items()}
                report = Report(value["pid"], copies, frozenset(value["in_force"]))
                self._latest_reports[leader] = generation, report
        return [report for _, report in self._latest_reports]

    def has_tokenizer(self) -> bool:
        """Say whether some entry serves. O(leaders) loads while nothing changes."""
        generations = (self.generation(), *[each.generation() for each in self._reports])
        if generations != self._known:
            self._known = generations
            wanted = {entry.current.serial for entry in self.desired().entries if entry.current is not None}
            self._has_any = any(report.in_force & wanted for report in self.reports())
        return self._has_any

    def removals(self) -> int:
        """Return how many copies were ever removed; one load, for those that keep what is not removed."""
        return int(self._words[_REMOVALS_WORD])

    def is_removed(self, serial: int) -> bool:
        return bool(self._words[_REMOVALS // 8 + serial % _SLOTS] == serial)

    def engine_switch(self, serial: int) -> EngineSwitch:
        return EngineSwitch(self._words, _ENGINES // 8 + serial % _SLOTS, serial)

    def __repr__(self) -> str:
        return f"TokenizerBoard({[entry.name for entry in self.desired().entries]}, {self.reports()})"
