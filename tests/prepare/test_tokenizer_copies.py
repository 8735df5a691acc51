"""A leader's copies follow the board: loads, tries, drops, reports."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest

from meshd.errors import StartupError
from meshd.log import Log
from meshd.prepare.proof_record import Proof
from meshd.prepare.tokenizer import LoadedTokenizer, LoadFailed
from meshd.prepare.tokenizer_board import Copy, Desired, Entry, Loaded, Report, TokenizerBoard
from meshd.prepare.tokenizer_copies import RETRY_S, TokenizerCopies

LOG = Log("test", "error", stream_fd=-1)


@dataclass
class Leader:
    """One leader with a load that is played: sources named ``/bad…`` fail, each try costs ``load_s``."""

    must: str = ""
    load_s: float = 1.0
    now_s: float = 0.0
    tries: list[str] = field(default_factory=list)
    pauses: list[float] = field(default_factory=list)
    cures: dict[str, int] = field(default_factory=dict)  # source → the try that succeeds
    meanwhile: dict[str, tuple[Entry, ...]] = field(
        default_factory=dict
    )  # source → what is wanted from then on

    def __post_init__(self) -> None:
        self.board = TokenizerBoard(TokenizerBoard.create(2))
        self.copies = TokenizerCopies(
            self.board,
            1,
            77,
            self.load,
            self.pause,
            lambda: self.now_s,
            LOG,
            self.must,
        )

    def load(self, copy: Copy, left_s: float) -> LoadedTokenizer:
        self.tries.append(copy.source)
        self.now_s += self.load_s
        assert self.report.copies[copy.serial] == Loaded("loading")
        assert not self.copies.is_load_in_vain
        if copy.source in self.meanwhile:
            self.board.publish(Desired(self.meanwhile.pop(copy.source), 100))
            assert self.copies.is_load_in_vain
        if copy.source.startswith("/bad") and self.tries.count(copy.source) != self.cures.get(copy.source):
            raise LoadFailed("it is bad")
        return LoadedTokenizer(list, vocab_size=copy.serial, source=copy.source)

    def pause(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now_s += seconds

    @property
    def report(self) -> Report:
        return self.board.reports()[1]

    def want(self, *entries: Entry) -> int:
        """Publish, follow to the end; return how often another set came into force."""
        self.board.publish(Desired(entries, 100))
        changes = 0
        while self.copies.follow():
            changes += 1
        assert not self.copies.is_behind
        return changes

    def found(self, model: str) -> str | None:
        found = self.copies.tokenizer_set().find(model)
        return None if found is None else found.source


def entry(name: str, current: int | None, source: str = "", following: Copy | None = None) -> Entry:
    source = source or f"/{name}"
    return Entry(name, name, source, None if current is None else Copy(current, source), following)


def test_before_the_controller_has_spoken_there_is_nothing_to_follow() -> None:
    leader = Leader()
    assert not leader.copies.is_told and not leader.copies.follow()


def test_a_proof_that_a_leader_has_run_is_found_by_its_successor_and_by_others() -> None:
    leader = Leader()
    proof = Proof("key", "", "", "a reason")
    inner = leader.load

    def load(copy: Copy, left_s: float) -> LoadedTokenizer:
        leader.copies.keep(proof)
        return inner(copy, left_s)

    leader.copies._load = load
    assert leader.copies.find("key") is None
    leader.want(entry("m1", 1))

    def other(area: int) -> TokenizerCopies:
        return TokenizerCopies(leader.board, area, 78, load, leader.pause, lambda: 0.0, LOG)

    successor = other(1)
    leader.board.report(1, Report(78))  # the first thing it says
    assert successor.find("key") == proof and successor.find("another key") is None
    leader.copies.note_in_force()
    assert other(0).find("key") == proof


def test_each_entry_is_loaded_once_and_found_by_its_name() -> None:
    leader = Leader()
    assert leader.want(entry("default", 1), entry("m1", 2)) == 2
    assert leader.want(entry("default", 1), entry("m1", 2)) == 0
    assert leader.tries == ["/default", "/m1"]
    assert (leader.found("m1"), leader.found("m2")) == ("/m1", "/default")
    assert leader.report.pid == 77
    assert leader.report.copies == {n: Loaded("loaded", "tokenizers", n) for n in (1, 2)}
    assert leader.report.in_force == frozenset()
    leader.copies.note_in_force()
    assert leader.report.in_force == {1, 2}


def test_the_next_copy_is_loaded_beside_the_one_that_serves_until_it_is_the_current_one() -> None:
    leader = Leader()
    leader.want(entry("m1", 1))
    leader.copies.note_in_force()
    new = Copy(2, "/new")
    assert leader.want(entry("m1", 1, following=new)) == 0
    assert leader.found("m1") == "/m1"
    assert leader.report.copies[2].state == "loaded" and leader.report.in_force == {1}
    assert leader.want(replace(entry("m1", 1), current=new)) == 1
    assert leader.found("m1") == "/new"
    assert set(leader.report.copies) == {2} and leader.report.in_force == frozenset()


def test_a_load_that_fails_is_tried_three_times_two_seconds_apart_and_then_reported() -> None:
    leader = Leader()
    leader.want(entry("m1", 1))
    assert leader.want(entry("m1", 1, following=Copy(2, "/bad"))) == 0
    assert leader.tries == ["/m1", "/bad", "/bad", "/bad"] and leader.pauses == [2.0, 2.0]
    assert leader.report.copies[2] == Loaded("failed", message="it is bad")
    assert leader.found("m1") == "/m1"
    assert leader.want(entry("m1", 1)) == 0
    assert set(leader.report.copies) == {1}


def test_a_load_that_succeeds_at_the_second_try_is_a_success() -> None:
    leader = Leader(cures={"/bad": 2})
    leader.want(entry("m1", 1, "/bad"))
    assert leader.tries == ["/bad", "/bad"] and leader.found("m1") == "/bad"


def test_tries_end_after_five_minutes_in_all() -> None:
    leader = Leader(load_s=200.0)
    leader.want(entry("m1", 1, "/bad"))
    assert leader.tries == ["/bad", "/bad"]
    assert leader.report.copies[1].message == "it was not loaded within 300 s: it is bad"


def test_a_removed_entry_is_dropped_and_its_models_fall_to_the_default() -> None:
    leader = Leader()
    leader.want(entry("default", 1), entry("m1", 2))
    leader.copies.note_in_force()
    assert leader.want(entry("default", 1)) == 1
    assert leader.found("m1") == "/default"
    assert set(leader.report.copies) == {1} and leader.report.in_force == {1}


def test_the_entry_that_must_be_there_is_a_start_error_and_another_is_only_reported() -> None:
    with pytest.raises(StartupError, match="/bad cannot be loaded: it is bad"):
        Leader(must="default").want(entry("default", 1, "/bad"))
    leader = Leader()
    leader.want(entry("default", 1, "/bad"), entry("m1", 2))
    assert (leader.found("m1"), leader.found("m2")) == ("/m1", None)


def test_a_failed_replacement_of_the_entry_that_must_be_there_ends_nobody() -> None:
    leader = Leader(must="default")
    leader.want(entry("default", 1))
    leader.copies.note_in_force()
    leader.want(entry("default", 1, following=Copy(2, "/bad")))
    assert leader.found("default") == "/default"


def test_a_worker_that_is_forked_while_a_copy_is_dropped_gets_what_is_left() -> None:
    leader = Leader()
    leader.want(entry("default", 1), entry("m1", 2))
    seen: list[str | None] = []
    leader.load_s = 0.0
    inner = leader.load

    def load(copy: Copy, left_s: float) -> LoadedTokenizer:
        seen.append(leader.found("m1"))
        return inner(copy, left_s)

    leader.copies._load = load
    leader.want(entry("m2", 3), entry("default", 1))
    assert seen == ["/default"]


@pytest.mark.parametrize("source", ["/bad", "/good"])
def test_a_load_that_is_not_wanted_any_more_is_given_up_and_the_next_one_begins(source: str) -> None:
    leader = Leader()
    leader.meanwhile[source] = (entry("m2", 2),)
    leader.want(entry("m1", 1, source))
    assert leader.tries == [source, "/m2"]
    assert set(leader.report.copies) == {2} and not leader.copies.is_load_in_vain
    assert (leader.found("m1"), leader.found("m2")) == (None, "/m2")


def test_what_was_in_force_before_and_cannot_be_loaded_now_is_tried_again_later() -> None:
    leader = Leader(cures={"/bad": 4})
    known = replace(entry("m1", 1, "/bad"), status="completed")
    assert leader.want(known, entry("m2", 2)) == 1
    assert leader.report.copies[1].state == "failed" and leader.found("m1") is None
    leader.now_s += RETRY_S - 2  # the load of m2 has taken one
    assert not leader.copies.is_behind
    leader.now_s += 1
    assert leader.copies.is_behind and leader.copies.follow()
    assert leader.report.copies[1].state == "loaded" and leader.found("m1") == "/bad"
    assert leader.tries == ["/bad"] * 3 + ["/m2", "/bad"]
    assert not leader.copies.follow() and not leader.copies.is_behind


def test_what_was_never_loaded_by_anyone_is_not_tried_again() -> None:
    leader = Leader()
    leader.want(entry("m1", 1, "/bad"))
    leader.now_s += 10 * RETRY_S
    assert not leader.copies.is_behind and not leader.copies.follow()
