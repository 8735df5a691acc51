"""A preparation pool to test against: one I/O process's client, and workers played by hand or forked."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from meshd.api.view import NEEDS_TOKENS, RoutingView
from meshd.control import BoardRow, ChildLink, ProcessBoard, Role, State, Topology, send_message
from meshd.memory import Segment
from meshd.prepare.client import Job, PrepareClient, PrepareMetrics, Result
from meshd.prepare.codec import encode_refusal
from meshd.prepare.group import PrepareGroup
from meshd.prepare.layout import (
    OUTCOME_FAILED,
    OUTCOME_REFUSED,
    OUTCOME_SKIPPED,
    OUTCOME_VIEW,
    attempt_of,
    create_rings,
    open_layout,
    result_word,
)
from meshd.prepare.ring import Record, WorkerEnd
from meshd.prepare.worker import PrepareWorker
from meshd.slab import SLAB_KIND, BodySlab
from tests.fakes.results import encode_view
from tests.fakes.strands import run_strand

MS = 1_000_000
ENDPOINT = 7


@dataclass
class PoolSettings:
    prepare_queue_capacity: int = -1
    prepare_queue_timeout_ms: int = 2000
    prepare_timeout_ms: int = 10000


@dataclass
class RecordingMetrics:
    """Counts what the client counts."""

    submitted: int = 0
    retries: int = 0
    queued_now: int = -1
    dispatched_now: int = -1
    runs: list[float] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)
    rejections: Counter[str] = field(default_factory=Counter)

    def job_submitted(self) -> None:
        self.submitted += 1

    def queued(self, jobs: int) -> None:
        self.queued_now = jobs

    def dispatched(self, jobs: int) -> None:
        self.dispatched_now = jobs

    def queue_seconds(self, seconds: float) -> None:
        self.waits.append(seconds)

    def run_seconds(self, seconds: float) -> None:
        self.runs.append(seconds)

    def error(self, reason: str) -> None:
        self.errors[reason] += 1

    def rejection(self, code: str) -> None:
        self.rejections[code] += 1

    def retry(self) -> None:
        self.retries += 1

    @property
    def outcomes(self) -> int:
        return len(self.runs) + self.errors.total()


class FrontDoor:
    """One I/O process: its client and what came of its jobs, in order."""

    def __init__(
        self,
        pool: Pool,
        seat: int,
        clock: Callable[[], int],
        lost_jobs: int = 0,
        metrics: PrepareMetrics | None = None,
    ) -> None:
        self.pool = pool
        self.seat = seat
        self.bell = pool.io_bells[seat]
        self.metrics = RecordingMetrics()
        self.slab = BodySlab(pool.slabs[seat], pool.topology.view_bytes)
        self.clock = clock
        self.client = PrepareClient(
            pool.topology,
            seat,
            pool.rings,
            pool.board,
            self.slab,
            pool.bells,
            self.metrics if metrics is None else metrics,
            pool.settings,
            clock,
            lost_jobs,
        )
        self.endpoint_number, self.needs = ENDPOINT, NEEDS_TOKENS
        self.results: dict[Job, Result] = {}
        self.order: list[Job] = []

    def submit(self, body: bytes) -> Job:
        """Submit a job; its slot is given back when its result is there and no worker can touch it."""
        slot = self.slab.reserve(len(body))
        assert slot is not None
        slot.body[: len(body)] = body

        async def wait() -> None:
            result = await job
            assert job not in self.results, "a second result"
            self.results[job] = result
            self.order.append(job)
            job.release_slot()

        job = Job(self.endpoint_number, self.needs, slot, len(body))
        run_strand(wait())
        try:
            self.client.submit(job)
        except BaseException:
            slot.release()
            raise
        return job

    def answer(self, job: Job) -> str:
        """The model of the view, or the code of the error."""
        result = self.results[job]
        return result.model if isinstance(result, RoutingView) else result.code

    def pump(self, until: Callable[[], object], seconds: float = 20.0) -> None:
        """Live like an I/O process until something is true."""
        give_up_at = time.monotonic() + seconds
        next_check = 0.0
        self.client.flush_doorbells()
        while not until():
            assert time.monotonic() < give_up_at, f"not reached: {self.client!r} {self.results}"
            if select.select([self.bell], [], [], 0.02)[0]:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self.bell)
                self.client.drain_completions()
            if time.monotonic() >= next_check:
                self.client.check(self.clock())
                next_check = time.monotonic() + 0.05
            self.client.flush_doorbells()

    def pump_started(self, count: int = 1) -> None:
        """Live until so many gated jobs have begun to run."""
        for _ in range(count):
            self.pump(lambda: select.select([self.pool.started], [], [], 0)[0])
            os.eventfd_read(self.pool.started)

    def pump_all(self, *jobs: Job) -> list[str]:
        self.pump(lambda: all(job in self.results for job in jobs))
        return [self.answer(job) for job in jobs]


class HandWorker:
    """A prepare worker that does what the test says, step by step, in this process."""

    def __init__(self, pool: Pool, seat: int, io_seat: int = 0) -> None:
        self.pool = pool
        self.row = pool.board.row(pool.topology.board_prepare(seat))
        self.end = WorkerEnd(pool.rings, pool.layout.pair(io_seat, seat))
        self._slab = pool.slabs[io_seat].bytes

    def go_live(self) -> HandWorker:
        self.row.open(Role.PREPARE, 0, 4242, "")
        self.row.state = State.READY
        return self

    def take(self) -> Record | None:
        record = self.end.take()
        if record is not None:
            self.row.busy = 1
        return record

    def finish(self, record: Record, outcome: int = OUTCOME_VIEW, model: str = "") -> None:
        """Write the view and complete; the model defaults to the body."""
        view = memoryview(self._slab)[record[2] : record[2] + record[3]]
        body = bytes(self._slab[record[1] : record[1] + record[4]])
        length = 0
        if outcome == OUTCOME_VIEW:
            length = encode_view(RoutingView(model or body.decode()[:200]), view)
        elif outcome == OUTCOME_REFUSED:
            length = encode_refusal("invalid_request", "no", view)
        now = self.pool.clock()
        self.end.complete(record[0], outcome, length, now, now)
        self.row.busy = 0

    def step(self) -> str | None:
        """Take one job and finish or skip it, like the real one; returns its body or None."""
        record = self.take()
        if record is None:
            return None
        body = bytes(self._slab[record[1] : record[1] + record[4]]).decode()
        if self.end.is_void() or self.pool.clock() >= record[5]:
            self.finish(record, OUTCOME_SKIPPED)
            return f"skipped {body}"
        self.finish(record)
        return body

    def die(self) -> None:
        """Die in the running job, as the leader makes it visible."""
        self.row.close()
        self.end.settle(self.pool.clock())


def play(job_word: int, body: memoryview, view: memoryview, gates: tuple[int, int]) -> int:
    """The job of forked workers; the body says what happens."""
    started, gate = gates
    kind, _, text = bytes(body).decode().partition(":")
    if kind == "gate":
        os.eventfd_write(started, 1)
        os.eventfd_read(gate)
    if kind == "slow":
        time.sleep(float(text))
    if kind == "die" or (kind == "die-once" and attempt_of(job_word) == 0):
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "raise":
        raise BaseException("a panic")
    if kind == "refuse":
        return result_word(OUTCOME_REFUSED, encode_refusal("invalid_request", text, view))
    if kind == "fail":
        return result_word(OUTCOME_FAILED, 0)
    return result_word(OUTCOME_VIEW, encode_view(RoutingView(f"{text}@{attempt_of(job_word)}"), view))


class Pool:
    """Segments and doorbells of a small node, and, if asked for, a leader with forked workers."""

    def __init__(self, workers: int = 2, io_processes: int = 1, **settings: int) -> None:
        self.topology = Topology.of(io_processes, workers)
        self.settings = PoolSettings(**settings)
        self.board = ProcessBoard.create(self.topology.board_seats)
        self.rings = create_rings(self.topology.io_seats, self.topology.prepare_seats)
        self.layout = open_layout(self.rings, self.topology.io_seats, self.topology.prepare_seats)
        self.slabs = [Segment.create(SLAB_KIND, 64 << 20) for _ in range(self.topology.io_seats)]
        self.io_bells = [os.eventfd(0, os.EFD_NONBLOCK) for _ in range(self.topology.io_seats)]
        self.bells = [os.eventfd(0, os.EFD_NONBLOCK) for _ in range(self.topology.prepare_seats)]
        self.started = os.eventfd(0, os.EFD_SEMAPHORE)
        self.gate = os.eventfd(0, os.EFD_SEMAPHORE)
        self.workers = workers
        self.time = [1_000_000 * MS]
        self.leaders: list[int] = []
        self.links: list[socket.socket] = []

    def clock(self) -> int:
        return self.time[0]

    def door(self, seat: int = 0, is_real_time: bool = False, lost_jobs: int = 0) -> FrontDoor:
        return FrontDoor(self, seat, time.monotonic_ns if is_real_time else self.clock, lost_jobs)

    def hand_workers(self, io_seat: int = 0) -> list[HandWorker]:
        return [HandWorker(self, seat, io_seat).go_live() for seat in range(self.workers)]

    # --- forked workers ---

    def start_leader(self) -> int:
        """Fork a leader that forks the workers; returns its pid when all are ready."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        supervisor_pid = os.getpid()
        row = self.board.row(self.topology.board_leader(0))
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                ours.close()
                self._lead(ChildLink(theirs.detach(), row), supervisor_pid)
                code = 0
            finally:
                os._exit(code)
        theirs.close()
        self.links.append(ours)
        self.leaders.append(pid)
        assert self.hear() == {"t": "renewed"} and self.hear() == {"t": "ready"}
        return pid

    def _lead(self, link: ChildLink, supervisor_pid: int) -> None:
        def run_worker(seat: int) -> None:
            PrepareWorker(
                self.topology,
                seat,
                self.rings,
                self.slabs,
                self.board,
                self.bells[seat],
                self.io_bells,
                lambda job_word, body, slab, at, room, _: play(
                    job_word, body, slab[at : at + room], (self.started, self.gate)
                ),
                lambda error: None,
                supervisor_pid,
            ).run()

        group = PrepareGroup(
            self.topology,
            self.topology.groups[0],
            (),
            self.rings,
            self.board,
            self.board.row(self.topology.board_leader(0)),
            self.io_bells,
            self.bells,
            link,
            run_worker,
            lambda event, **fields: None,
            lambda message: group.renew() if message["t"] == "renew" else None,
            time.monotonic_ns,
            lambda: link.send({"t": "renewed"}),
        )
        group.adopt()
        group.renew()
        group.run()

    def tell(self, message: dict[str, str]) -> None:
        """Say something to the leader that was started last; ``renew``: its workers are outdated."""
        send_message(self.links[-1], message)

    def hear(self) -> dict[str, object]:
        """Return what that leader says next; ``renewed``: all its workers are ready and none outdated."""
        assert select.select([self.links[-1]], [], [], 30)[0], "the leader is silent"
        message: dict[str, object] = json.loads(self.links[-1].recv(1000))
        return message

    def rows(self) -> list[BoardRow]:
        """The rows of all prepare seats."""
        return [self.board.row(self.topology.board_prepare(n)) for n in range(self.topology.prepare_seats)]

    def worker_pids(self) -> list[int]:
        """By place: the worker that was forked last, 0 for none."""
        rows = self.rows()
        pairs = zip(rows[: self.workers], rows[self.workers :], strict=True)
        return [max(pair, key=lambda row: (row.is_alive, row.started_ns)).pid for pair in pairs]

    def wait_started(self) -> None:
        """Wait until a gated job of another process has begun to run."""
        assert select.select([self.started], [], [], 20)[0], "no job started"
        os.eventfd_read(self.started)

    def open_gate(self, count: int = 1) -> None:
        os.eventfd_write(self.gate, count)

    def close(self) -> None:
        for link in self.links:
            link.close()
        self.open_gate(1000)
        for pid in self.leaders:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
        for fd in (*self.io_bells, *self.bells, self.started, self.gate):
            os.close(fd)
        for segment in (*self.slabs, self.rings):
            segment.close()


@pytest.fixture
def make_pool() -> Iterator[Callable[..., Any]]:
    pools: list[Pool] = []

    def make(**options: int) -> Pool:
        pools.append(Pool(**options))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()
