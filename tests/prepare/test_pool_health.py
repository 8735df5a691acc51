"""When the pool counts as failed, and for whom, with workers played by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from meshd.errors import MeshError

MS = 1_000_000
MakePool = Callable[..., Any]


def test_a_pool_without_live_worker_for_10_s_is_failed_until_one_lives(make_pool: MakePool) -> None:
    pool = make_pool(workers=1)
    (worker,) = pool.hand_workers()
    door = pool.door()
    worker.die()
    for _ in range(200):
        pool.time[0] += 50 * MS
        door.client.check(pool.clock())
    assert not door.client.is_failed
    pool.time[0] += MS
    door.client.check(pool.clock())
    assert door.client.is_failed
    with pytest.raises(MeshError) as caught:
        door.submit(b"x")
    assert caught.value.code == "prepare_pool_closed"
    worker.go_live()
    door.client.check(pool.clock())
    assert not door.client.is_failed
    door.submit(b"x")


def test_a_pool_that_the_controller_calls_failed_takes_no_job_until_a_worker_lives(
    make_pool: MakePool,
) -> None:
    pool = make_pool(workers=1)
    (worker,) = pool.hand_workers()
    door = pool.door()
    worker.die()
    pool.time[0] += 50 * MS
    door.client.check(pool.clock())
    pool.board.prepare_failed = 1
    with pytest.raises(MeshError):
        door.submit(b"x")
    worker.go_live()  # the controller will look a little later
    door.client.check(pool.clock())
    door.submit(b"x")


def test_a_process_that_slept_does_not_take_the_pool_for_failed(make_pool: MakePool) -> None:
    pool = make_pool(workers=1)
    (worker,) = pool.hand_workers()
    door = pool.door()
    worker.die()
    door.client.check(pool.clock())
    pool.time[0] += 60_000 * MS
    door.client.check(pool.clock())
    assert not door.client.is_failed


def test_a_wrong_sequence_is_a_layout_fault_that_closes_the_pool(make_pool: MakePool) -> None:
    pool = make_pool(workers=1)
    (worker,) = pool.hand_workers()
    door = pool.door()
    job = door.submit(b"x")
    worker.end.complete(worker.take()[0] + 1, 0, 0, 0, 0)
    door.client.drain_completions()
    assert door.answer(job) == "prepare_failed" and door.client.is_failed
    with pytest.raises(MeshError):
        door.submit(b"x")


def test_a_broken_layout_that_one_process_saw_closes_the_pool_for_all_until_restart(
    make_pool: MakePool,
) -> None:
    pool = make_pool(workers=1)
    (worker,) = pool.hand_workers()
    one, two = pool.door(0), pool.door(1)
    one.submit(b"x")
    worker.end.complete(worker.take()[0] + 1, 0, 0, 0, 0)
    one.client.drain_completions()
    two.client.check(pool.clock())
    worker.go_live()
    for door in (one, two, pool.door(0)):  # the last is a successor of the first
        door.client.check(pool.clock())
        with pytest.raises(MeshError) as caught:
            door.submit(b"x")
        assert caught.value.code == "prepare_pool_closed"


def test_a_changed_check_word_closes_the_pool(make_pool: MakePool) -> None:
    pool = make_pool(workers=1)
    pool.hand_workers()
    door = pool.door()
    pool.rings.words[8] ^= 1
    door.client.check(pool.clock())
    assert door.client.is_failed
