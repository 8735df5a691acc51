"""A prepare worker: takes jobs from every I/O process in turn and answers each.

One round takes at most one job from each ring, so a flood from one I/O process delays the next job of another
by one job. Rounds go on until one finds nothing; then the worker sleeps on its doorbell, 50 ms at most.

Doorbells outwards are coalesced, because each costs a system call and a wake-up: an I/O process is rung when
its ring has run empty, at the latest 100 µs after a result was ready or before a job over 16 KiB starts.
Before it sleeps, the worker rings every I/O process that has something waiting, and before a long job those
whose descriptors it leaves on its rings: another worker may be free for them (dispatch.py).

The worker leaves, at the end of a job, when its leader asks (the ``retire`` word) or the supervisor is gone.
When only the leader has died it goes on: the next leader asks it to leave once there is something to put in
its place. ``busy`` on the board is 0 only if the worker has found every ring empty since its last job, and
tells whether the body of the running job is long.

Ten times a second under load, and when nothing came for 50 ms, the worker writes its metrics and looks at
``log_turn``, which counts how often the leader was told to reopen log files.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Sequence
from os import eventfd_write  # one look-up less for each ring
from typing import Final

from meshd.control import BoardRow, ProcessBoard, State, Topology
from meshd.memory import Segment
from meshd.prepare.layout import (
    BUSY,
    BUSY_LONG,
    LONG_BODY,
    OUTCOME_FAILED,
    OUTCOME_SKIPPED,
    open_layout,
    outcome_of,
    view_length_of,
)
from meshd.prepare.ring import Record, WorkerEnd

RunJob = Callable[[int, memoryview, memoryview, int, int, Callable[[], bool]], int]
"""Runs one job: job word, body, then the slab with offset and capacity of the view area in it, and
``should_stop``; returns the result word of the completion (layout.py)."""

_POLL_S: Final = 0.05
_NEWS_AGE_NS: Final = 100_000
_TICK_NS: Final = 100_000_000


class _Source:
    """One I/O process as this worker sees it."""

    __slots__ = (
        "bell",
        "end",
        "epoch_word",
        "has_news",
        "row_epoch_word",
        "should_stop",
        "slab",
        "waiting_word",
    )

    def __init__(
        self,
        end: WorkerEnd,
        slab: memoryview,
        bell: int,
        row: BoardRow,
        epoch_word: int,
        waiting_word: int,
    ) -> None:
        self.end = end
        self.should_stop: Callable[[], bool] = end.should_stop
        self.slab = slab
        self.bell = bell
        self.row_epoch_word = row.epoch_word
        self.epoch_word = epoch_word
        self.waiting_word = waiting_word
        self.has_news = False  # completions published, bell not rung


class PrepareWorker:
    """The loop of one prepare worker. ``slabs`` and ``io_bells``: by I/O seat; ``bell``: its own.

    ``on_exception`` hears of exceptions in jobs, for the log; the job fails and the worker goes on.
    ``reopen_log`` is called when the leader asks for it, ``flush_metrics`` now and then.
    """

    def __init__(
        self,
        topology: Topology,
        seat: int,
        rings: Segment,
        slabs: Sequence[Segment],
        board: ProcessBoard,
        bell: int,
        io_bells: Sequence[int],
        run_job: RunJob,
        on_exception: Callable[[BaseException], None],
        supervisor_pid: int,
        clock: Callable[[], int] = time.monotonic_ns,
        reopen_log: Callable[[], None] | None = None,
        flush_metrics: Callable[[], None] | None = None,
    ) -> None:
        layout = open_layout(rings, topology.io_seats, topology.prepare_seats)
        self._words = rings.words
        self._retire_word = layout.retire_word(seat)
        self._log_turn_word = layout.log_turn_word(seat)
        self._log_turn = self._words[self._log_turn_word]
        self._reopen_log = reopen_log
        self._flush_metrics = flush_metrics
        self._tick_at_ns = 0
        self._row = row = board.row(topology.board_prepare(seat))
        self._board_words = row.words
        self._busy_word = row.busy_word
        self._deadline_word = row.job_deadline_word
        self._heartbeat_word = row.heartbeat_word
        self._bell = bell
        self._run_job = run_job
        self._on_exception = on_exception
        self._clock = clock
        self._pid = os.getpid()
        self._supervisor = _pidfd_of(supervisor_pid)
        self._news_since_ns = 0  # 0: no news at all
        self._sources = tuple(
            _Source(
                WorkerEnd(rings, layout.pair(io_seat, seat)),
                slabs[io_seat].bytes,
                io_bells[io_seat],
                board.row(topology.board_io(io_seat)),
                layout.epoch_word(io_seat),
                layout.waiting_word(io_seat),
            )
            for io_seat in range(topology.io_seats)
        )

    def run(self) -> None:
        """Serve until asked to leave; the caller has been entered on the board by its leader."""
        row = self._row
        row.beat()
        row.state = State.READY
        with select.epoll() as poller:
            # Edge-triggered, so that a ring is an event of its own and the counter need not be read. An event
            # is gone before the rings are looked at: the other order loses wake-ups.
            poller.register(self._bell, select.EPOLLIN | select.EPOLLET)
            if self._supervisor is not None:
                poller.register(self._supervisor, select.EPOLLIN)
            poll = poller.poll
            while True:
                is_wanted = self._serve_all()
                self._fall_idle()
                if not is_wanted:
                    break
                ready = poll(_POLL_S, 2)
                if self._supervisor is None or len(ready) > 1 or (ready and ready[0][0] != self._bell):
                    break  # the supervisor is gone
                now_ns = self._clock()
                self._board_words[self._heartbeat_word] = now_ns
                if not ready:
                    self._tick(now_ns)
        self._write_metrics()
        row.state = State.DRAINING

    def _is_retired(self) -> bool:
        return self._words[self._retire_word] == self._pid

    def _write_metrics(self) -> None:
        if self._flush_metrics is not None:
            self._flush_metrics()

    def _tick(self, now_ns: int) -> None:
        self._tick_at_ns = now_ns + _TICK_NS
        self._write_metrics()
        turn = self._words[self._log_turn_word]
        if turn != self._log_turn:
            self._log_turn = turn
            if self._reopen_log is not None:
                self._reopen_log()

    def _serve_all(self) -> bool:
        """Serve until every ring is empty; return False if the leader asked us to leave."""
        if self._is_retired():
            return False
        sources = self._sources
        has_work = True
        while has_work:
            has_work = False
            for source in sources:
                record = source.end.take()
                if record is not None:
                    has_work = True
                    self._serve(source, record)
                    if self._is_retired():
                        return False
        return True

    def _serve(self, source: _Source, record: Record) -> None:
        end = source.end
        (
            sequence,
            body_offset,
            view_offset,
            view_capacity,
            body_length,
            start_by_ns,
            job_word,
            finish_by_ns,
        ) = record
        claimed_ns = self._clock()
        if self._news_since_ns:
            self._ring(source, claimed_ns, body_length)
        if claimed_ns >= self._tick_at_ns:
            self._tick(claimed_ns)
        view_length = 0
        board = self._board_words
        if (
            end.is_void()
            or claimed_ns >= start_by_ns
            or board[source.row_epoch_word] != self._words[source.epoch_word]
        ):
            outcome = OUTCOME_SKIPPED
            finished_ns = claimed_ns
        else:
            board[self._deadline_word] = finish_by_ns
            if body_length > LONG_BODY:
                board[self._busy_word] = BUSY_LONG  # before telling: whoever pushes from now on sees it
                self._tell_those_left_waiting()
            else:
                board[self._busy_word] = BUSY
            slab = source.slab
            try:
                result = self._run_job(
                    job_word,
                    slab[body_offset : body_offset + body_length],
                    slab,
                    view_offset,
                    view_capacity,
                    source.should_stop,
                )
                outcome, view_length = outcome_of(result), view_length_of(result)
            except (SystemExit, KeyboardInterrupt):
                raise
            except BaseException as error:  # a Rust panic in a tokenizer is no Exception
                outcome = OUTCOME_FAILED
                self._on_exception(error)
            finished_ns = self._clock()
        end.complete(sequence, outcome, view_length, claimed_ns, finished_ns)
        source.has_news = True
        if not self._news_since_ns:
            self._news_since_ns = finished_ns

    def _ring(self, current: _Source, now_ns: int, next_body_length: int) -> None:
        """Tell of results before the next job: all if they are old or it is long, else of empty rings."""
        is_due = next_body_length > LONG_BODY or now_ns - self._news_since_ns > _NEWS_AGE_NS
        has_news = False
        for source in self._sources:
            if source.has_news:
                if is_due or (source is not current and source.end.is_empty):
                    source.has_news = False
                    eventfd_write(source.bell, 1)
                else:
                    has_news = True
        if not has_news:
            self._news_since_ns = 0

    def _tell_those_left_waiting(self) -> None:
        for source in self._sources:
            if not source.end.is_empty:
                eventfd_write(source.bell, 1)

    def _fall_idle(self) -> None:
        """Say so on the board first: whoever is rung then finds this worker free."""
        self._board_words[self._busy_word] = 0
        self._board_words[self._deadline_word] = 0
        words = self._words
        for source in self._sources:
            if source.has_news or words[source.waiting_word]:
                source.has_news = False
                eventfd_write(source.bell, 1)
        self._news_since_ns = 0


def _pidfd_of(pid: int) -> int | None:
    """Open a descriptor that turns readable when the process ends; None if it has ended already."""
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return None
