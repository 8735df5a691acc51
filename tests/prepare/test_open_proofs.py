"""Proofs in the background: one at a time, found by others, and never in the way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from meshd.prepare import open_proofs
from meshd.prepare.child_answers import NoAnswer
from meshd.prepare.cut_proof import Cuts
from meshd.prepare.open_proofs import OpenProofs
from meshd.prepare.proof_record import Proof
from meshd.prepare.tokenizer_proof import Found, Unproved


class Child:
    def __init__(self) -> None:
        self.answer: list[str] | NoAnswer | None = None
        self.is_closed = False

    def answers(self) -> list[str] | None:
        if isinstance(self.answer, NoAnswer):
            raise self.answer
        return self.answer

    def close(self) -> None:
        self.is_closed = True


class Leader:
    def __init__(self, runs: bool = True) -> None:
        self.reported: dict[str, Proof] = {}
        self.children: list[Child] = []
        self.now_s = 0.0
        self.is_node_ready = self.may_fork = True
        self.proofs = OpenProofs(
            runs, self.reported.get, lambda: self.is_node_ready, self._start, lambda: self.now_s
        )

    def _start(self, work: Callable[[], Sequence[str]]) -> Child:
        if not self.may_fork:
            raise NoAnswer("there is no process for it")
        self.children.append(Child())
        return self.children[-1]

    def ended(self) -> list[tuple[int, Found, Proof | None]]:
        self.now_s += open_proofs.LOOK_S
        return self.proofs.ended()


class Reference:
    normalizer = None

    def get_added_tokens_decoder(self) -> dict[int, Any]:
        return {}


def _unproved(digest: str, fast: Any = list, load_fast: Any = None) -> Unproved:
    return Unproved(digest, Reference(), fast, load_fast)  # type: ignore[arg-type]


A, B = _unproved("a").key, _unproved("b").key


@pytest.fixture
def leader() -> Leader:
    return Leader()


def test_proofs_run_one_after_the_other(leader: Leader) -> None:
    leader.proofs.add(1, _unproved("a"))
    leader.proofs.add(2, _unproved("b"))
    assert leader.ended() == [] and len(leader.children) == 1
    leader.children[0].answer = ["", "", "a reason"]
    assert leader.ended() == [(1, Found("", Cuts("", "a reason")), Proof(A, "", "", "a reason"))]
    assert leader.children[0].is_closed and len(leader.children) == 2
    leader.children[1].answer = ["it differs", "", ""]
    assert leader.ended() == [(2, Found("it differs", Cuts("", "")), Proof(B, "it differs", "", ""))]
    assert leader.ended() == []


def test_a_leader_that_runs_none_takes_what_another_reports() -> None:
    leader = Leader(runs=False)
    leader.proofs.add(1, _unproved("a"))
    assert leader.ended() == [] and leader.children == []
    leader.reported[A] = Proof(A, "", "", "")
    assert leader.ended() == [(1, Found("", Cuts("", "")), leader.reported[A])]
    assert leader.ended() == []


def test_a_report_that_comes_first_ends_the_own_child(leader: Leader) -> None:
    leader.proofs.add(1, _unproved("a"))
    leader.ended()
    leader.reported[A] = Proof(A, "", "", "")
    assert len(leader.ended()) == 1
    assert leader.children[0].is_closed


def test_an_engine_that_kills_its_proof_is_left_out_and_the_rest_proved(leader: Leader) -> None:
    leader.proofs.add(1, _unproved("a"))
    leader.ended()
    leader.children[0].answer = NoAnswer("it died")
    assert leader.ended() == []
    leader.children[1].answer = ["", "", ""]
    assert leader.ended() == [(1, Found("it died", Cuts("", ""), False), None)]


def test_a_reference_that_cannot_be_proved_is_used_whole(leader: Leader) -> None:
    leader.proofs.add(1, _unproved("a", fast=None))
    leader.ended()
    leader.children[0].answer = NoAnswer("it died")
    assert leader.ended() == [(1, Found("", Cuts("it died", "it died"), False), None)]


def test_a_copy_that_is_not_wanted_any_more_ends_its_proof(leader: Leader) -> None:
    leader.proofs.add(1, _unproved("a"))
    leader.ended()
    leader.proofs.keep_only({2})
    assert leader.children[0].is_closed
    assert leader.ended() == []


def test_closing_ends_the_child_that_runs(leader: Leader) -> None:
    leader.proofs.add(1, _unproved("a"))
    leader.ended()
    leader.proofs.close()
    assert leader.children[0].is_closed


def test_a_child_that_cannot_be_forked_is_tried_again_later(leader: Leader) -> None:
    leader.may_fork = False
    leader.proofs.add(1, _unproved("a"))
    assert leader.ended() == []
    leader.may_fork = True
    assert leader.ended() == [] and not leader.children
    leader.now_s += open_proofs.RETRY_S
    assert leader.ended() == [] and len(leader.children) == 1
    leader.children[0].answer = ["", "", ""]
    assert leader.ended() == [(1, Found("", Cuts("", "")), Proof(A, "", "", ""))]


def test_nothing_begins_before_the_node_is_ready(leader: Leader) -> None:
    loads = []
    leader.is_node_ready = False
    leader.proofs.add(1, _unproved("a", None, lambda digest: (loads.append(digest), (list, ""))[1]))
    assert leader.ended() == [] and not loads and not leader.children
    leader.is_node_ready = True
    assert leader.ended() == [] and loads == ["a"] and not leader.children, "a load ends its turn"
    assert leader.ended() == [] and len(leader.children) == 1


@pytest.mark.parametrize("runs", [True, False])
def test_every_leader_loads_the_fast_engine_before_it_asks_for_the_proof(runs: bool) -> None:
    leader = Leader(runs)
    unproved = _unproved("a", None, lambda digest: (None, "it is not here"))
    leader.proofs.add(1, unproved)
    assert leader.ended() == []
    leader.reported[unproved.key] = Proof(unproved.key, "", "", "")
    assert unproved.key != A
    assert leader.ended() == [(1, Found("", Cuts("", "")), leader.reported[unproved.key])]
