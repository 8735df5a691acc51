"""The scheduling rule: who is put where, who stands behind whom, and for how long at most."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from meshd.prepare.dispatch import STACK_BYTES
from meshd.prepare.layout import BUSY, BUSY_LONG

MakePool = Callable[..., Any]
LONG = b"L" * (1 << 20)


def run_long(worker: Any, deadline_ns: int = 0) -> Any:
    """Let a worker begin with a long job, as the real one shows it."""
    record = worker.take()
    worker.row.busy = BUSY_LONG
    worker.row.job_deadline_ns = deadline_ns
    return record


def test_small_jobs_go_behind_short_ones_while_another_process_runs_a_long_one(make_pool: MakePool) -> None:
    """The long job's ring is empty for us, and still nobody is put there who has a choice."""
    pool = make_pool(workers=2)
    _, of_other = pool.hand_workers(io_seat=1)
    free, _ = pool.hand_workers()
    one, two = pool.door(0), pool.door(1)
    two.submit(LONG)
    assert run_long(of_other) is not None
    jobs = [one.submit(b"%d" % n) for n in range(8)]
    assert [free.step() for _ in range(8)] == [f"{n}" for n in range(8)]
    one.client.drain_completions()
    assert len(one.results) == len(jobs)


def test_jobs_escape_from_behind_a_long_one_although_no_worker_is_free(make_pool: MakePool) -> None:
    pool = make_pool(workers=2)
    first, second = pool.hand_workers()
    door = pool.door()
    for body in (b"a", b"b", b"c", b"d"):  # a, c to the first, b, d to the second
        door.submit(body)
    second.take()  # it is at work, with d behind
    first.row.busy = BUSY_LONG  # with a job of somebody else; a and c stand behind it
    door.client.drain_completions()
    assert [second.step(), second.step(), second.step()] == ["d", "a", "c"]
    assert [first.step(), first.step()] == ["skipped a", "skipped c"]


def test_nothing_moves_between_two_long_jobs(make_pool: MakePool) -> None:
    pool = make_pool(workers=2)
    first, second = pool.hand_workers()
    door = pool.door()
    for worker in (first, second):
        worker.row.busy = BUSY_LONG
    door.submit(b"a")
    before = [worker.end.is_empty for worker in (first, second)]
    door.client.drain_completions()
    door.client.check(pool.clock())
    assert [worker.end.is_empty for worker in (first, second)] == before
    assert (first if before[1] else second).step() == "a"


def test_behind_long_jobs_alone_the_one_that_has_run_longest_is_chosen(make_pool: MakePool) -> None:
    pool = make_pool(workers=3)
    workers = pool.hand_workers()
    for worker, deadline_ns in zip(workers, (300, 100, 200), strict=True):
        worker.row.busy = BUSY_LONG
        worker.row.job_deadline_ns = deadline_ns
    door = pool.door()
    door.submit(b"a")
    assert [worker.end.is_empty for worker in workers] == [True, False, True]


def test_a_worker_that_falls_idle_gets_what_stands_behind_a_long_job(make_pool: MakePool) -> None:
    pool = make_pool(workers=2)
    first, second = pool.hand_workers()
    for worker in (first, second):
        worker.row.busy = BUSY_LONG
    door = pool.door()
    door.submit(b"a")
    idle = second if not first.end.is_empty else first
    idle.row.busy = 0
    door.client.drain_completions()
    assert idle.step() == "a"


def test_a_long_job_is_never_put_behind_another_of_its_process(make_pool: MakePool) -> None:
    pool = make_pool(workers=2)
    pool.hand_workers()
    door = pool.door()
    for _ in range(6):
        door.submit(LONG)
    assert [len(lane.entries) for lane in door.client._lanes[:2]] == [1, 1]
    assert door.client._dispatcher.queued == 4


@pytest.mark.parametrize("body", [b"x", b"x" * (20 << 10), LONG])
def test_a_free_worker_is_always_preferred(make_pool: MakePool, body: bytes) -> None:
    pool = make_pool(workers=3)
    workers = pool.hand_workers()
    workers[0].row.busy, workers[1].row.busy = BUSY, BUSY_LONG
    door = pool.door()
    door.submit(body)
    assert [worker.end.is_empty for worker in workers] == [True, True, False]


def test_the_bound_of_a_job_is_the_running_one_and_one_of_each_other_process(make_pool: MakePool) -> None:
    """Two floods of long jobs, one small job of a third process, one worker: two jobs pass before it."""
    pool = make_pool(workers=1, io_processes=2)  # four I/O seats
    ends = [pool.hand_workers(seat)[0] for seat in range(3)]
    doors = [pool.door(seat) for seat in range(3)]
    for door in doors[:2]:
        for _ in range(5):
            door.submit(LONG)
    order: list[int] = []
    turn = 0
    record = run_long(ends[0])
    doors[2].submit(b"small")
    while 2 not in order:  # the worker's round: one job from each ring in turn, see test_worker.py
        order.append(turn)
        ends[turn].finish(record)
        doors[turn].client.drain_completions()
        record = None
        while record is None:
            turn = (turn + 1) % 3
            record = ends[turn].take()
    assert order == [0, 1, 2]


def test_stacked_bodies_of_one_ring_stay_within_64_kib(make_pool: MakePool) -> None:
    pool = make_pool(workers=2)
    pool.hand_workers()
    door = pool.door()
    for size in (30, 30, 30, 30, 10, 10, 2, 1):
        door.submit(b"x" * (size << 10))
    assert all(lane.live_bytes <= STACK_BYTES for lane in door.client._lanes)
