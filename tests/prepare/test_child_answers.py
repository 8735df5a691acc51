from __future__ import annotations

import os
import select
import signal
import time
from pathlib import Path

import pytest

from meshd.prepare.child_answers import NoAnswer, answers_of_child, fork_for_answers, read_answers


def test_answers_arrive_from_another_process() -> None:
    ours = os.getpid()
    assert answers_of_child(lambda: ["", str(os.getpid() != ours), "é"]) == ["", "True", "é"]


def test_work_that_raises_is_told_apart() -> None:
    def broken() -> list[str]:
        raise RuntimeError

    with pytest.raises(NoAnswer, match="it raised RuntimeError"):
        answers_of_child(broken)


def test_a_child_that_dies_gives_no_answer() -> None:
    def dies() -> list[str]:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError

    with pytest.raises(NoAnswer, match="its process died"):
        answers_of_child(dies)


def test_a_child_that_hangs_is_killed_at_the_time_limit() -> None:
    before = children()
    with pytest.raises(NoAnswer, match=r"it did not end within 0\.2 s"):
        answers_of_child(lambda: [str(time.sleep(600))], timeout_s=0.2)
    assert children() <= before


def test_long_answers_are_cut_and_arrive_whole() -> None:
    answers = answers_of_child(lambda: ["\U0001f600" * 9999] * 3)
    assert answers == ["\U0001f600" * 1800] * 3


def children() -> set[str]:
    """The child processes of this one, zombies included; other tests may have left some."""
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


def test_the_work_is_not_done_in_the_parent() -> None:
    seen: list[str] = []
    assert answers_of_child(lambda: [str(seen.append("a"))]) == ["None"]
    assert seen == []


def test_a_child_that_burns_its_cpu_time_is_killed() -> None:
    def burns() -> list[str]:
        while True:
            pass

    child, receiving = fork_for_answers(burns, 60.0, cpu_s=0.05)
    with pytest.raises(NoAnswer, match="its process died"):
        read_answers(receiving, 20.0)
    os.close(receiving)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGPROF


def test_a_child_does_not_outlive_its_parent() -> None:
    alive_reads, alive = os.pipe()
    parent = os.fork()
    if parent == 0:
        os.close(alive_reads)
        fork_for_answers(lambda: [str(time.sleep(60))], 60.0)
        os.kill(os.getpid(), signal.SIGKILL)
    os.close(alive)
    os.waitpid(parent, 0)
    assert select.select([alive_reads], [], [], 20)[0]  # nobody has the other end any more
    assert os.read(alive_reads, 1) == b""
    os.close(alive_reads)


def test_without_another_process_there_is_no_answer_and_nothing_is_left_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails() -> int:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", fails)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(NoAnswer, match="no process for it: Resource temporarily unavailable"):
        answers_of_child(lambda: [""])
    assert len(os.listdir("/proc/self/fd")) == len(before)
