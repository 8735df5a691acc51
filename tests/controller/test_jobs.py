"""What is remembered of registrations and removals, and for how long."""

from __future__ import annotations

from meshd.controller.jobs import JOB_KEPT_S, JobBook


class Clock:
    def __init__(self) -> None:
        self.now_s = 50.0

    def __call__(self) -> float:
        return self.now_s


def book() -> tuple[JobBook, Clock]:
    clock = Clock()
    return JobBook(clock, lambda: 1790000000.9), clock


def test_the_latest_state_of_a_job_is_told_with_its_time() -> None:
    jobs, _ = book()
    jobs.note("a", "http://a:1", "pending")
    jobs.note("a", "http://a:1", "failed", "no answer")
    job = jobs.get("a")
    assert job is not None
    assert (job.status, job.message, job.timestamp) == ("failed", "no answer", 1790000000)


def test_a_job_that_has_ended_is_forgotten_after_a_while_and_a_running_one_never() -> None:
    jobs, clock = book()
    jobs.note("ended", "http://a:1", "completed")
    jobs.note("running", "http://b:1", "processing")
    clock.now_s += JOB_KEPT_S - 1
    assert jobs.get("ended") is not None
    clock.now_s += 1
    assert jobs.get("ended") is None and jobs.get("running") is not None


def test_pending_counts_registrations_that_run_and_no_removals() -> None:
    jobs, _ = book()
    jobs.note("a", "http://a:1", "pending")
    jobs.note("b", "http://b:1", "processing")
    jobs.note("c", "http://c:1", "completed")
    jobs.note("d", "http://d:1", "processing", job_type="remove")
    assert jobs.pending == 2
    jobs.forget("a")
    assert jobs.pending == 1 and jobs.get("a") is None
