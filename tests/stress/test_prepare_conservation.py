"""Submitted = sum of outcomes, whatever happens: real workers and I/O processes, killed, stopped, cancelled.

A leader forks three workers. Two I/O processes, forked here, submit jobs of all kinds with short time-outs
and a small capacity, cancel some at random instants, and count into real metric cells. Workers are killed and
stopped; I/O processes are killed, and have successors in the same seat. At rest the books must balance:
submissions = runs + errors + jobs that died with their I/O process; every slot is free, every gauge 0.
"""

from __future__ import annotations

import contextlib
import os
import random
import select
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from meshd.control import Role, State
from meshd.controller.pool_watch import PoolWatch
from meshd.errors import MeshError
from meshd.io.measure import PrepareCounters
from meshd.memory import Segment
from meshd.metrics.catalog import PREPARE_CODES, build_catalog
from meshd.metrics.cells import MetricRow, segment_size
from meshd.metrics.job_balance import JobBalance
from meshd.metrics.table import MetricTable, Totals
from tests.prepare.conftest import FrontDoor, Pool, make_pool

__all__ = ["make_pool"]

CATALOG = build_catalog()
WORKERS, IO_PROCESSES = 3, 2
KINDS = ("ok:", "raise:", "refuse:", "fail:", "slow:", "die-once:", "die:")
WEIGHTS = (60, 2, 4, 2, 12, 0.02, 0)  # a group whose workers die too often is made to wait
POISON = b"die:"  # once in each seat, and shorter than any other body
SIZES = (10, 1000, 30_000, 100_000, 400_000)


