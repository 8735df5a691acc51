"""Two real processes on one pair of rings: nothing torn, lost, doubled or reordered.

The acceptable outcome is one: every descriptor arrives once, in order, with all words of one push; every
completion likewise. The reader is stopped and continued at random instants.
"""

from __future__ import annotations

import os
import random
import select
import signal
import struct
import threading
import time

import pytest

from meshd.memory import Segment
from meshd.prepare.layout import OUTCOME_VIEW, RINGS_KIND, RINGS_VERSION, create_rings, open_layout
from meshd.prepare.ring import FULL, IoEnd, WorkerEnd

MASK = 2**63 - 1
PLACE = struct.Struct("3Q")
MIX = 0x9E3779B97F4A7C15


def words_of(sequence: int) -> tuple[int, ...]:
    """Eight words that can only belong together; every byte of every word changes from one to the next."""
    return tuple((sequence + n) * MIX & MASK for n in range(8))


def push(io: IoEnd, words: tuple[int, ...]) -> int:
    return io.push(words[0], PLACE.pack(*words[1:4]), *words[4:])


def serve(segment_fd: int, bell: int, back: int, count: int) -> int:
    """The reader: checks each descriptor whole and answers it. Returns the number of faults."""
    segment = Segment.attach(segment_fd, RINGS_KIND, RINGS_VERSION)
    worker = WorkerEnd(segment, open_layout(segment, 1, 1).pair(0, 0))
    served = faults = 0
    while served < count:
        record = worker.take()
        if record is None:
            os.eventfd_write(back, 1)
            select.select([bell], [], [], 0.05)
            try:
                os.eventfd_read(bell)
            except BlockingIOError:
                pass
            continue
        faults += record != words_of(served)
        worker.complete(record[0], OUTCOME_VIEW, served, record[7], record[3])
        served += 1
    os.eventfd_write(back, 1)
    return faults


@pytest.mark.parametrize(
    ("count", "is_disturbed"),
    [
        (200_000, False),
        (60_000, True),
        pytest.param(5_000_000, False, marks=[pytest.mark.slow, pytest.mark.timeout(600)]),
        pytest.param(1_500_000, True, marks=[pytest.mark.slow, pytest.mark.timeout(600)]),
    ],
)
def test_every_descriptor_and_completion_crosses_whole_and_in_order(count: int, is_disturbed: bool) -> None:
    segment = create_rings(1, 1)
    io = IoEnd(segment, open_layout(segment, 1, 1).pair(0, 0))
    bell, back = os.eventfd(0, os.EFD_NONBLOCK), os.eventfd(0, os.EFD_NONBLOCK)
    reader = os.fork()
    if reader == 0:
        os._exit(min(serve(segment.fd, bell, back, count), 100))
    is_over = threading.Event()
    disturber = threading.Thread(target=disturb, args=(reader, is_over)) if is_disturbed else None
    if disturber:
        disturber.start()
    give_up_at = time.monotonic() + 60
    pushed = popped = 0
    try:
        while popped < count and time.monotonic() < give_up_at:
            pushed_before = pushed
            while pushed < count and push(io, words_of(pushed)) != FULL:
                pushed += 1
            if pushed > pushed_before:
                os.eventfd_write(bell, 1)
            if not io.pop():
                select.select([back], [], [], 0.05)
                try:
                    os.eventfd_read(back)
                except BlockingIOError:
                    pass
                continue
            has_completion = True
            while has_completion:
                expected = words_of(popped)
                assert (io.sequence, io.outcome, io.view_length) == (expected[0], OUTCOME_VIEW, popped)
                assert (io.claimed_ns, io.finished_ns) == (expected[7], expected[3])
                popped += 1
                has_completion = io.pop()
    finally:
        is_over.set()
        if disturber:
            disturber.join()
        if popped < count:
            os.kill(reader, signal.SIGKILL)
        _, status = os.waitpid(reader, 0)
    assert popped == count
    assert os.waitstatus_to_exitcode(status) == 0, "descriptors arrived torn"


def disturb(pid: int, is_over: threading.Event) -> None:
    """Stop and continue the reader at random instants until it is over."""
    rng = random.Random(20240607)
    while not is_over.wait(rng.random() * 0.004):
        os.kill(pid, signal.SIGSTOP)
        is_over.wait(rng.random() * 0.004)
        os.kill(pid, signal.SIGCONT)
