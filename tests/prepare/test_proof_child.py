from __future__ import annotations

import os
import time
from collections.abc import Sequence

import pytest

from meshd.prepare.child_answers import NoAnswer
from meshd.prepare.proof_child import CHILD_NAME, ProofChild


def _answers(child: ProofChild) -> list[str]:
    deadline = time.monotonic() + 20
    while (answers := child.answers()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return answers


def test_the_answers_arrive_and_the_child_is_reaped() -> None:
    child = ProofChild(lambda: ("", "a reason"))
    assert _answers(child) == ["", "a reason"]
    child.close()
    with pytest.raises(ProcessLookupError):
        os.kill(child._pid, 0)


def test_it_runs_at_low_priority_under_its_own_name() -> None:
    def work() -> Sequence[str]:
        with open("/proc/self/comm") as name:
            return name.read().strip(), str(os.getpriority(os.PRIO_PROCESS, 0))

    child = ProofChild(work)
    assert _answers(child) == [CHILD_NAME, str(min(os.nice(0) + 10, 19))]
    child.close()


def test_nothing_is_waited_for_while_it_runs_and_it_can_be_ended() -> None:
    receiving, sending = os.pipe()

    def work() -> Sequence[str]:
        os.read(receiving, 1)
        return ()

    child = ProofChild(work)
    assert child.answers() is None
    child.close()
    os.close(receiving)
    os.close(sending)


def test_a_child_that_dies_or_raises_breaks_the_proof() -> None:
    def dies() -> Sequence[str]:
        os._exit(3)

    def raises() -> Sequence[str]:
        raise RuntimeError("no")

    for work in (dies, raises):
        child = ProofChild(work)
        with pytest.raises(NoAnswer):
            _answers(child)
        child.close()


def test_it_ends_by_itself_after_its_time() -> None:
    child = ProofChild(lambda: [str(time.sleep(60))], timeout_s=0.1)
    with pytest.raises(NoAnswer, match="died"):
        _answers(child)
    child.close()


def test_on_a_busy_machine_it_has_its_cpu_time_and_not_that_of_the_clock() -> None:
    def burns() -> Sequence[str]:
        while True:
            pass

    child = ProofChild(burns, cpu_s=0.05)
    with pytest.raises(NoAnswer, match="died"):
        _answers(child)
    child.close()
    child = ProofChild(lambda: [str(time.sleep(0.2))], cpu_s=0.1)  # it waits for longer than it may compute
    assert _answers(child) == ["None"]
    child.close()