class Books:
    """The metric cells of the node, and what the controller reads out of them."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        rows = pool.topology.metric_rows
        self.cells = Segment.create("metrics", segment_size(rows))
        self.balance = JobBalance(self.cells, CATALOG)
        self.watch = PoolWatch(pool.topology, pool.board, pool.rings, self.balance)
        self.table = MetricTable(self.cells, rows, CATALOG)

    def totals(self) -> Totals:
        board = self.pool.board
        return self.table.sum_rows({row.seat for row in board.rows() if row.is_alive})

    @property
    def submitted(self) -> float:
        return self.totals().value("mesh_prepare_jobs_total")

    @property
    def outcomes(self) -> float:
        totals = self.totals()
        errors = sum(totals.value("mesh_prepare_errors_total", code) for code in PREPARE_CODES.split())
        return errors + runs_of(totals) + self.watch.lost_jobs()


def runs_of(totals: Totals) -> float:
    """The count of the histogram: its buckets, without the sum at the end."""
    return sum(totals.series["mesh_prepare_run_seconds"][()][:-1])


class IoLife:
    """The life of one I/O process: submits until it is told to drain, then waits for all its jobs."""

    def __init__(self, books: Books, seat: int, seed: int) -> None:
        pool = books.pool
        self.rng = random.Random(seed)
        self.row = pool.board.row(pool.topology.board_io(seat))
        self.metrics = MetricRow(books.cells, self.row.seat, CATALOG)
        lost = books.balance.open_jobs(self.row.seat)
        self.door = FrontDoor(pool, seat, time.monotonic_ns, lost, metrics=PrepareCounters(self.metrics))
        self.open: set[Any] = set()
        self.row.state = State.READY

    def run(self, drain: int, deadline: float) -> int:
        """Return 0 if everything came back, once ``drain`` is readable."""
        if self.row.epoch == 0:
            self.open.add(self.door.submit(POISON))
        while not select.select([drain], [], [], 0)[0]:
            self.submit_some()
            self.live(self.rng.random() * 0.01)
        while self.open and time.monotonic() < deadline:
            self.live(0.02)
        while self.door.slab.in_use_bytes and time.monotonic() < deadline:
            self.live(0.02)  # withdrawn descriptors of stopped workers
        self.door.client.check(time.monotonic_ns())
        self.metrics.flush()
        return 0 if not self.open and not self.door.slab.in_use_bytes else 1

    def submit_some(self) -> None:
        rng = self.rng
        for _ in range(rng.choice((1, 1, 3, 25))):
            kind = rng.choices(KINDS, WEIGHTS)[0]
            slow_s = 0.6 if rng.random() < 0.02 else 0.1 * rng.random()
            text = kind + (f"{slow_s:.3f}" if kind == "slow:" else "x")
            body = text.encode().ljust(rng.choice(SIZES))
            with contextlib.suppress(MeshError):
                self.open.add(self.door.submit(body))
        for job in list(self.open):
            if rng.random() < 0.02 and job.body_length > len(POISON):
                self.cancel(job)

    def cancel(self, job: Any) -> None:
        if not job.is_terminal:
            self.door.client.cancel(job)
            job.release_slot()
            self.open.discard(job)

    def live(self, seconds: float) -> None:
        self.door.client.flush_doorbells()
        if select.select([self.door.bell], [], [], seconds)[0]:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self.door.bell)
            self.door.client.drain_completions()
        self.door.client.check(time.monotonic_ns())
        self.open = {job for job in self.open if not job.is_terminal}
        if self.rng.random() < 0.3:
            self.metrics.flush()


class IoSeat:
    """What the supervisor does for one seat: starts a process, buries it, starts a successor."""

    def __init__(self, books: Books, seat: int) -> None:
        self.books, self.seat = books, seat
        self.row = books.pool.board.row(books.pool.topology.board_io(seat))
        self.drain = os.eventfd(0)
        self.pid = 0

    def start(self, seed: int, deadline: float) -> None:
        self.row.open(Role.IO, self.seat, 0, "")
        self.pid = os.fork()
        if self.pid == 0:
            code = 2
            try:
                code = IoLife(self.books, self.seat, seed).run(self.drain, deadline)
            finally:
                os._exit(code)
        self.row.pid = self.pid

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        self.row.close()

    def end(self) -> int:
        os.eventfd_write(self.drain, 1)
        _, status = os.waitpid(self.pid, 0)
        os.close(self.drain)
        return os.waitstatus_to_exitcode(status)


@pytest.mark.parametrize(
    ("seed", "seconds"),
    [
        (1, 5.0),
        (2, 5.0),
        pytest.param(3, 60.0, marks=[pytest.mark.slow, pytest.mark.timeout(300)]),
        pytest.param(4, 60.0, marks=[pytest.mark.slow, pytest.mark.timeout(300)]),
    ],
)
def test_every_job_has_exactly_one_outcome_whatever_dies(
    make_pool: Callable[..., Pool], seed: int, seconds: float
) -> None:
    rng = random.Random(seed)
    pool = make_pool(
        workers=WORKERS, io_processes=IO_PROCESSES, prepare_queue_capacity=40,
        prepare_queue_timeout_ms=150, prepare_timeout_ms=400,
    )  # fmt: skip
    books = Books(pool)
    pool.start_leader()
    end_at = time.monotonic() + seconds
    deadline = end_at + 60
    seats = [IoSeat(books, seat) for seat in range(IO_PROCESSES)]
    for seat in seats:
        seat.start(rng.randrange(1 << 30), deadline)
    kills = 0
    before: dict[str, float] = {}
    while time.monotonic() < end_at:
        time.sleep(rng.random() * 0.3)
        victim = rng.random()
        if victim < 0.1:
            strike_worker(pool, rng, signal.SIGKILL)
        elif victim < 0.4:
            strike_worker(pool, rng, signal.SIGSTOP)
        elif victim < 0.7:
            seat = rng.choice(seats)
            seat.kill()
            kills += 1
            seat.start(rng.randrange(1 << 30), deadline)
        before = check_never_falls(books, before)
    assert kills, "no I/O process was killed"
    assert [seat.end() for seat in seats] == [0] * IO_PROCESSES, "a job or a slot did not come back"
    check_at_rest(books)


def strike_worker(pool: Pool, rng: random.Random, number: int) -> None:
    pid = rng.choice(pool.worker_pids())
    if not pid:
        return
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
        if number == signal.SIGSTOP:
            time.sleep(rng.random() * 0.3)
            os.kill(pid, signal.SIGCONT)


def check_never_falls(books: Books, before: dict[str, float]) -> dict[str, float]:
    totals = books.totals()
    now = {
        "submitted": totals.value("mesh_prepare_jobs_total"),
        "runs": runs_of(totals),
        "lost": books.watch.lost_jobs(),
    }
    assert all(now[name] >= value for name, value in before.items()), (before, now)
    return now


def check_at_rest(books: Books) -> None:
    totals = books.totals()
    errors = {code: totals.value("mesh_prepare_errors_total", code) for code in PREPARE_CODES.split()}
    lost = books.watch.lost_jobs()
    assert books.submitted == books.outcomes, (books.submitted, runs_of(totals), errors, lost)
    seen = {code for code, count in errors.items() if count}
    assert len(seen) >= 4 and runs_of(totals), f"the mix was not mixed: {errors}, lost {lost}"
    for gauge in ("mesh_prepare_queued_jobs", "mesh_prepare_dispatched_jobs"):
        assert totals.value(gauge) == 0, gauge
    layout, words = books.pool.layout, books.pool.rings.words
    assert [words[layout.waiting_word(seat)] for seat in range(IO_PROCESSES)] == [0] * IO_PROCESSES
    assert books.watch.reserved_workers() == 0
