"""The I/O process's side of the preparation pool: admission, results, deadlines, deaths, one outcome a job.

job.py has the states, dispatch.py the choice of a worker, ring.py what is shared.

**Withdrawing** a descriptor is a store that races with its claim. When its job is dispatched again, both
workers may run it for that reason and write one view area. So a result is believed only if no withdrawn
descriptor of its job is claimed when the result is seen. That look is late enough: the store that let the
second worker start was made after the withdrawal, so whoever claims after it sees the withdrawal; who
claimed before it stored ``head`` at least a job's run time ago. If one is claimed, the job is HELD until all
its descriptors are answered: SKIPPED, and the result was whole; anything else, and the job runs again.

**Slots** are pinned by every descriptor that names them, until its completion is consumed. Every claimed
descriptor gets one, from its worker, or from the leader once the worker is dead. Nothing else is needed to
know that no one reads or writes a slot any more, and it holds across our own death: the successor finds on
the rings what is still out, and keeps those slots in quarantine.

**Death of a worker.** A job that it was running is answered DIED by the leader and retried once, before all
others. Unclaimed jobs stay on the ring for the replacement, or move to a worker that lives.

**Counting.** Each job submitted is counted, and then one outcome. What this process has not counted when it
is killed, the controller counts as cancelled: it finds how many by the difference in the metric cells. The
word ``lost`` tells it how much of that difference is our predecessors', so that our open jobs are not in it.

**Whoever waits runs within ``set_result``**: it may submit, cancel, release slots, close. So keeping the
promise is the last thing done for a job, what is true after it is looked at again, and results are not
drained within a drain: requests that are refused one after the other would run within one another, as deep
as there are results.

**Late results.** A completion is matched by its place on the ring; the sequence in it is a check. A result
for a job that is terminal is dropped, and unpins its slot.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from meshd.control import ProcessBoard, Topology
from meshd.errors import MeshError
from meshd.memory import Segment
from meshd.prepare.codec import CodecFault, Results
from meshd.prepare.dispatch import Dispatcher
from meshd.prepare.job import Job, JobState, Result
from meshd.prepare.lane import Lane
from meshd.prepare.layout import OUTCOME_DIED, OUTCOME_REFUSED, OUTCOME_SKIPPED, OUTCOME_VIEW, open_layout
from meshd.prepare.pool_health import PoolHealth
from meshd.prepare.ports import PrepareMetrics, PrepareSettings
from meshd.prepare.quarantine import take_over
from meshd.prepare.ring import IoEnd
from meshd.slab import BodySlab

__all__ = ["Job", "PrepareClient", "PrepareMetrics", "PrepareSettings", "Result"]

_CAPACITY_PER_WORKER: Final = 64
_LEAST_CAPACITY: Final = 256  # on few workers too a burst of short jobs is over before its time-out
_MESSAGES: Final = {
    "prepare_queue_full": "Too many requests wait for preparation.",
    "prepare_pool_closed": "The preparation pool is closed.",
    "prepare_queue_timeout": "The request waited too long to be prepared.",
    "prepare_timeout": "Preparing the request took too long.",
    "prepare_failed": "The request could not be prepared.",
    "prepare_worker_died": "The process that prepared the request died.",
}


class PrepareClient:
    """Submits the jobs of one I/O process to all prepare workers. One object a process; not thread-safe.

    ``seat``: the I/O seat. ``bells``: the doorbell of each prepare seat. ``clock``: CLOCK_MONOTONIC in ns.
    ``lost_jobs``: those that earlier processes in this seat have submitted and not counted an outcome for.
    The constructor must run before ``slab`` has handed out its first slot: it keeps what a predecessor's
    jobs still use. Raises ``StartupError`` if the segment has another layout.
    """

    def __init__(
        self,
        topology: Topology,
        seat: int,
        rings: Segment,
        board: ProcessBoard,
        slab: BodySlab,
        bells: Sequence[int],
        metrics: PrepareMetrics,
        settings: PrepareSettings,
        clock: Callable[[], int],
        lost_jobs: int = 0,
    ) -> None:
        layout = open_layout(rings, topology.io_seats, topology.prepare_seats)
        lanes = tuple(
            Lane(
                IoEnd(rings, layout.pair(seat, other)), board.row(topology.board_prepare(other)), bells[other]
            )
            for other in range(topology.prepare_seats)
        )
        capacity = settings.prepare_queue_capacity
        now_ns = clock()  # a predecessor used one sequence a descriptor, so it is below this
        self.is_closed = False
        self._is_draining = False
        self._capacity = capacity if capacity >= 0 else default_capacity(topology.prepare_workers)
        self._queue_timeout_ns = settings.prepare_queue_timeout_ms * 1_000_000
        self._timeout_ns = settings.prepare_timeout_ms * 1_000_000
        self._clock = clock
        self._metrics = metrics
        self._count_job = metrics.job_submitted  # one attribute less for each call
        self._count_wait = metrics.queue_seconds
        self._count_run = metrics.run_seconds
        self._lanes = lanes
        self._dispatcher = Dispatcher(lanes, seat % max(topology.prepare_workers, 1), now_ns)
        self._results = Results(slab)
        self._health = PoolHealth(lanes, board, rings, layout, seat, now_ns)
        self._words = rings.words
        self._waiting_word = layout.waiting_word(seat)
        self._others = tuple(
            (board.row(topology.board_io(other)), layout.epoch_word(other), layout.waiting_word(other))
            for other in range(topology.io_seats)
            if other != seat
        )
        self._others_waiting: tuple[int, ...] = ()  # the ``waiting`` words of live I/O processes
        take_over(lanes, slab)
        self._words[self._waiting_word] = self._published = 0
        self._words[layout.lost_word(seat)] = lost_jobs
        self._words[layout.epoch_word(seat)] = board.row(topology.board_io(seat)).epoch
        self._look_at_board(now_ns)

    @property
    def is_failed(self) -> bool:
        """Whether every job is refused: the layout is broken, or there was no live worker for 10 s."""
        return self._health.is_failed

    @property
    def has_jobs(self) -> bool:
        """Whether any job is not terminal. O(jobs out)."""
        return self._dispatcher.queued > 0 or any(
            not entry.job.is_terminal for lane in self._lanes for entry in lane.entries
        )

    def submit(self, job: Job) -> None:
        """Dispatch the job now or queue it; call ``flush_doorbells`` before the tick ends.

        Raises ``MeshError`` ``prepare_queue_full`` or ``prepare_pool_closed``, already counted here.
        """
        self._count_job()
        now_ns = self._clock()
        if self.is_closed or (self._health.is_failed and self._is_still_failed(now_ns)):
            raise self._error("prepare_pool_closed")
        job.submitted_ns = now_ns
        job.start_by_ns = now_ns + self._queue_timeout_ns
        job.finish_by_ns = now_ns + self._timeout_ns
        dispatcher = self._dispatcher
        lane, is_free = dispatcher.pick_for_new(job.body_length)
        if lane is not None and is_free:
            dispatcher.push(lane, job, now_ns, False)
            return
        waiting = dispatcher.count_at_most()
        if not self._has_place(waiting):
            waiting = dispatcher.count_waiting()  # exact, and dearer
            if not self._has_place(waiting):
                self.drain_completions()  # the burst that fills the queue may have kept us from looking
                waiting = dispatcher.count_waiting()
                lane, is_free = dispatcher.pick_for_new(job.body_length)
                if lane is not None and is_free:
                    dispatcher.push(lane, job, now_ns, False)
                    return
                if not self._has_place(waiting):
                    raise self._error("prepare_queue_full")
        if lane is not None:
            dispatcher.push(lane, job, now_ns, True)
        else:
            dispatcher.enqueue(job)
        self._words[self._waiting_word] = self._published = waiting + 1

    def _has_place(self, waiting: int) -> bool:
        """Whether one more job may wait beside ``waiting`` of ours and what the others tell."""
        words = self._words
        return waiting + sum([words[word] for word in self._others_waiting]) < self._capacity

    def cancel(self, job: Job) -> None:
        """Forget a job whose client has left; nothing happens to a job that is terminal already.

        Not claimed, it never runs; running, it is told to stop. Its promise will not be kept.
        """
        if job.is_terminal or job.state is JobState.NEW:
            return
        self._abandon(job)
        job.state = JobState.CANCELLED
        self._metrics.error("prepare_cancelled")
        self._publish_waiting()

    def drain_completions(self) -> None:
        """Consume all results, keep their promises, dispatch what can start, ring the doorbells.

        Call it when this process's doorbell rang, after reading the eventfd: the other order loses wake-ups.
        """
        if self._is_draining:
            return  # whoever is told of a result may submit, and find the queue full
        self._is_draining = True
        try:
            for lane in self._lanes:
                while lane.end.pop():
                    self._completed(lane)
        finally:
            self._is_draining = False
        self._dispatch()

    def _dispatch(self) -> None:
        """Dispatch what can start, tell the others how much waits, ring the doorbells."""
        dispatcher = self._dispatcher
        if dispatcher.has_work:
            now_ns = self._clock()
            if dispatcher.queued and not any(lane.is_alive for lane in self._lanes):
                self._look_at_board(now_ns)
            dispatcher.balance(now_ns)
        self._publish_waiting()
        dispatcher.flush_doorbells()

    def flush_doorbells(self) -> None:
        """Ring each worker that got a descriptor since the last call: one eventfd write each."""
        self._dispatcher.flush_doorbells()

    def check(self, now_ns: int) -> None:
        """Look after deaths, deadlines and lost wake-ups, every 50 ms at most. O(jobs out and waiting)."""
        self._look_at_board(now_ns)
        self.drain_completions()
        self._expire(now_ns)
        self._dispatch()
        self._metrics.queued(self._published)
        self._metrics.dispatched(sum(len(lane.unclaimed()) - lane.stacked for lane in self._lanes))

    def close(self) -> None:
        """Take no more jobs, answer those not started ``prepare_pool_closed``; running ones end as ever."""
        self.is_closed = True
        unclaimed = [entry.job for lane in self._lanes for entry in lane.unclaimed()]
        for job in [*self._dispatcher.waiting(), *unclaimed]:
            if not job.is_terminal:
                self._fail(job, "prepare_pool_closed")
        self._publish_waiting()

    # --- results ---

    def _completed(self, lane: Lane) -> None:
        end = lane.end
        outcome, view_length = end.outcome, end.view_length
        claimed_ns, finished_ns = end.claimed_ns, end.finished_ns
        entry = lane.take_answered()
        if end.sequence != entry.sequence:
            self._health.tell_fault()
            outcome = -1
        job = entry.job
        job.open_descriptors -= 1
        if 0 <= outcome < OUTCOME_SKIPPED or (outcome == OUTCOME_SKIPPED and finished_ns > claimed_ns):
            self._count_claim(job, claimed_ns)
        if job.entry is entry:
            job.entry = None
            if outcome == OUTCOME_SKIPPED:
                self._skipped(job)
            elif outcome == OUTCOME_DIED:
                lane.look_at_board()
                self._died(job)
            else:
                job.claimed_ns = claimed_ns
                job.finished_ns = finished_ns
                if job.is_suspect or (job.open_descriptors and self._may_run_elsewhere(job)):
                    job.state = JobState.HELD
                    job.held_result = outcome, view_length
                else:
                    self._ran(job, outcome, view_length)
        elif outcome != OUTCOME_SKIPPED:
            job.is_suspect = True
        if not job.open_descriptors:
            if job.state is JobState.HELD:
                self._decide_held(job)
            if job.is_release_due:
                job.is_release_due = False
                job.slot.release()

    def _count_claim(self, job: Job, claimed_ns: int) -> None:
        """A worker began the job, though perhaps nobody waits for it any more; once a job.

        When a worker claimed what it then died with is not known: the claim of the retry is counted.
        """
        if not job.is_claim_counted and job.submitted_ns:  # 0: a predecessor's
            job.is_claim_counted = True
            self._count_wait((claimed_ns - job.submitted_ns) * 1e-9)

    def _ran(self, job: Job, outcome: int, view_length: int) -> None:
        slot = job.slot
        if outcome > OUTCOME_REFUSED or outcome < OUTCOME_VIEW or view_length > slot.view_capacity:
            self._fail(job, "prepare_failed")
            return
        try:
            result = self._results.read(slot.view_offset, slot.view, view_length)
        except CodecFault as fault:
            self._fail(job, "prepare_failed", str(fault))
            return
        self._count_run((job.finished_ns - job.claimed_ns) * 1e-9)
        if isinstance(result, MeshError):
            self._metrics.rejection(result.code)
        job.state = JobState.FINISHED
        job.set_result(result)

    def _decide_held(self, job: Job) -> None:
        """No descriptor is out any more: the result is whole unless a withdrawn one ran."""
        held, job.held_result = job.held_result, None
        if held is None or job.is_suspect:
            self._run_again(job)
        else:
            self._ran(job, *held)

    def _may_run_elsewhere(self, job: Job) -> bool:
        """Whether a withdrawn descriptor of the job is claimed and not answered: run, or just skipped."""
        return any(entry.job is job and entry.is_claimed for lane in self._lanes for entry in lane.entries)

    def _skipped(self, job: Job) -> None:
        """The worker found the job past its start time; if our clock disagrees, it runs again."""
        if self._clock() >= job.start_by_ns:
            self._fail(job, "prepare_worker_died" if job.deaths else "prepare_queue_timeout")
        else:
            self._run_again(job)

    def _died(self, job: Job) -> None:
        job.deaths += 1
        if job.deaths > 1 or self.is_closed or self._clock() >= job.finish_by_ns:
            self._fail(job, "prepare_worker_died")
        else:
            job.start_by_ns = job.finish_by_ns  # the queue timeout does not apply to the retry
            self._metrics.retry()
            self._run_again(job)

    def _run_again(self, job: Job) -> None:
        if self.is_closed:
            self._fail(job, "prepare_pool_closed")
        elif job.open_descriptors and self._may_run_elsewhere(job):
            job.state = JobState.HELD
        else:
            job.is_suspect = False
            self._dispatcher.enqueue_again(job)

    def _fail(self, job: Job, code: str, cause: str = "") -> None:
        self._abandon(job)
        job.state = JobState.FINISHED
        job.set_result(self._error(code, cause))

    def _abandon(self, job: Job) -> None:
        """Take the job off the queue, or withdraw its descriptor."""
        if job.state is JobState.WAITING:
            self._dispatcher.remove(job)
        elif job.entry is not None:
            job.entry.lane.withdraw(job.entry)
            job.entry = None

    def _error(self, code: str, cause: str = "") -> MeshError:
        self._metrics.error(code)
        return MeshError(code, _MESSAGES[code], cause=cause)

    # --- deaths, deadlines, counting ---

    def _is_still_failed(self, now_ns: int) -> bool:
        """Look again before a refusal: the health routes see a worker the moment that it lives."""
        self._look_at_board(now_ns)
        return self._health.is_failed

    def _look_at_board(self, now_ns: int) -> None:
        if self._health.look(now_ns):
            self._dispatcher.recall_from_dead()
        words = self._words
        self._others_waiting = tuple(
            waiting_word for row, epoch_word, waiting_word in self._others if row.epoch == words[epoch_word]
        )

    def _expire(self, now_ns: int) -> None:
        jobs = [*self._dispatcher.waiting(), *(entry.job for lane in self._lanes for entry in lane.entries)]
        for job in jobs:
            if job.is_terminal:
                continue
            if now_ns >= job.finish_by_ns and (job.is_running or not job.deaths):
                self._fail(job, "prepare_timeout")
            elif now_ns >= job.start_by_ns and not job.is_running and job.state is not JobState.HELD:
                self._fail(job, "prepare_worker_died" if job.deaths else "prepare_queue_timeout")

    def _publish_waiting(self) -> None:
        waiting = self._dispatcher.count_waiting()
        if waiting != self._published:
            self._words[self._waiting_word] = self._published = waiting

    def __repr__(self) -> str:
        return f"PrepareClient({self._dispatcher!r}, closed={self.is_closed})"


def default_capacity(prepare_workers: int) -> int:
    """Jobs that may wait on a node with so many prepare workers, if its settings do not tell."""
    return max(_LEAST_CAPACITY, _CAPACITY_PER_WORKER * prepare_workers)
