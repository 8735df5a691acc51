"""The registry of tokenizers: moves of its entries by what leaders report, and its life beyond a process."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from meshd.config import Settings
from meshd.control import ProcessBoard, Role, State, Topology
from meshd.controller.tokenizers import TokenizerKeeper, Wanted, living_reports
from meshd.log import Log
from meshd.prepare.tokenizer_board import MAX_ENTRIES, Desired, Entry, Loaded, Report, TokenizerBoard

M1, M1_NEW = Wanted("m1", "/m1"), Wanted("m1", "/m1-new", "/template")


@dataclass
class Leaders:
    """Leaders played by hand; ``None``: not all are heard of."""

    reports: list[Report] | None = field(default_factory=lambda: [Report(1), Report(2)])

    def say(self, leader: int, serial: int, state: Any, **more: Any) -> None:
        assert self.reports is not None
        self.reports[leader] = self.reports[leader].with_copy(serial, Loaded(state, **more))

    def force(self, leader: int, *serials: int) -> None:
        assert self.reports is not None
        before = self.reports[leader]
        self.reports[leader] = Report(before.pid, before.copies, frozenset(serials))


@pytest.fixture
def board() -> TokenizerBoard:
    return TokenizerBoard(TokenizerBoard.create(2))


@pytest.fixture
def leaders() -> Leaders:
    return Leaders()


def make(board: TokenizerBoard, leaders: Leaders, **settings: Any) -> TokenizerKeeper:
    keeper = TokenizerKeeper(board, lambda: leaders.reports, Log("test", "error", stream_fd=-1))
    keeper.start(Settings(**settings))
    return keeper


def complete(keeper: TokenizerKeeper, leaders: Leaders, serial: int) -> None:
    for leader in (0, 1):
        leaders.say(leader, serial, "loaded", engine="fastokens", vocab_size=300)
    keeper.poll()
    for leader in (0, 1):
        leaders.force(leader, serial)
    keeper.poll()


def wanted(board: TokenizerBoard) -> Desired:
    return board.desired()


def status(keeper: TokenizerKeeper, name: str = "m1") -> str:
    entry = keeper.named(name)
    return "gone" if entry is None else entry.status


def test_the_tokenizer_path_is_the_default_and_wins_over_the_model_path(
    board: TokenizerBoard, leaders: Leaders
) -> None:
    keeper = make(board, leaders, tokenizer_path="/t", model_path="/m")
    (entry,) = wanted(board).entries
    assert (entry.name, entry.current and entry.current.source, entry.origin) == ("default", "/t", "flag")
    assert status(keeper, "default") == "pending"
    other = TokenizerBoard(TokenizerBoard.create(2))
    make(other, leaders, model_path="/m")
    assert wanted(other).entries[0].source == "/m"


def test_without_a_tokenizer_the_leaders_are_told_so(board: TokenizerBoard, leaders: Leaders) -> None:
    make(board, leaders)
    assert board.generation() == 1 and not wanted(board).entries


def test_a_new_entry_goes_from_pending_to_completed_as_leaders_load_it(
    board: TokenizerBoard, leaders: Leaders
) -> None:
    keeper = make(board, leaders)
    entry = keeper.add(M1)
    assert isinstance(entry, Entry)
    assert (status(keeper), entry.generation, entry.source) == ("pending", 1, "/m1")
    keeper.poll()
    assert status(keeper) == "pending"
    leaders.say(0, 1, "loading")
    keeper.poll()
    assert status(keeper) == "processing"
    leaders.say(0, 1, "loaded", engine="fastokens", vocab_size=300)
    keeper.poll()
    assert status(keeper) == "processing" and wanted(board).entries[0].current is None
    leaders.say(1, 1, "loaded", engine="fastokens", vocab_size=300)
    keeper.poll()
    assert wanted(board).entries[0].current is not None
    leaders.force(0, 1)
    keeper.poll()
    assert status(keeper) == "processing", "one group has workers without it"
    leaders.force(1, 1)
    keeper.poll()
    assert status(keeper) == "completed"
    done = keeper.named("m1")
    assert done is not None and (done.id, done.engine, done.vocab_size) == (entry.id, "fastokens", 300)


def test_a_taken_name_is_refused_unless_it_is_replaced(board: TokenizerBoard, leaders: Leaders) -> None:
    keeper = make(board, leaders)
    keeper.add(M1)
    assert keeper.add(M1_NEW) == "taken"
    assert isinstance(keeper.add(M1_NEW, replaces=True), Entry)
    assert len(keeper.entries) == 1


def test_a_replacement_serves_when_all_leaders_have_it_and_keeps_the_id(
    board: TokenizerBoard, leaders: Leaders
) -> None:
    keeper = make(board, leaders)
    first = keeper.add(M1)
    complete(keeper, leaders, 1)
    second = keeper.add(M1_NEW, replaces=True)
    assert isinstance(first, Entry) and isinstance(second, Entry)
    assert (second.id, second.generation, second.status) == (first.id, 2, "pending")
    leaders.say(0, 2, "loaded")
    keeper.poll()
    entry = wanted(board).entries[0]
    assert entry.current is not None and entry.current.source == "/m1"
    complete(keeper, leaders, 2)
    entry = wanted(board).entries[0]
    assert entry.current is not None and entry.next is None
    assert (entry.current.source, entry.current.chat_template_path) == ("/m1-new", "/template")
    assert (status(keeper), entry.generation) == ("completed", 2)


def test_a_failed_replacement_keeps_the_old_copy_and_reports_failed(
    board: TokenizerBoard, leaders: Leaders
) -> None:
    keeper = make(board, leaders)
    keeper.add(M1)
    complete(keeper, leaders, 1)
    keeper.add(M1_NEW, replaces=True)
    leaders.say(0, 2, "loaded")
    leaders.say(1, 2, "failed", message="no such file")
    keeper.poll()
    (entry,) = wanted(board).entries
    assert (entry.status, entry.message, entry.next) == ("failed", "no such file", None)
    assert entry.current is not None and (entry.current.serial, entry.source) == (1, "/m1")
    assert (entry.engine, entry.vocab_size, entry.generation) == ("fastokens", 300, 1)
    keeper.add(M1_NEW, replaces=True)
    complete(keeper, leaders, 3)
    assert status(keeper) == "completed"


def test_a_replacement_asked_for_twice_loads_the_later_one(board: TokenizerBoard, leaders: Leaders) -> None:
    keeper = make(board, leaders)
    keeper.add(M1)
    keeper.add(M1_NEW, replaces=True)
    (entry,) = wanted(board).entries
    assert entry.next is not None and (entry.next.serial, entry.next.source) == (2, "/m1-new")
    leaders.say(0, 1, "failed", message="of no interest any more")
    keeper.poll()
    assert status(keeper) == "pending"


def test_a_removed_entry_is_out_of_use_at_once_on_the_board(board: TokenizerBoard, leaders: Leaders) -> None:
    keeper = make(board, leaders)
    entry = keeper.add(M1)
    assert isinstance(entry, Entry)
    complete(keeper, leaders, 1)
    found = keeper.find(entry.id)
    assert found is not None and found is keeper.find("m1")
    keeper.remove(found)
    assert not wanted(board).entries and board.is_removed(1)
    assert isinstance(keeper.add(M1), Entry) and wanted(board).last_serial == 2


def test_while_a_group_is_not_heard_of_nothing_moves(board: TokenizerBoard, leaders: Leaders) -> None:
    keeper = make(board, leaders)
    keeper.add(M1)
    leaders.reports = None
    keeper.poll()
    assert status(keeper) == "pending"


def test_a_controller_that_takes_over_goes_on_with_a_load_that_is_going_on(
    board: TokenizerBoard, leaders: Leaders
) -> None:
    first = make(board, leaders, tokenizer_path="/t")
    complete(first, leaders, 1)
    added = first.add(M1)
    leaders.say(0, 2, "loading")
    first.poll()
    second = make(board, leaders, tokenizer_path="/t")
    assert second.entries == first.entries
    assert isinstance(added, Entry) and second.find(added.id) is not None
    complete(second, leaders, 2)
    assert status(second) == "completed" and status(second, "default") == "completed"


def test_a_changed_flag_replaces_the_default_unless_somebody_registered_another(
    board: TokenizerBoard, leaders: Leaders
) -> None:
    make(board, leaders, tokenizer_path="/t")
    keeper = make(board, leaders, tokenizer_path="/t2")
    (entry,) = keeper.entries
    assert entry.next is not None and entry.next.source == "/t2"
    keeper.add(Wanted("default", "/own"), replaces=True)
    keeper = make(board, leaders, tokenizer_path="/t3")
    assert keeper.entries[0].asked_for == "/own"
    keeper.remove(keeper.entries[0])
    assert not make(board, leaders, tokenizer_path="/t3").entries
    assert make(board, leaders, tokenizer_path="/t4").entries[0].asked_for == "/t4"
    assert not make(board, leaders).entries


def test_there_are_256_names_at_most(board: TokenizerBoard, leaders: Leaders) -> None:
    keeper = make(board, leaders)
    for n in range(MAX_ENTRIES):
        assert isinstance(keeper.add(Wanted(f"m{n}", "/m")), Entry)
    assert keeper.add(Wanted("one more", "/m")) == "full"
    assert isinstance(keeper.add(M1_NEW, replaces=True), Entry)


def test_the_engine_in_use_is_what_all_leaders_report_once_its_proof_has_ended(
    board: TokenizerBoard, leaders: Leaders
) -> None:
    keeper = make(board, leaders)
    keeper.add(M1)
    serial = wanted(board).last_serial
    for leader in (0, 1):
        leaders.say(leader, serial, "loaded", engine="tokenizers", vocab_size=300)
        leaders.force(leader, serial)
    keeper.poll()
    keeper.poll()
    for leader, engine in ((0, "tokenizers"), (1, "fastokens")):
        leaders.say(leader, serial, "loaded", engine="fastokens", vocab_size=300)
        keeper.poll()
        entry = keeper.named("m1")
        assert entry is not None
        assert (entry.status, keeper.engine_of(entry)) == ("completed", engine)


def test_an_engine_that_was_turned_off_is_not_the_one_in_use(board: TokenizerBoard, leaders: Leaders) -> None:
    keeper = make(board, leaders)
    keeper.add(M1)
    assert keeper.engine_of(keeper.entries[0]) == ""
    complete(keeper, leaders, 1)
    assert keeper.engine_of(keeper.entries[0]) == "fastokens"
    board.engine_switch(1).turn_off()
    assert keeper.engine_of(keeper.entries[0]) == "tokenizers"


def test_reports_count_when_every_group_has_a_living_leader_that_wrote_its_own() -> None:
    topology = Topology.of(1, 4, groups=((0, 1), (2, 3)))
    processes = ProcessBoard.create(topology.board_seats)
    board = TokenizerBoard(TokenizerBoard.create(4))

    def live(group: int, half: int, pid: int) -> None:
        row = processes.row(topology.board_leader(group, half))
        row.open(Role.LEADER, group, pid, "")
        row.state = State.READY

    def found() -> list[int] | None:
        reports = living_reports(processes, topology, board)
        return None if reports is None else [report.pid for report in reports]

    assert found() is None
    live(0, 0, 10)
    board.report(0, Report(10))
    assert found() is None, "the second group has no leader"
    live(1, 0, 11)
    board.report(1, Report(9))
    assert found() is None, "what stands there is the report of a dead one"
    board.report(1, Report(11))
    assert found() == [10, 11]
    live(1, 1, 12)
    assert found() is None, "a second leader of the group has not told yet"
    board.report(3, Report(12))
    assert found() == [10, 11, 12]
    processes.row(topology.board_leader(1, 0)).close()
    assert found() == [10, 12]
