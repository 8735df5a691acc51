from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from meshd.prepare.engine_proof import (
    Encode,
    ProofBroken,
    answers_of_child,
    find_difference,
    fork_for_answers,
    read_answers,
)


def by_bytes(text: str) -> list[int]:
    return list(text.encode())


def proof(reference: Encode, candidate: Encode, texts: list[str]) -> Callable[[], list[str]]:
    return lambda: [find_difference(reference, candidate, texts)]


def test_equal_engines_pass_in_a_child():
    assert answers_of_child(proof(by_bytes, lambda text: list(text.encode()), ["", "a", "é"])) == [""]


def test_one_differing_id_fails_and_its_text_is_numbered():
    def differs_on_joiner(text: str) -> list[int]:
        return [0 if byte == 0x8D else byte for byte in text.encode()]

    answers = answers_of_child(proof(by_bytes, differs_on_joiner, ["a", "b\u200d", "c"]))
    assert answers == ["its ids differ on proof text 1 (2 characters)"]


def test_an_exception_and_a_panic_fail_the_proof():
    class Panic(BaseException):
        pass

    def raises(error: BaseException):
        def encode(text: str) -> list[int]:
            raise error

        return encode

    assert find_difference(by_bytes, raises(ValueError()), ["a"]) == "it raised ValueError on proof text 0"
    assert answers_of_child(proof(by_bytes, raises(Panic()), ["a"])) == ["it raised Panic on proof text 0"]


def test_a_reference_that_raises_is_told_apart():
    def broken(text: str) -> list[int]:
        raise RuntimeError

    with pytest.raises(ProofBroken, match="it raised RuntimeError"):
        answers_of_child(proof(broken, by_bytes, ["a"]))


def test_a_child_that_dies_breaks_the_proof():
    def dies(text: str) -> list[int]:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError

    with pytest.raises(ProofBroken, match="its process died"):
        answers_of_child(proof(by_bytes, dies, ["a"]))


def test_a_child_that_hangs_is_killed_at_the_time_limit():
    def hangs(text: str) -> list[int]:
        time.sleep(600)
        return []

    before = children()
    with pytest.raises(ProofBroken, match=r"it did not end within 0\.2 s"):
        answers_of_child(proof(by_bytes, hangs, ["a"]), timeout_s=0.2)
    assert children() <= before


def test_long_answers_are_cut_and_arrive_whole():
    answers = answers_of_child(lambda: ["\U0001f600" * 9999] * 3)
    assert answers == ["\U0001f600" * 100] * 3


def children() -> set[str]:
    """The child processes of this one, zombies included; other tests may have left some."""
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


def test_the_parent_runs_no_engine():
    seen: list[str] = []

    def remembers(text: str) -> list[int]:
        seen.append(text)
        return list(text.encode())

    assert answers_of_child(proof(remembers, remembers, ["a", "b"])) == [""]
    assert seen == []


def test_a_child_that_burns_its_cpu_time_is_killed():
    def burns() -> list[str]:
        while True:
            pass

    child, receiving = fork_for_answers(burns, 60.0, cpu_s=0.05)
    with pytest.raises(ProofBroken, match="its process died"):
        read_answers(receiving)
    os.close(receiving)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGPROF


def test_a_child_does_not_outlive_its_parent():
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


def test_without_another_process_the_proof_is_broken_and_nothing_is_left_open(monkeypatch):
    def fails() -> int:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", fails)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(ProofBroken, match="no process for it: Resource temporarily unavailable"):
        answers_of_child(lambda: [""])
    assert len(os.listdir("/proc/self/fd")) == len(before)
