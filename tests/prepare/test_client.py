"""The client's decisions, with workers played by hand and a clock that stands still."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from meshd.errors import MeshError
from meshd.prepare.client import Job, default_capacity
from meshd.prepare.layout import OUTCOME_FAILED, OUTCOME_REFUSED, OUTCOME_SKIPPED, OUTCOME_VIEW
from tests.fakes.strands import run_strand

MS = 1_000_000
MakePool = Callable[..., Any]


def test_a_job_comes_back_as_the_view_of_its_body(make_pool: MakePool) -> None:
    pool = make_pool(workers=1)
    (worker,) = pool.hand_workers()
    door = pool.door()
    job = door.submit(b"hello")
    assert worker.step() == "hello"
    door.client.drain_completions()
    assert door.answer(job) == "hello"
    assert (door.metrics.submitted, len(door.metrics.runs), len(door.metrics.waits)) == (1, 1, 1)
    assert door.slab.in_use_bytes == 0


def test_whoever_is_told_of_a_result_may_drain_and_submit_without_nesting(make_pool: MakePool) -> None:
    pool = make_pool(workers=2)
    workers = pool.hand_workers()
    door = pool.door()
    told: list[str] = []

    async def wait(job: Job, name: str, again: str | None) -> None:
        await job
        told.append(f"{name} begins")
        door.client.drain_completions()
        if again is not None:
            submit(again)
        told.append(f"{name} ends")

    def submit(name: str, again: str | None = None) -> None:
        slot = door.slab.reserve(1)
        slot.body[:1] = name.encode()
        job = Job(1, 0, slot, 1)
        run_strand(wait(job, name, again))
        door.client.submit(job)

    submit("a", "c")
    submit("b")
    assert [worker.step() for worker in workers] == ["a", "b"]
    door.client.drain_completions()
    assert told == ["a begins", "a ends", "b begins", "b ends"]
    assert workers[0].step() == "c"
    door.client.drain_completions()
    assert told[4:] == ["c begins", "c ends"] and not door.client.has_jobs


def test_a_refusal_of_the_job_is_its_result_and_counts_as_a_run(make_pool: MakePool) -> None:
    pool = make_pool(workers=1)
    (worker,) = pool.hand_workers()
    door = pool.door()
    job = door.submit(b"x")
    worker.finish(worker.take(), OUTCOME_REFUSED)
    door.client.drain_completions()
    assert door.answer(job) == "invalid_request"
    assert door.metrics.rejections == {"invalid_request": 1}
    assert len(door.metrics.runs) == 1 and not door.metrics.errors


def test_a_failed_job_is_prepare_failed(make_pool: MakePool) -> None:
    pool = make_pool(workers=1)
    (worker,) = pool.hand_workers()
    door = pool.door()
    job = door.submit(b"x")
    worker.finish(worker.take(), OUTCOME_FAILED)
    door.client.drain_completions()
    assert door.answer(job) == "prepare_failed"
    assert door.metrics.outcomes == 1


def test_bytes_that_are_no_result_are_prepare_failed(make_pool: MakePool) -> None:
    pool = make_pool(workers=1)
    (worker,) = pool.hand_workers()
    door = pool.door()
    jobs = [door.submit(b"x"), door.submit(b"y")]
    record = worker.take()
    worker.end.complete(record[0], 0, 64, 0, 0)
    record = worker.take()
    worker.end.complete(record[0], 0, 1 << 40, 0, 0)
    door.client.drain_completions()
    assert [door.answer(job) for job in jobs] == ["prepare_failed", "prepare_failed"]


def test_a_free_worker_is_preferred_and_small_jobs_stack_only_when_none_is_free(make_pool: MakePool) -> None:
    pool = make_pool(workers=2)
    first, second = pool.hand_workers()
    door = pool.door()
    for body in (b"a", b"b", b"c", b"d"):
        door.submit(body)
    assert [first.step(), first.step(), first.step()] == ["a", "c", None]
    assert [second.step(), second.step(), second.step()] == ["b", "d", None]


def test_a_ring_holds_64_kib_of_small_bodies_and_a_large_one_only_alone(make_pool: MakePool) -> None:
    pool = make_pool(workers=1)
    (worker,) = pool.hand_workers()
    door = pool.door()
    for mark in (b"a", b"b", b"c"):
        door.submit(mark * (30 << 10))
    door.submit(b"d" * (65 << 10))
    door.submit(b"e")
    taken = []
    for expected in ("ab", "c", "d", "e"):
        while (body := worker.step()) is not None:
            taken.append(body[0])
        assert "".join(taken) == expected
        taken.clear()
        door.client.drain_completions()
    assert len(door.results) == 5


def test_a_ring_never_holds_more_than_16(make_pool: MakePool) -> None:
    pool = make_pool(workers=1)
    (worker,) = pool.hand_workers()
    door = pool.door()
    jobs = [door.submit(b"%d" % n) for n in range(40)]
    while len(door.results) < 40:
        count = 0
        while worker.step() is not None:
            count += 1
        assert 0 < count <= 16
        door.client.drain_completions()
    assert door.order == jobs


def test_the_capacity_counts_jobs_behind_others_on_a_ring_too(make_pool: MakePool) -> None:
    pool = make_pool(workers=1, prepare_queue_capacity=2)
    (worker,) = pool.hand_workers()
    door = pool.door()
    jobs = [door.submit(b"x") for _ in range(3)]
    with pytest.raises(MeshError) as caught:
        door.submit(b"x")
    assert (caught.value.code, caught.value.status, caught.value.retry_after_s) == (
        "prepare_queue_full",
        503,
        1,
    )
    worker.take()  # the first two are claimed now, one waits
    record = worker.end.take()
    assert record is not None
    jobs.append(door.submit(b"x"))
    with pytest.raises(MeshError):
        door.submit(b"x")
    assert door.metrics.submitted == 6 and door.metrics.errors == {"prepare_queue_full": 2}


def test_the_capacity_is_of_the_node_and_forgets_the_dead(make_pool: MakePool) -> None:
    pool = make_pool(workers=1, io_processes=1, prepare_queue_capacity=2)
    pool.hand_workers()
    one, two = pool.door(0), pool.door(1)
    for _ in range(3):
        one.submit(b"x")
    two.client.check(pool.clock())
    two.submit(b"y")  # its own ring is empty and nothing says that the worker is busy
    with pytest.raises(MeshError):
        two.submit(b"y")
    pool.board.row(pool.topology.board_io(0)).close()
    two.client.check(pool.clock())
    two.submit(b"y")


def test_capacity_0_never_waits(make_pool: MakePool) -> None:
    pool = make_pool(workers=1, prepare_queue_capacity=0)
    (worker,) = pool.hand_workers()
    door = pool.door()
    door.submit(b"x")
    with pytest.raises(MeshError, match="wait"):
        door.submit(b"x")
    worker.step()
    door.client.drain_completions()
    door.submit(b"x")


def test_a_cancelled_job_that_is_not_claimed_never_runs_and_keeps_its_slot_until_it_is_skipped(
    make_pool: MakePool,
) -> None:
    pool = make_pool(workers=1)
    (worker,) = pool.hand_workers()
    door = pool.door()
    job = door.submit(b"gone")
    door.client.cancel(job)
    job.release_slot()
    assert door.slab.in_use_bytes > 0
    assert worker.step() == "skipped gone"
    door.client.drain_completions()
    assert door.slab.in_use_bytes == 0
    assert door.results == {} and door.metrics.errors == {"prepare_cancelled": 1}


def test_a_cancelled_waiting_job_leaves_the_queue(make_pool: MakePool) -> None:
    pool = make_pool(workers=1)
    (worker,) = pool.hand_workers()
    door = pool.door()
    first = door.submit(b"a" * (70 << 10))
    second, third = door.submit(b"b"), door.submit(b"c")
    door.client.cancel(second)
    second.release_slot()
    worker.step()
    door.client.drain_completions()
    assert worker.step() == "c" and worker.step() is None
    door.client.drain_completions()
    assert door.order == [first, third]


def test_a_cancelled_running_job_is_told_to_stop_and_its_late_result_is_dropped(make_pool: MakePool) -> None:
    pool = make_pool(workers=1)
    (worker,) = pool.hand_workers()
    door = pool.door()
    job = door.submit(b"x")
    record = worker.take()
    assert not worker.end.should_stop()
    door.client.cancel(job)
    door.client.cancel(job)
    assert worker.end.should_stop()
    worker.finish(record)
    door.client.drain_completions()
    assert door.results == {} and door.metrics.outcomes == 1
    job.release_slot()
    assert door.slab.in_use_bytes == 0


def test_a_job_not_claimed_in_time_is_prepare_queue_timeout_and_never_runs(make_pool: MakePool) -> None:
    pool = make_pool(workers=1)
    (worker,) = pool.hand_workers()
    door = pool.door()
    dispatched, waiting = door.submit(b"x"), door.submit(b"y" * (70 << 10))
    pool.time[0] += 1999 * MS
    door.client.check(pool.clock())
    assert door.results == {}
    pool.time[0] += MS
    door.client.check(pool.clock())
    assert door.answer(dispatched) == door.answer(waiting) == "prepare_queue_timeout"
    assert worker.step() == "skipped x" and worker.step() is None
    assert door.metrics.errors == {"prepare_queue_timeout": 2}


def test_a_job_that_the_worker_finds_too_old_is_prepare_queue_timeout(make_pool: MakePool) -> None:
    pool = make_pool(workers=1)
    (worker,) = pool.hand_workers()
    door = pool.door()
    job = door.submit(b"x")
    pool.time[0] += 2000 * MS
    assert worker.step() == "skipped x"
    door.client.drain_completions()
    assert door.answer(job) == "prepare_queue_timeout"


def test_a_running_job_past_its_deadline_is_prepare_timeout_at_once(make_pool: MakePool) -> None:
    pool = make_pool(workers=1)
    (worker,) = pool.hand_workers()
    door = pool.door()
    job = door.submit(b"x")
    record = worker.take()
    pool.time[0] += 9999 * MS
    door.client.check(pool.clock())
    assert door.results == {}
    pool.time[0] += MS
    door.client.check(pool.clock())
    assert door.answer(job) == "prepare_timeout" and worker.end.should_stop()
    worker.finish(record)
    door.client.check(pool.clock())
    assert door.metrics.outcomes == 1 and door.slab.in_use_bytes == 0


@pytest.mark.parametrize(
    "outcome", [OUTCOME_VIEW, OUTCOME_FAILED, OUTCOME_SKIPPED], ids=["ran", "failed", "stopped"]
)
@pytest.mark.parametrize("is_cancelled", [True, False], ids=["cancelled", "timed out"])
def test_the_wait_of_a_job_that_was_claimed_counts_once_though_its_result_is_dropped(
    make_pool: MakePool, outcome: int, is_cancelled: bool
) -> None:
    pool = make_pool(workers=1)
    (worker,) = pool.hand_workers()
    door = pool.door()
    job = door.submit(b"x")
    pool.time[0] += 7 * MS
    record = worker.take()
    claimed_ns = pool.clock()
    pool.time[0] += 10_000 * MS
    if is_cancelled:
        door.client.cancel(job)
    door.client.check(pool.clock())
    assert door.metrics.waits == []  # known when the worker answers
    worker.end.complete(record[0], outcome, 0, claimed_ns, pool.clock())
    door.client.check(pool.clock())
    assert door.metrics.waits == [pytest.approx(0.007)]
    assert door.metrics.runs == [] and door.metrics.outcomes == 1


def test_the_wait_of_a_job_that_never_ran_does_not_count(make_pool: MakePool) -> None:
    pool = make_pool(workers=1)
    (worker,) = pool.hand_workers()
    door = pool.door()
    late, left = door.submit(b"x"), door.submit(b"y")
    door.client.cancel(left)
    pool.time[0] += 2000 * MS
    assert worker.step() == "skipped x" and worker.step() == "skipped y"
    door.client.drain_completions()
    assert door.answer(late) == "prepare_queue_timeout" and door.metrics.waits == []


def test_a_result_that_is_there_wins_over_the_deadline(make_pool: MakePool) -> None:
    pool = make_pool(workers=1)
    (worker,) = pool.hand_workers()
    door = pool.door()
    job = door.submit(b"in time")
    worker.step()
    pool.time[0] += 20_000 * MS
    door.client.check(pool.clock())
    assert door.answer(job) == "in time"


def test_a_worker_that_falls_idle_takes_half_of_what_others_have_not_claimed(make_pool: MakePool) -> None:
    pool = make_pool(workers=2)
    first, second = pool.hand_workers()
    door = pool.door()
    for body in (b"a", b"b", b"c", b"d", b"e", b"f"):
        door.submit(body)
    record = first.take()  # "a"; "c" and "e" wait behind it
    while second.step() is not None:
        pass
    door.client.drain_completions()
    assert second.step() == "e" and second.step() is None
    door.client.drain_completions()
    assert second.step() == "c" and second.step() is None
    first.finish(record)
    assert [first.step(), first.step(), first.step()] == ["skipped c", "skipped e", None]
    door.client.drain_completions()
    assert len(door.results) == 6 and door.metrics.outcomes == 6
    assert door.slab.in_use_bytes == 0


def test_a_fresh_descriptor_of_a_worker_that_wakes_up_is_not_taken_away(make_pool: MakePool) -> None:
    pool = make_pool(workers=2)
    first, second = pool.hand_workers()
    door = pool.door()
    door.submit(b"a")
    door.client.drain_completions()
    assert second.step() is None
    pool.time[0] += 6 * MS
    door.client.check(pool.clock())
    assert second.step() == "a", "a stopped worker keeps no job from a free one"
    assert first.step() == "skipped a"


def test_a_withdrawn_descriptor_that_ran_all_the_same_makes_the_job_run_again_alone(
    make_pool: MakePool,
) -> None:
    pool = make_pool(workers=2)
    first, second = pool.hand_workers()
    door = pool.door()
    door.submit(b"a"), door.submit(b"b")
    job = door.submit(b"contested")  # behind "a"
    blocked = first.take()
    second.step()
    door.client.drain_completions()  # moves "contested" to the second worker
    first.finish(blocked)
    torn = first.take()  # claimed in the nanoseconds before the withdrawal was visible
    stolen = second.take()
    second.finish(stolen)
    door.client.drain_completions()
    assert job not in door.results, "the first worker may be writing into the view"
    first.finish(torn, model="late")
    door.client.drain_completions()
    assert first.step() == "contested" or second.step() == "contested"
    door.client.drain_completions()
    assert door.answer(job) == "contested"
    assert door.metrics.outcomes == 3 and door.slab.in_use_bytes == 0


def test_a_withdrawn_descriptor_that_is_just_being_skipped_only_delays_the_result(
    make_pool: MakePool,
) -> None:
    pool = make_pool(workers=2)
    first, second = pool.hand_workers()
    door = pool.door()
    door.submit(b"a"), door.submit(b"b")
    job = door.submit(b"stolen")
    blocked = first.take()
    second.step()
    door.client.drain_completions()
    first.finish(blocked)
    claimed = first.take()
    assert first.end.is_void()
    assert second.step() == "stolen"
    door.client.drain_completions()
    assert job not in door.results
    first.finish(claimed, OUTCOME_SKIPPED)
    door.client.drain_completions()
    assert door.answer(job) == "stolen"
    assert first.step() is None and second.step() is None


def test_a_job_whose_worker_died_is_retried_once_before_all_others(make_pool: MakePool) -> None:
    pool = make_pool(workers=2)
    first, second = pool.hand_workers()
    door = pool.door()
    job, other = door.submit(b"a" * (70 << 10)), door.submit(b"b" * (70 << 10))
    waiting = door.submit(b"c" * (70 << 10))
    first.take()
    first.die()
    door.client.drain_completions()
    assert door.metrics.retries == 1 and door.results == {}
    second.step()
    door.client.drain_completions()
    assert second.step() == "a" * (70 << 10)
    door.client.drain_completions()
    second.step()
    door.client.drain_completions()
    assert door.order == [other, job, waiting]
    assert not door.metrics.errors


def test_a_body_that_kills_twice_is_prepare_worker_died(make_pool: MakePool) -> None:
    pool = make_pool(workers=2)
    first, second = pool.hand_workers()
    door = pool.door()
    job = door.submit(b"poison")
    first.take()
    first.die()
    door.client.drain_completions()
    second.take()
    second.die()
    door.client.drain_completions()
    assert door.answer(job) == "prepare_worker_died"
    assert door.metrics.errors == {"prepare_worker_died": 1} and door.metrics.retries == 1
    assert door.slab.in_use_bytes == 0


def test_the_queue_timeout_does_not_apply_to_a_retry_but_the_deadline_does(make_pool: MakePool) -> None:
    pool = make_pool(workers=1)
    (worker,) = pool.hand_workers()
    door = pool.door()
    job = door.submit(b"x")
    worker.take()
    pool.time[0] += 1000 * MS
    worker.die()
    door.client.drain_completions()
    pool.time[0] += 8000 * MS
    door.client.check(pool.clock())
    assert door.results == {}
    pool.time[0] += 1000 * MS
    door.client.check(pool.clock())
    assert door.answer(job) == "prepare_worker_died"


def test_a_death_before_the_claim_moves_the_job_and_uses_up_no_retry(make_pool: MakePool) -> None:
    pool = make_pool(workers=2)
    first, second = pool.hand_workers()
    door = pool.door()
    job = door.submit(b"x")
    first.die()
    door.client.check(pool.clock())
    assert second.step() == "x"
    door.client.drain_completions()
    assert door.answer(job) == "x" and door.metrics.retries == 0
    assert door.slab.in_use_bytes > 0, "the dead worker's ring still names the slot"
    assert first.go_live().step() == "skipped x"
    door.client.drain_completions()
    assert door.slab.in_use_bytes == 0


def test_with_no_other_worker_an_unclaimed_job_stays_for_the_replacement(make_pool: MakePool) -> None:
    pool = make_pool(workers=1)
    (worker,) = pool.hand_workers()
    door = pool.door()
    job = door.submit(b"x")
    worker.die()
    door.client.check(pool.clock())
    assert worker.go_live().step() == "x"
    door.client.drain_completions()
    assert door.answer(job) == "x"


def test_a_completion_published_before_the_death_still_counts(make_pool: MakePool) -> None:
    pool = make_pool(workers=1)
    (worker,) = pool.hand_workers()
    door = pool.door()
    jobs = [door.submit(b"a"), door.submit(b"b")]
    worker.step()
    worker.take()
    worker.die()
    door.client.check(pool.clock())
    assert door.answer(jobs[0]) == "a" and jobs[1] not in door.results


def test_closing_answers_what_has_not_started_and_lets_the_rest_end(make_pool: MakePool) -> None:
    pool = make_pool(workers=1)
    (worker,) = pool.hand_workers()
    door = pool.door()
    running, stacked, waiting = door.submit(b"a"), door.submit(b"b"), door.submit(b"c" * (70 << 10))
    record = worker.take()
    door.client.close()
    assert door.answer(stacked) == door.answer(waiting) == "prepare_pool_closed"
    with pytest.raises(MeshError):
        door.submit(b"d")
    worker.finish(record)
    assert worker.step() == "skipped b" and worker.step() is None
    door.client.drain_completions()
    assert door.answer(running) == "a"
    assert door.metrics.submitted == door.metrics.outcomes == 4


def test_gauges_say_what_waits_and_return_to_zero(make_pool: MakePool) -> None:
    pool = make_pool(workers=1)
    (worker,) = pool.hand_workers()
    door = pool.door()
    for body in (b"a", b"b", b"c" * (70 << 10)):
        door.submit(body)
    door.client.check(pool.clock())
    assert (door.metrics.queued_now, door.metrics.dispatched_now) == (2, 1)
    while len(door.results) < 3:
        worker.step()
        door.client.drain_completions()
    door.client.check(pool.clock())
    assert (door.metrics.queued_now, door.metrics.dispatched_now) == (0, 0)


def test_two_workers_take_a_burst_of_256_short_jobs_with_default_settings(make_pool: MakePool) -> None:
    pool = make_pool(workers=2)
    first, second = pool.hand_workers()
    door = pool.door()
    jobs = [door.submit(b"%d" % n) for n in range(256)]
    while len(door.results) < 256:
        first.step(), second.step()
        door.client.drain_completions()
    assert sorted(int(door.answer(job)) for job in jobs) == list(range(256))
    assert not door.metrics.errors


@pytest.mark.parametrize(("workers", "capacity"), [(0, 256), (1, 256), (4, 256), (5, 320), (64, 4096)])
def test_the_derived_capacity_is_64_a_worker_and_at_least_256(workers: int, capacity: int) -> None:
    assert default_capacity(workers) == capacity


def test_a_full_queue_looks_at_its_completions_before_it_refuses(make_pool: MakePool) -> None:
    pool = make_pool(workers=1, prepare_queue_capacity=2)
    (worker,) = pool.hand_workers()
    door = pool.door()
    jobs = [door.submit(b"x" * (40 << 10)) for _ in range(3)]
    assert len(worker.step() or "") == 40 << 10, "nobody has told the client yet"
    jobs.append(door.submit(b"y"))
    assert len(door.results) == 1 and not door.metrics.errors
    while len(door.results) < 4:
        worker.step()
        door.client.drain_completions()
    assert door.metrics.submitted == door.metrics.outcomes == 4


def test_after_closing_no_job_is_started_again(make_pool: MakePool) -> None:
    pool = make_pool(workers=2)
    first, _ = pool.hand_workers()
    door = pool.door()
    job = door.submit(b"x")
    first.take()
    door.client.close()
    assert door.client.has_jobs
    first.die()
    door.client.drain_completions()
    assert door.answer(job) == "prepare_worker_died"
    assert not door.client.has_jobs


def test_what_predecessors_lost_is_noted_before_the_successor_counts(make_pool: MakePool) -> None:
    pool = make_pool(workers=1)
    layout, words = pool.layout, pool.rings.words
    pool.board.row(pool.topology.board_io(0)).close()
    pool.door(0, lost_jobs=17)
    assert (words[layout.lost_word(0)], words[layout.epoch_word(0)]) == (17, 1)
