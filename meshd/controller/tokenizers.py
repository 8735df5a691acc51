"""Keep the set of tokenizers: add, replace, remove, and tell how each load goes. Its board's one writer.

The moves of an entry stand in ``prepare/tokenizer_board.py``; here they are made, from what the leaders
report. A status::

    pending ──a leader loads──> processing ──all have loaded, all workers have it──> completed
                                     └──a leader cannot──> failed; what served before serves on

Everything lies on the board, so a controller that takes over goes on where its predecessor stopped.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from meshd.config.settings import Settings
from meshd.control import ProcessBoard, Topology
from meshd.log import Log
from meshd.prepare.tokenizer_board import MAX_ENTRIES, Copy, Desired, Entry, Origin, Report, TokenizerBoard
from meshd.prepare.tokenizer_set import DEFAULT_NAME
from meshd.publication import DoesNotFit

REFERENCE: Final = "tokenizers"
"""The engine that takes over where the fast one was found to differ."""

Refusal = Literal["taken", "full"]


@dataclass(frozen=True, slots=True)
class Wanted:
    """What an entry is to be loaded from. ``chat_template_path``: empty for the tokenizer's own."""

    name: str
    source: str
    chat_template_path: str = ""


def living_reports(
    board: ProcessBoard, topology: Topology, tokenizers: TokenizerBoard
) -> list[Report] | None:
    """Return the reports of the leaders that live; ``None`` while a group has none that has reported."""
    groups = len(topology.groups)
    reports = tokenizers.reports()
    found: list[Report] = []
    heard = set()
    for seat, report in enumerate(reports):
        row = board.row(topology.board_leader(0) + seat)
        if not row.is_alive or not row.pid:
            continue
        if report.pid != row.pid:  # what stands there is its predecessor's
            return None
        heard.add(seat % groups)
        found.append(report)
    return found if len(heard) == groups else None


