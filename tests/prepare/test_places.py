"""When a dead worker is replaced, and where its successor sits."""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path

import pytest

from meshd.control import ProcessBoard, Role
from meshd.prepare.places import Backoff, Place, Seat, open_worker

SECOND = 1_000_000_000


def test_five_deaths_in_ten_seconds_make_replacements_wait_longer_and_longer() -> None:
    backoff = Backoff()
    delays = [backoff.died(n * 2 * SECOND) // SECOND for n in range(11)]
    assert delays == [0, 0, 0, 0, 1, 2, 4, 8, 16, 30, 30]
    replaced_at = (20 + 30) * SECOND
    assert backoff.died(replaced_at + 59 * SECOND) == 30 * SECOND, "the wait is no part of the minute of life"
    replaced_at += (59 + 30) * SECOND
    assert backoff.died(replaced_at + 61 * SECOND) == 0


def test_deaths_further_apart_are_replaced_at_once() -> None:
    backoff = Backoff()
    assert [backoff.died(n * 3 * SECOND) for n in range(20)] == [0] * 20


def test_the_successor_sits_where_the_last_worker_was_and_a_new_place_begins_with_its_first_seat() -> None:
    board = ProcessBoard.create(2)
    first, second = (Seat(number, board.row(number), ()) for number in range(2))
    place = Place((first, second), ())
    assert place.latest is first and place.vacant is first and not place.held
    second.row.open(Role.PREPARE, 1, 10, "")
    second.pid = 10
    assert place.latest is second and place.vacant is first and place.held == [second]
    second.row.close()
    second.pid = 0
    assert place.latest is second


def test_a_process_that_is_no_worker_of_the_seat_is_not_taken_for_one() -> None:
    assert open_worker(os.getpid(), 0) is None


def test_a_worker_is_found_whatever_the_number_of_its_descriptor() -> None:
    """``select`` would refuse one above 1023."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 1100:
        pytest.skip("no descriptor may have such a number")
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(writing)
        Path("/proc/self/comm").write_text("meshd:prep3")
        os.read(reading, 1)  # until the parent closes its end
        os._exit(0)
    held = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1100), hard))
        while (fd := os.dup(0)) < 1050:
            held.append(fd)
        held.append(fd)
        comm = Path(f"/proc/{pid}/comm")
        deadline = time.monotonic() + 20
        while comm.read_text().strip() != "meshd:prep3":
            assert time.monotonic() < deadline
        pidfd = open_worker(pid, 3)
        assert pidfd is not None and pidfd > 1023
        held.append(pidfd)
    finally:
        for each in held:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        os.close(writing)
        os.close(reading)
        os.waitpid(pid, 0)
