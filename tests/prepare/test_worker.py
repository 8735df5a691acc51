"""The worker's loop, run in this process; the job ``leave`` asks it to leave when it is done."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

from meshd.control import Role
from meshd.prepare.layout import (
    BUSY,
    BUSY_LONG,
    LONG_BODY,
    OUTCOME_FAILED,
    OUTCOME_SKIPPED,
    OUTCOME_VIEW,
    result_word,
)
from meshd.prepare.worker import PrepareWorker

MS = 1_000_000
MakePool = Callable[..., Any]


class Harness:
    """A worker of prepare seat 0, and the I/O ends of its rings."""

    def __init__(self, pool: Any, supervisor_pid: int | None = None) -> None:
        self.pool = pool
        self.doors = [pool.door(seat) for seat in range(pool.topology.io_seats)]
        self.ran: list[str] = []
        self.errors: list[BaseException] = []
        self.during: Callable[[str], None] = lambda text: None
        self.flush_metrics: Callable[[], object] = lambda: None
        self.row = pool.board.row(pool.topology.board_prepare(0))
        self.row.open(Role.PREPARE, 0, os.getpid(), "")
        self.retire_word = pool.layout.retire_word(0)
        self.clock: Callable[[], int] = pool.clock
        self.supervisor_pid = supervisor_pid or os.getpid()
        pool.hand_workers()

    def leave(self) -> None:
        self.pool.rings.words[self.retire_word] = os.getpid()

    def run_job(
        self,
        job_word: int,
        body: memoryview,
        slab: memoryview,
        view_offset: int,
        view_capacity: int,
        should_stop: Callable[[], bool],
    ) -> int:
        text = bytes(body).decode().rstrip()
        self.ran.append(text)
        self.during(text)
        if text == "leave":
            self.leave()
        if text == "raise":
            raise BaseException("a panic")
        slab[view_offset : view_offset + len(text)] = text.encode()
        return result_word(OUTCOME_VIEW, len(text))

    def push(self, text: str, seat: int = 0, **changes: int) -> None:
        """Put a job on the ring of one I/O seat, without its client."""
        data = text.encode()
        slot = self.doors[seat].slab.reserve(len(data))
        slot.body[: len(data)] = data
        words = {"sequence": 1, "start_by_ns": 2**62, "finish_by_ns": 2**62} | changes
        end = self.doors[seat].client._lanes[0].end
        index = end.push(
            words["sequence"],
            slot.place,
            len(data),
            words["start_by_ns"],
            0,
            words["finish_by_ns"],
        )
        assert index >= 0

    def outcomes(self, seat: int = 0) -> list[tuple[int, int]]:
        """Outcome and length of every completion."""
        end = self.doors[seat].client._lanes[0].end
        outcomes = []
        while end.pop():
            outcomes.append((end.outcome, end.view_length))
        return outcomes

    def rung(self, seat: int) -> int:
        try:
            return os.eventfd_read(self.pool.io_bells[seat])
        except BlockingIOError:
            return 0

    def run(self) -> None:
        worker = PrepareWorker(
            self.pool.topology,
            0,
            self.pool.rings,
            self.pool.slabs,
            self.pool.board,
            self.pool.bells[0],
            self.pool.io_bells,
            self.run_job,
            self.errors.append,
            self.supervisor_pid,
            lambda: self.clock(),
            lambda: self.ran.append("log reopened"),
            lambda: self.flush_metrics(),
        )
        worker.run()


@pytest.fixture
def harness(make_pool: MakePool) -> Harness:
    return Harness(make_pool(workers=1, io_processes=1))  # two I/O seats


def test_io_processes_are_served_in_turn_one_job_each(harness: Harness) -> None:
    for text in ("a1", "a2", "a3", "a4"):
        harness.push(text, 0)
    for text in ("b1", "b2", "leave"):
        harness.push(text, 1)
    harness.run()
    assert harness.ran == ["a1", "b1", "a2", "b2", "a3", "leave"]
    assert harness.outcomes(0) == [(OUTCOME_VIEW, 2)] * 3
    assert harness.outcomes(1) == [(OUTCOME_VIEW, 2), (OUTCOME_VIEW, 2), (OUTCOME_VIEW, 5)]


def test_an_exception_fails_its_job_alone(harness: Harness) -> None:
    for text in ("raise", "leave"):
        harness.push(text)
    harness.run()
    assert harness.outcomes() == [(OUTCOME_FAILED, 0), (OUTCOME_VIEW, 5)]
    assert [str(error) for error in harness.errors] == ["a panic"]


def test_withdrawn_and_late_jobs_never_run_and_are_answered(harness: Harness) -> None:
    harness.push("withdrawn", sequence=5)
    harness.push("late", start_by_ns=harness.pool.clock())
    harness.push("leave")
    harness.doors[0].client._lanes[0].end.withdraw(0, 5)
    harness.run()
    assert harness.ran == ["leave"]
    assert harness.outcomes() == [(OUTCOME_SKIPPED, 0), (OUTCOME_SKIPPED, 0), (OUTCOME_VIEW, 5)]


def test_jobs_of_a_dead_io_process_never_run(harness: Harness) -> None:
    harness.push("orphan", 1)
    harness.push("leave", 0)
    harness.pool.board.row(harness.pool.topology.board_io(1)).close()
    harness.push("more", 0)
    harness.run()
    assert harness.ran == ["leave"]
    harness.pool.rings.words[harness.retire_word] = 0
    harness.push("leave", 0)
    harness.run()
    assert harness.ran == ["leave", "more", "leave"]
    assert harness.outcomes(1) == [(OUTCOME_SKIPPED, 0)]


def test_a_batch_of_results_rings_its_io_process_once(harness: Harness) -> None:
    for text in ("a1", "a2", "a3", "leave"):
        harness.push(text, 0)
    harness.run()
    assert (harness.rung(0), harness.rung(1)) == (1, 0)


def test_a_result_is_told_before_a_long_job_starts(harness: Harness) -> None:
    told = []
    harness.during = lambda text: told.append(harness.rung(0)) if text == "long" else None
    harness.push("short", 0)
    harness.push("long" + " " * 20_000, 0)
    harness.push("leave", 0)
    harness.run()
    assert told and told[0] >= 1


def test_a_result_is_told_when_its_ring_is_empty_and_others_go_on(harness: Harness) -> None:
    told = []
    harness.during = lambda text: told.append(harness.rung(1))
    harness.push("b1", 1)
    for text in ("a1", "a2", "leave"):
        harness.push(text, 0)
    harness.run()
    assert harness.ran == ["a1", "b1", "a2", "leave"]
    assert told == [0, 0, 1, 0]


def test_a_result_is_told_after_100_us_even_if_its_ring_is_not_empty(harness: Harness) -> None:
    told = []

    def during(text: str) -> None:
        told.append(harness.rung(0))
        harness.pool.time[0] += 60_000

    harness.during = during
    for text in ("a1", "a2", "a3", "leave"):
        harness.push(text, 0)
    harness.run()
    assert told == [0, 0, 0, 1]


def test_a_worker_that_goes_to_sleep_rings_whoever_has_something_waiting(harness: Harness) -> None:
    harness.pool.rings.words[harness.pool.layout.waiting_word(1)] = 3
    seen = []

    def clock() -> int:  # first called after the sleep
        seen.append((harness.rung(0), harness.rung(1)))
        harness.leave()
        return 1

    harness.clock = clock
    harness.run()
    assert seen == [(0, 1)]


def test_those_whose_jobs_a_long_job_leaves_waiting_are_rung(harness: Harness) -> None:
    told = []
    harness.during = lambda text: told.append(harness.rung(1))
    harness.push("long" + " " * 20_000, 0)
    harness.push("b1", 1)
    harness.push("leave", 1)
    harness.run()
    assert told[0] == 1


def test_the_board_shows_the_running_job_and_then_an_idle_worker(harness: Harness) -> None:
    seen = []
    harness.during = lambda text: seen.append((harness.row.busy, harness.row.job_deadline_ns))
    harness.push("leave", finish_by_ns=12345)
    harness.run()
    assert seen == [(1, 12345)]
    assert (harness.row.busy, harness.row.job_deadline_ns) == (0, 0)


def test_the_board_tells_long_jobs_from_short_ones(harness: Harness) -> None:
    seen = []
    harness.during = lambda text: seen.append(harness.row.busy)
    harness.push("long" + " " * LONG_BODY)
    harness.push("short")
    harness.push("leave")
    harness.run()
    assert seen == [BUSY_LONG, BUSY, BUSY]


def test_a_worker_reopens_its_log_between_two_jobs_when_it_is_asked(harness: Harness) -> None:
    words, word = harness.pool.rings.words, harness.pool.layout.log_turn_word(0)
    words[word] = 4  # before its birth: its log is new

    def during(text: str) -> None:
        words[word] += text == "ask"
        if text == "b":
            harness.pool.time[0] += 100 * MS

    harness.during = during
    for text in ("a", "ask", "b", "c", "leave"):
        harness.push(text)
    harness.run()
    assert harness.ran == ["a", "ask", "b", "log reopened", "c", "leave"]


def test_metrics_are_written_ten_times_a_second_under_load_and_when_nothing_comes(harness: Harness) -> None:
    written: list[int] = []
    harness.flush_metrics = lambda: written.append(len(harness.ran))

    def during(text: str) -> None:
        harness.pool.time[0] += 30 * MS

    harness.during = during
    for number in range(8):
        harness.push(str(number))
    harness.push("leave")
    harness.run()
    assert written == [0, 4, 8, 9], "before the first job, each 100 ms, and at the end"
    written.clear()
    harness.flush_metrics = lambda: (written.append(len(harness.ran)), harness.leave())
    harness.pool.rings.words[harness.retire_word] = 0
    harness.run()
    assert written == [9, 9], "after a while without any job, and at the end"


def test_a_worker_leaves_when_the_supervisor_is_gone(make_pool: MakePool) -> None:
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    harness = Harness(make_pool(workers=1), supervisor_pid=child)
    harness.push("last")
    harness.run()
    assert harness.ran == ["last"]
