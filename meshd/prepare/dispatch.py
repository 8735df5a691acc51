"""Which job goes to which prepare worker, and when.

WAITING is FIFO, except that jobs to be run again come first. A ring holds one job of any size, or small ones
of 64 KiB together, 16 at most; so one wake-up serves several small jobs (docs/decisions/0002). A free worker
is preferred, then the ring with the fewest bytes of those whose worker runs a short job, and only then one
whose worker runs a long one: that which has run longest. What stands before a dispatched job on its ring is
thus bounded by 64 KiB of this process's bodies, and the worker takes one job in turn from every I/O process.

No worker idles while an unclaimed job waits elsewhere: once WAITING is empty, ``_steal`` withdraws the
younger half of the longest ring for each free worker, and ``_escape`` moves what stands behind a long job to
a worker that runs short ones. What triggers them: every drain of completions; a worker that is about to
sleep, or to start a long job, rings the I/O processes that have something waiting.

The bound that follows for a job at the head of its process's queue, with W workers alive and P I/O processes
(docs/decisions/0002): it starts no later than the end of the job that its worker runs now, one job of each of
the P - 1 others, and 64 KiB of its own process's bodies; at once if any worker is free.

*Waiting*, for the node-wide capacity, is what the specification calls WAITING: jobs in the queue, and jobs
put on a ring behind other work until they are claimed. Each I/O process publishes its own count, so the sum
may exceed the capacity by one job a process.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from os import eventfd_write  # one look-up less for each ring
from typing import Final

from meshd.prepare.job import Job, JobState
from meshd.prepare.lane import Entry, Lane
from meshd.prepare.layout import BUSY_LONG

STACK_BYTES: Final = 64 << 10  # ≈ 60 µs of parsing, or 0.3 ms of a fast tokenizer: a wake-up is worth that
_STALE_NS: Final = 5_000_000  # unclaimed for so long by an idle worker: that one is stopped, not waking up


class Dispatcher:
    """The queue and the lanes of one I/O process. ``lanes``: by prepare seat.

    ``first``: the lane to try first; another one for each I/O process, so that they collide less often.
    ``sequence``: above every sequence that a predecessor in this I/O seat has used.
    """

    def __init__(self, lanes: tuple[Lane, ...], first: int, sequence: int) -> None:
        self.lanes = lanes
        self._by_preference = lanes[first:] + lanes[:first]
        self._sequence = sequence
        self._waiting: deque[Job] = deque()
        self._again: deque[Job] = deque()
        self._dirty: list[Lane] = []
        self._may_be_stacked = False

    @property
    def queued(self) -> int:
        return len(self._waiting) + len(self._again)

    def count_waiting(self) -> int:
        """Jobs that wait for a worker, on a ring or off it. O(lanes) while any is stacked on a ring."""
        count = len(self._waiting) + len(self._again)
        if self._may_be_stacked:
            stacked = 0
            for lane in self.lanes:
                if lane.stacked:
                    lane.discount_claimed()
                    stacked += lane.stacked
            self._may_be_stacked = stacked > 0
            count += stacked
        return count

    def count_at_most(self) -> int:
        """No less than ``count_waiting``, and cheaper: jobs claimed since the last count are still in it."""
        count = len(self._waiting) + len(self._again)
        return count + sum([lane.stacked for lane in self.lanes]) if self._may_be_stacked else count

    def waiting(self) -> Iterator[Job]:
        """The queue in the order of dispatch."""
        yield from self._again
        yield from self._waiting

    def pick(self, body_length: int) -> tuple[Lane | None, bool]:
        """Choose a lane for the next job by the rule above, None if it must wait; and whether it is free.

        O(lanes).
        """
        best: Lane | None = None
        behind: Lane | None = None  # a long job
        least = STACK_BYTES + 1
        oldest_ns = 0
        for lane in self._by_preference:
            if not lane.is_alive or not lane.end.has_room:
                continue
            held = lane.live_bytes
            if lane.live:
                if held >= least or held + body_length > STACK_BYTES:
                    continue
                busy = lane.busy
            else:
                busy = lane.busy
                if not busy:
                    return lane, True
            if busy == BUSY_LONG:
                deadline_ns = lane.row.job_deadline_ns
                if behind is None or deadline_ns < oldest_ns:
                    behind, oldest_ns = lane, deadline_ns
            elif held < least:
                best, least = lane, held
        return best or behind, False

    def pick_for_new(self, body_length: int) -> tuple[Lane | None, bool]:
        """Choose a lane for a job that has just come: none while others wait already."""
        return (None, False) if self._waiting or self._again else self.pick(body_length)

    def push(self, lane: Lane, job: Job, now_ns: int, is_stacked: bool) -> None:
        self._sequence += 1
        lane.push(job, self._sequence, now_ns, is_stacked)
        if is_stacked:
            self._may_be_stacked = True
        if not lane.is_dirty:
            lane.is_dirty = True
            self._dirty.append(lane)

    def enqueue(self, job: Job) -> None:
        """Append to WAITING."""
        job.state = JobState.WAITING
        self._waiting.append(job)

    def enqueue_again(self, job: Job) -> None:
        """Put the job before all that have not run yet."""
        job.state = JobState.WAITING
        self._again.append(job)

    def remove(self, job: Job) -> None:
        """Take a waiting job off its queue. O(jobs waiting), and only for those that never run."""
        (self._again if job in self._again else self._waiting).remove(job)

    def flush_doorbells(self) -> None:
        """Ring each worker that was pushed to since the last call: one eventfd write each."""
        if self._dirty:
            for lane in self._dirty:
                lane.is_dirty = False
                eventfd_write(lane.bell, 1)
            self._dirty.clear()

    @property
    def has_work(self) -> bool:
        """Whether ``balance`` might do anything. O(lanes), and far less than that costs."""
        if self._waiting or self._again:
            return True
        lanes = self.lanes
        if len(lanes) > 1:
            for lane in lanes:
                if lane.live:
                    return True
        return False

    def balance(self, now_ns: int) -> None:
        """Dispatch what waits and can start; when nothing waits, spread unclaimed jobs over free workers.

        A job past its start time may be dispatched too: the worker skips it, the client learns it so.
        """
        for queue in (self._again, self._waiting):
            while queue:
                job = queue[0]
                lane, is_free = self.pick(job.body_length)
                if lane is None:
                    return
                queue.popleft()
                self.push(lane, job, now_ns, not is_free)
        self._steal(now_ns)

    def recall_from_dead(self) -> None:
        """Put unclaimed jobs of dead workers back to the head of WAITING: someone else can run them."""
        for lane in self.lanes:
            if lane.live and not lane.is_alive:
                for entry in reversed(lane.unclaimed()):
                    if lane.try_recall(entry):
                        entry.job.entry = None
                        entry.job.state = JobState.WAITING
                        self._waiting.appendleft(entry.job)

    def _steal(self, now_ns: int) -> None:
        donors = [lane for lane in self.lanes if lane.live]
        if not donors:
            return
        for lane in self._by_preference:
            if lane.is_free:
                entries = max((self._spare(donor, now_ns) for donor in donors), key=len)
                if not entries:
                    return
                for entry in entries[len(entries) // 2 :]:
                    self._move(entry, lane, now_ns)
        for donor in donors:
            if donor.busy == BUSY_LONG:
                self._escape(donor, now_ns)

    def _escape(self, donor: Lane, now_ns: int) -> None:
        """Let nothing stand behind a long job that can stand behind short ones."""
        for entry in donor.unclaimed():
            lane, _ = self.pick(entry.job.body_length)
            if lane is None or lane is donor or lane.busy == BUSY_LONG:
                return
            self._move(entry, lane, now_ns)

    def _spare(self, donor: Lane, now_ns: int) -> list[Entry]:
        """Unclaimed entries that another may run: not those of an idle worker that is just waking up."""
        entries = donor.unclaimed()
        if not entries or donor.busy or not donor.is_alive:
            return entries
        return entries if now_ns - entries[0].pushed_ns > _STALE_NS else []

    def _move(self, entry: Entry, lane: Lane, now_ns: int) -> None:
        job = entry.job
        fits = lane.live == 0 or lane.live_bytes + job.body_length <= STACK_BYTES
        if fits and lane.end.has_room and entry.lane.try_recall(entry):
            self.push(lane, job, now_ns, lane.live > 0)

    def __repr__(self) -> str:
        return f"Dispatcher(waiting={len(self._waiting)}, again={len(self._again)}, {self.lanes})"