class TokenizerKeeper:
    """The tokenizers of this node, in registration order.

    ``reports``: of all living leaders, ``None`` while some are not heard of.
    """

    def __init__(
        self,
        board: TokenizerBoard,
        reports: Callable[[], list[Report] | None],
        log: Log,
        new_id: Callable[[], str] = lambda: str(uuid.uuid4()),
    ) -> None:
        self._board = board
        self._reports = reports
        self._log = log
        self._new_id = new_id
        self._entries: list[Entry] = []
        self._last_serial = 0
        self._dismissed: dict[str, str] = {}
        self._flag_source = ""

    @property
    def entries(self) -> Sequence[Entry]:
        return tuple(self._entries)

    def start(self, settings: Settings) -> None:
        """Go on with what a predecessor published; bring the tokenizer of the settings if that is news."""
        source = settings.tokenizer_path or settings.model_path
        if self._board.generation():
            self._resume()
            if source != self._flag_source:
                self._follow_flag(source)
            return
        self._flag_source = source
        if source:
            copy = self._copy(Wanted(DEFAULT_NAME, source), 1)
            # It serves as soon as a leader has it: no worker is to be forked without.
            self._entries.append(Entry(self._new_id(), DEFAULT_NAME, source, copy, origin="flag"))
        self._publish()

    def _resume(self) -> None:
        desired = self._board.desired()
        self._entries = list(desired.entries)
        self._last_serial = desired.last_serial
        self._dismissed = dict(desired.dismissed)
        self._flag_source = desired.flag_source

    def _follow_flag(self, source: str) -> None:
        """Take over a default that changed while the node runs; one that somebody registered stays."""
        self._flag_source = source
        old = self.named(DEFAULT_NAME)
        if source and (old is None or old.origin == "flag"):
            self.add(Wanted(DEFAULT_NAME, source), replaces=True, origin="flag")
        elif old is not None and old.origin == "flag":
            self.remove(old)
        else:
            self._publish()

    def find(self, id_or_name: str) -> Entry | None:
        by_id = (entry for entry in self._entries if entry.id == id_or_name)
        return next(by_id, None) or self.named(id_or_name)

    def named(self, name: str) -> Entry | None:
        return next((entry for entry in self._entries if entry.name == name), None)

    def is_dismissed(self, wanted: Wanted) -> bool:
        """Say whether somebody deleted the automatic entry of this name and source."""
        return self._dismissed.get(wanted.name) == wanted.source

    def add(self, wanted: Wanted, *, replaces: bool = False, origin: Origin = "api") -> Entry | Refusal:
        """Register a tokenizer, or begin to replace the one of that name; loading goes on in the leaders."""
        old = self.named(wanted.name)
        if old is not None and not replaces:
            return "taken"
        if old is None and len(self._entries) >= MAX_ENTRIES:
            return "full"
        self._dismissed.pop(wanted.name, None)
        if old is None:
            entry = Entry(self._new_id(), wanted.name, wanted.source, None, self._copy(wanted, 1), origin)
            self._entries.append(entry)
        else:
            copy = self._copy(wanted, old.generation + 1)
            entry = replace(
                old, next=copy, origin=origin, asked_for=wanted.source, status="pending", message=""
            )
            self._entries[self._entries.index(old)] = entry
        if not self._publish():
            place = self._entries.index(entry)
            self._entries[place : place + 1] = [] if old is None else [old]
            return "full"
        self._log.info("tokenizer_registered", name=wanted.name, path=wanted.source, replaces=old is not None)
        return entry

    def remove(self, entry: Entry, *, is_dismissed: bool = True) -> None:
        """Take an entry out of use, at once; workers that still have it do not use it any more.

        ``is_dismissed``: an automatic one is not to come back by itself.
        """
        self._entries.remove(entry)
        for copy in (entry.current, entry.next):
            if copy is not None:
                self._board.remove(copy.serial)
        if is_dismissed and entry.origin == "label":
            self._dismissed[entry.name] = entry.asked_for
        self._publish()
        self._log.info("tokenizer_removed", name=entry.name)

    def engine_of(self, entry: Entry) -> str:
        """Return the engine in use for an entry, empty while none serves."""
        if not entry.engine or entry.current is None:
            return ""
        return REFERENCE if self._board.engine_switch(entry.current.serial).is_off else entry.engine

    def poll(self) -> None:
        """Take note of what the leaders report, and move on those entries that can. Call it often."""
        reports = self._reports()
        if reports is None:
            return
        moved = [_next_state(entry, reports) for entry in self._entries]
        if moved == self._entries:
            return
        for before, after in zip(self._entries, moved, strict=True):
            if before.status != after.status and after.status in ("completed", "failed"):
                level = self._log.info if after.status == "completed" else self._log.error
                level(f"tokenizer_{after.status}", name=after.name, message=after.message or None)
        self._entries = moved
        self._publish()

    def _copy(self, wanted: Wanted, generation: int) -> Copy:
        self._last_serial += 1
        return Copy(self._last_serial, wanted.source, wanted.chat_template_path, generation)

    def _publish(self) -> bool:
        try:
            self._board.publish(
                Desired(tuple(self._entries), self._last_serial, self._dismissed, self._flag_source)
            )
        except DoesNotFit as error:
            self._log.error("tokenizers_not_published", reason=str(error))
            return False
        return True

    def __repr__(self) -> str:
        return f"TokenizerKeeper({[(entry.name, entry.status) for entry in self._entries]})"


def _next_state(entry: Entry, reports: Sequence[Report]) -> Entry:
    """Return what becomes of an entry; itself while nothing has happened to it."""
    if entry.status not in ("pending", "processing"):
        return _with_engine(entry, reports)
    copy = entry.next or entry.current
    if copy is None:
        return entry
    told = [report.copies.get(copy.serial) for report in reports]
    failed = next((each for each in told if each is not None and each.state == "failed"), None)
    if failed is not None:
        return replace(entry, next=None, status="failed", message=failed.message)
    if any(each is None or each.state != "loaded" for each in told):
        is_begun = any(each is not None for each in told)
        return replace(entry, status="processing") if is_begun else entry
    if entry.next is not None:
        return replace(entry, current=entry.next, next=None, status="processing")
    if not all(copy.serial in report.in_force for report in reports):
        return entry
    first = told[0]
    assert first is not None
    return replace(entry, status="completed", engine=first.engine, vocab_size=first.vocab_size)


def _with_engine(entry: Entry, reports: Sequence[Report]) -> Entry:
    """Take over the engine that every leader reports for what serves: a proof may have ended."""
    if entry.current is None:
        return entry
    serial = entry.current.serial
    engines = {report.copies[serial].engine if serial in report.copies else "" for report in reports}
    engine = engines.pop() if len(engines) == 1 else ""
    return replace(entry, engine=engine) if engine and engine != entry.engine else entry
