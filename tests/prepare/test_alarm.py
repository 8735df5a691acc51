from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from meshd.prepare.alarm import alarm_held
from meshd.prepare.child_answers import answers_of_child
from meshd.prepare.hub import find_source


class Rung(BaseException):
    pass


@pytest.fixture
def bell() -> Iterator[None]:
    """An alarm that raises."""

    def ring(number: int, frame: object) -> None:
        raise Rung

    before = signal.signal(signal.SIGALRM, ring)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def children() -> str:
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        return file.read()


def test_an_alarm_waits_until_the_block_has_ended(bell: None) -> None:
    steps = []
    with pytest.raises(Rung), alarm_held():
        signal.raise_signal(signal.SIGALRM)
        steps.append("ended")
    assert steps == ["ended"]
    assert signal.SIGALRM not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


@pytest.mark.parametrize("kind", ["answers", "download"])
def test_an_alarm_that_ends_the_wait_for_a_child_leaves_neither_child_nor_pipe(kind: str) -> None:
    # In a process of its own: the kernel may hand an alarm to any thread that does not hold it, and engines
    # that other tests have used here left theirs. A leader has one thread, as both functions ask.
    rounds = multiprocessing.get_context("spawn").Process(target=ring_during_waits, args=(kind,))
    rounds.start()
    rounds.join(60)
    code, _ = rounds.exitcode, rounds.kill()
    assert code == 0


def ring_during_waits(kind: str) -> None:
    def ring(number: int, frame: object) -> None:
        raise Rung

    def work() -> list[str]:
        return [str(time.sleep(60))]

    assert threading.active_count() == 1
    signal.signal(signal.SIGALRM, ring)
    before = sorted(os.listdir("/proc/self/fd")), children()
    for _ in range(20):
        with pytest.raises(Rung):
            # At any moment of it, and again: an exception raised in a callback of the collector is lost.
            signal.setitimer(signal.ITIMER_REAL, 0.001, 0.5)
            if kind == "answers":
                answers_of_child(work, 60.0)
            else:
                find_source("an/id", 60.0, lambda source: str(work()))
        signal.setitimer(signal.ITIMER_REAL, 0)
    assert (sorted(os.listdir("/proc/self/fd")), children()) == before


def test_a_child_that_was_forked_with_the_alarm_held_ends_by_it() -> None:
    def work() -> list[str]:
        return [str(signal.SIGALRM in signal.pthread_sigmask(signal.SIG_BLOCK, ()))]

    with alarm_held():
        assert answers_of_child(work) == ["False"]
