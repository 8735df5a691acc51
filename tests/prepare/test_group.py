"""Real forked workers under a real leader: deaths, replacement, takeover, conservation."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import select
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from meshd.control import State
from meshd.errors import MeshError

SECOND = 1_000_000_000
MakePool = Callable[..., Any]


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def test_jobs_run_in_forked_workers(make_pool: MakePool) -> None:
    pool = make_pool(workers=2)
    pool.start_leader()
    door = pool.door(is_real_time=True)
    jobs = [door.submit(b"ok:%d" % n) for n in range(100)]
    assert door.pump_all(*jobs) == [f"{n}@0" for n in range(100)]
    assert door.metrics.outcomes == 100
    door.pump(lambda: door.slab.in_use_bytes == 0)


def test_a_panic_a_refusal_and_a_failure_leave_the_worker_serving(make_pool: MakePool) -> None:
    pool = make_pool(workers=1)
    pool.start_leader()
    pids = pool.worker_pids()
    door = pool.door(is_real_time=True)
    jobs = [door.submit(body) for body in (b"raise:", b"refuse:why", b"fail:", b"ok:after")]
    assert door.pump_all(*jobs) == ["prepare_failed", "invalid_request", "prepare_failed", "after@0"]
    assert pool.worker_pids() == pids


def test_a_worker_killed_in_a_job_costs_nobody_an_answer(make_pool: MakePool) -> None:
    pool = make_pool(workers=2)
    pool.start_leader()
    door = pool.door(is_real_time=True)
    jobs = [door.submit(b"gate:a"), door.submit(b"gate:b"), door.submit(b"ok:c")]
    door.pump_started(2)
    kill(pool.worker_pids()[0])
    door.pump_started()
    pool.open_gate(2)
    assert sorted(door.pump_all(*jobs)) == ["a@1", "b@0", "c@0"]
    assert door.metrics.retries == 1 and not door.metrics.errors


def test_a_body_that_kills_its_worker_is_retried_once_and_then_fails_alone(make_pool: MakePool) -> None:
    pool = make_pool(workers=2)
    pool.start_leader()
    door = pool.door(is_real_time=True)
    jobs = [door.submit(body) for body in (b"die:", b"die-once:x", b"ok:1", b"ok:2", b"ok:3")]
    answers = door.pump_all(*jobs)
    assert answers[0] == "prepare_worker_died" and answers[1] == "x@1"
    assert [answer[0] for answer in answers[2:]] == ["1", "2", "3"]
    assert door.metrics.submitted == door.metrics.outcomes == 5
    door.pump(lambda: door.slab.in_use_bytes == 0)


def test_a_job_cancelled_before_its_claim_never_runs(make_pool: MakePool) -> None:
    pool = make_pool(workers=1)
    pool.start_leader()
    door = pool.door(is_real_time=True)
    first = door.submit(b"gate:first")
    door.pump_started()
    second, third = door.submit(b"gate:never"), door.submit(b"ok:third")
    door.client.cancel(second)
    second.release_slot()
    pool.open_gate(1)  # one only: a second gated job would hang
    assert door.pump_all(first, third) == ["first@0", "third@0"]
    assert door.metrics.errors == {"prepare_cancelled": 1}
    door.pump(lambda: door.slab.in_use_bytes == 0)


def test_a_stopped_pool_refuses_beyond_its_capacity_and_serves_all_it_took(make_pool: MakePool) -> None:
    pool = make_pool(workers=1, prepare_queue_capacity=2)
    pool.start_leader()
    door = pool.door(is_real_time=True)
    (pid,) = pool.worker_pids()
    os.kill(pid, signal.SIGSTOP)
    jobs = [door.submit(b"ok:%d" % n) for n in range(3)]
    for _ in range(20):
        with pytest.raises(MeshError, match="wait"):
            door.submit(b"ok:x")
    os.kill(pid, signal.SIGCONT)
    assert door.pump_all(*jobs) == ["0@0", "1@0", "2@0"]
    assert door.pump_all(door.submit(b"ok:again")) == ["again@0"]


def test_jobs_of_a_stopped_worker_move_to_a_free_one(make_pool: MakePool) -> None:
    pool = make_pool(workers=2)
    pool.start_leader()
    door = pool.door(is_real_time=True)
    pid = pool.worker_pids()[0]
    os.kill(pid, signal.SIGSTOP)
    try:
        assert door.pump_all(*[door.submit(b"ok:%d" % n) for n in range(8)]) == [f"{n}@0" for n in range(8)]
        assert door.slab.in_use_bytes > 0
    finally:
        os.kill(pid, signal.SIGCONT)
    door.pump(lambda: door.slab.in_use_bytes == 0)


def test_a_small_job_overtakes_a_long_one_through_the_free_worker(make_pool: MakePool) -> None:
    pool = make_pool(workers=2, io_processes=2)
    pool.start_leader()
    one, two = pool.door(0, is_real_time=True), pool.door(1, is_real_time=True)
    long = one.submit(b"gate:" + b"x" * 100_000)
    one.pump_started()
    jobs = [two.submit(b"ok:%d" % n) for n in range(30)]
    assert two.pump_all(*jobs) == [f"{n}@0" for n in range(30)]
    pool.open_gate()
    one.pump_all(long)


def test_a_job_that_runs_5_s_past_its_deadline_is_killed(make_pool: MakePool) -> None:
    pool = make_pool(workers=1, prepare_timeout_ms=1000, prepare_queue_timeout_ms=60_000)
    pool.start_leader()
    (pid,) = pool.worker_pids()
    door = pool.door(is_real_time=True)
    door.client._clock = lambda: time.monotonic_ns() - 7 * SECOND  # submitted 7 s ago: overdue by 6
    job = door.submit(b"gate:stuck")
    door.client.flush_doorbells()
    pool.wait_started()  # before any check, which would find it overdue and withdraw it
    assert door.pump_all(job) == ["prepare_timeout"]
    door.pump(lambda: pool.worker_pids()[0] not in (pid, 0))
    door.client._clock = time.monotonic_ns
    assert door.pump_all(door.submit(b"ok:next")) == ["next@0"]
    assert door.metrics.outcomes == 2


def test_a_killed_leader_is_followed_by_one_that_takes_over_its_seats(make_pool: MakePool) -> None:
    become_subreaper()
    pool = make_pool(workers=2)
    leader = pool.start_leader()
    old = pool.worker_pids()
    door = pool.door(is_real_time=True)
    running = door.submit(b"gate:kept")
    door.pump_started()
    kill(leader)
    os.waitpid(leader, 0)
    assert door.pump_all(door.submit(b"ok:meanwhile")) == ["meanwhile@0"]
    rows = [pool.board.row(pool.topology.board_prepare(seat)) for seat in range(2)]
    idle = next(row for row in rows if not row.busy)
    gone = idle.pid
    kill(gone)  # nobody is there to answer for it: the next leader does
    os.waitpid(gone, 0)
    pool.open_gate(1)
    pool.start_leader()
    assert door.pump_all(running) == ["kept@0"]
    assert not set(pool.worker_pids()) & set(old)
    assert door.pump_all(door.submit(b"ok:after")) == ["after@0"]
    assert not door.metrics.errors
    for pid in set(old) - {gone}:
        os.waitpid(pid, 0)


def test_a_worker_that_died_without_a_leader_is_answered_for_by_the_next(make_pool: MakePool) -> None:
    become_subreaper()
    pool = make_pool(workers=1)
    leader = pool.start_leader()
    (pid,) = pool.worker_pids()
    door = pool.door(is_real_time=True)
    job = door.submit(b"gate:kept")
    door.pump_started()
    kill(leader)
    os.waitpid(leader, 0)
    kill(pid)
    os.waitpid(pid, 0)
    pool.open_gate(1)
    pool.start_leader()
    assert door.pump_all(job) == ["kept@1"]


def test_a_leader_whose_supervisor_closes_the_link_lets_its_workers_leave(make_pool: MakePool) -> None:
    pool = make_pool(workers=2)
    leader = pool.start_leader()
    pool.links.pop().close()
    pool.leaders.remove(leader)
    _, status = os.waitpid(leader, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    rows = [pool.board.row(pool.topology.board_prepare(seat)) for seat in range(2)]
    assert [row.state for row in rows] == [State.GONE, State.GONE]


def test_a_successor_of_a_killed_io_process_gets_its_slots_back(make_pool: MakePool) -> None:
    pool = make_pool(workers=1)
    pool.start_leader()
    child = os.fork()
    if child == 0:  # an I/O process that dies with a running and a queued job
        door = pool.door(is_real_time=True)
        door.submit(b"gate:old")
        door.submit(b"ok:never")
        door.client.flush_doorbells()
        signal.pause()
    pool.wait_started()
    kill(child)
    os.waitpid(child, 0)
    pool.board.row(pool.topology.board_io(0)).close()
    door = pool.door(is_real_time=True)
    assert door.slab.in_use_bytes > 0
    job = door.submit(b"ok:new")
    pool.open_gate()
    assert door.pump_all(job) == ["new@0"]
    door.pump(lambda: door.slab.in_use_bytes == 0)
    assert door.metrics.outcomes == 1


def test_successors_of_io_processes_killed_at_any_moment_find_every_slot_again(make_pool: MakePool) -> None:
    rng = random.Random(3)
    pool = make_pool(workers=2)
    pool.start_leader()
    told = os.eventfd(0)
    for turn in range(12):
        child = os.fork()
        if child == 0:
            door = pool.door(is_real_time=True)
            while True:
                jobs = [door.submit(b"ok:" + b"x" * rng.choice((10, 5000, 90_000))) for _ in range(20)]
                door.pump_all(*jobs)
                os.eventfd_write(told, 1)
        for _ in range(rng.randrange(1, 20)):
            os.eventfd_read(told)
        if turn % 4 == 3:
            kill(pool.worker_pids()[rng.randrange(2)])
        kill(child)
        os.waitpid(child, 0)
        pool.board.row(pool.topology.board_io(0)).close()
    os.close(told)
    door = pool.door(is_real_time=True)
    jobs = [door.submit(b"ok:%d" % n) for n in range(100)]
    assert [answer[:-2] for answer in door.pump_all(*jobs)] == [str(n) for n in range(100)]
    door.pump(lambda: door.slab.in_use_bytes == 0)
    assert door.metrics.submitted == door.metrics.outcomes == 100


@pytest.mark.parametrize("seed", [1, 2])
def test_every_job_has_one_outcome_while_workers_are_killed_at_random(make_pool: MakePool, seed: int) -> None:
    rng = random.Random(seed)
    pool = make_pool(workers=3, io_processes=1)
    pool.start_leader()
    door = pool.door(is_real_time=True)
    cancelled, jobs = set(), []
    kills = 0
    while len(jobs) < 1500:
        for _ in range(rng.randrange(1, 60)):
            kind = rng.choices((b"ok:", b"raise:", b"refuse:", b"die-once:"), (95, 2, 2, 0.2))[0]
            size = rng.choice((10, 1000, 30_000, 100_000))
            try:
                jobs.append(door.submit(kind + b"x" * size if kind == b"refuse:" else kind + b"y"))
            except MeshError:
                continue
            if rng.random() < 0.03:
                door.client.cancel(jobs[-1])
                jobs[-1].release_slot()
                cancelled.add(jobs[-1])
        if rng.random() < 0.3 and kills < 4:
            pid = rng.choice(pool.worker_pids())
            if pid:
                with contextlib.suppress(ProcessLookupError):  # it may just have died of a job
                    kill(pid)
                    kills += 1
        goal = len(door.results) + rng.randrange(30)
        door.pump(lambda goal=goal: len(door.results) >= min(goal, len(jobs) - len(cancelled)), 40)
    door.pump(lambda: len(door.results) == len(jobs) - len(cancelled), 40)
    assert not cancelled & set(door.results)
    assert door.metrics.submitted == door.metrics.outcomes
    assert door.metrics.errors["prepare_cancelled"] == len(cancelled)
    assert kills and door.metrics.retries
    door.pump(lambda: door.slab.in_use_bytes == 0)
    door.client.check(time.monotonic_ns())
    assert (door.metrics.queued_now, door.metrics.dispatched_now) == (0, 0)


def test_a_worker_that_dies_again_and_again_is_made_to_wait_and_the_board_tells_so(
    make_pool: MakePool,
) -> None:
    pool = make_pool(workers=2)
    pool.start_leader()
    door = pool.door(is_real_time=True)
    row = pool.board.row(pool.topology.board_prepare(0))
    for death in range(5):
        wait_until(lambda: row.pid and row.state is State.READY)
        dead = row.pid
        kill(dead)
        wait_until(lambda dead=dead: row.pid != dead)
        assert row.epoch == death + 1
    wait_until(lambda: row.restart_at_ns)
    assert row.pid == 0 and row.restart_at_ns - time.monotonic_ns() > SECOND // 2
    assert door.pump_all(door.submit(b"ok:other")) == ["other@0"], "the other worker serves on"
    wait_until(lambda: row.pid and row.state is State.READY)
    assert (row.restart_at_ns, row.restarts) == (0, 5)


def wait_until(condition: Callable[[], object], seconds: float = 20.0) -> None:
    give_up_at = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up_at
        time.sleep(0.002)


def become_subreaper() -> None:
    """Be what the supervisor is to orphaned workers."""
    assert ctypes.CDLL(None).prctl(36, ctypes.c_ulong(1), 0, 0, 0) == 0


def test_the_leader_stays_single_threaded_and_beats(make_pool: MakePool) -> None:
    pool = make_pool(workers=1)
    leader = pool.start_leader()
    row = pool.board.row(pool.topology.board_leader(0))
    before = row.heartbeat_ns
    while row.heartbeat_ns == before:
        select.select([], [], [], 0.01)
    assert len(os.listdir(f"/proc/{leader}/task")) == 1


# --- renewal ---


def test_outdated_workers_are_replaced_one_at_a_time_and_never_one_is_missing(make_pool: MakePool) -> None:
    pool = make_pool(workers=3)
    pool.start_leader()
    old = set(pool.worker_pids())
    pool.tell({"t": "renew"})
    least = most = 3
    while not select.select([pool.links[-1]], [], [], 0)[0]:
        seen = [[(row.pid, row.state, row.is_alive) for row in pool.rows()] for _ in range(2)]
        if seen[0] == seen[1]:  # so it was so at one moment; a row read late shows what never was
            ready = sum(state is State.READY for _, state, _ in seen[0])
            living = sum(is_alive for _, _, is_alive in seen[0])
            least, most = min(least, ready), max(most, living)
    assert pool.hear() == {"t": "renewed"}
    assert (least, most) == (3, 4)
    assert not old & set(pool.worker_pids())
    assert sum(row.is_alive for row in pool.rows()) == 3
    assert sum(row.restarts for row in pool.rows()) == 0


def test_fifty_requests_during_a_renewal_all_succeed_in_a_group_of_one(make_pool: MakePool) -> None:
    pool = make_pool(workers=1, prepare_queue_capacity=1000)
    pool.start_leader()
    door = pool.door(is_real_time=True)
    answers = []
    for turn in range(5):
        pool.tell({"t": "renew"})
        while not select.select([pool.links[-1]], [], [], 0)[0]:
            jobs = [door.submit(b"ok:%d" % n) for n in range(10)]
            answers += door.pump_all(*jobs)
        assert pool.hear() == {"t": "renewed"}, turn
    assert len(answers) >= 50 and {answer[1:] for answer in answers} == {"@0"}
    assert not door.metrics.errors


def test_a_job_pushed_to_a_worker_that_had_left_gives_its_slot_back_though_its_seat_stays_empty(
    make_pool: MakePool,
) -> None:
    pool = make_pool(workers=1)
    pool.start_leader()
    door = pool.door(is_real_time=True)
    assert door.pump_all(door.submit(b"ok:first")) == ["first@0"]  # it believes in the first seat now
    pool.tell({"t": "renew"})
    assert pool.hear() == {"t": "renewed"}
    job = door.submit(b"ok:late")
    assert [lane.live for lane in door.client._lanes] == [1, 0]
    assert door.pump_all(job) == ["late@0"]
    assert not pool.rows()[0].is_alive
    door.pump(lambda: door.slab.in_use_bytes == 0)
    assert not door.metrics.errors


def test_no_job_is_lost_or_held_up_while_workers_are_renewed_without_pause(make_pool: MakePool) -> None:
    rng = random.Random(5)
    pool = make_pool(workers=3, prepare_queue_capacity=1000, prepare_queue_timeout_ms=60_000)
    pool.start_leader()
    door = pool.door(is_real_time=True)
    pool.tell({"t": "renew"})
    renewals = 0
    while renewals < 30:
        if select.select([pool.links[-1]], [], [], 0)[0]:
            assert pool.hear() == {"t": "renewed"}
            renewals += 1
            pool.tell({"t": "renew"})
        bodies = [b"refuse:" + b"x" * rng.choice((1, 1000, 20_000)) for _ in range(rng.randrange(1, 9))]
        jobs = [door.submit(body) for body in bodies]
        assert set(door.pump_all(*jobs)) == {"invalid_request"}
    door.pump(lambda: door.slab.in_use_bytes == 0)
    assert not door.metrics.errors and door.metrics.submitted == door.metrics.outcomes


def test_a_running_job_ends_with_the_old_worker_and_idle_workers_are_replaced_before(
    make_pool: MakePool,
) -> None:
    pool = make_pool(workers=2)
    pool.start_leader()
    door = pool.door(is_real_time=True)
    running = door.submit(b"gate:kept")
    door.pump_started()
    busy = next(row.pid for row in pool.rows() if row.busy)
    (idle,) = set(pool.worker_pids()) - {busy}
    pool.tell({"t": "renew"})
    door.pump(lambda: idle not in pool.worker_pids() and busy not in pool.worker_pids())
    alive = {row.pid for row in pool.rows() if row.is_alive}
    assert busy in alive and idle not in alive and len(alive) == 3
    assert not select.select([pool.links[-1]], [], [], 0)[0]  # not renewed while the old one runs a job
    assert door.pump_all(door.submit(b"ok:meanwhile")) == ["meanwhile@0"]
    pool.open_gate()
    assert door.pump_all(running) == ["kept@0"]
    assert pool.hear() == {"t": "renewed"}
    assert busy not in {row.pid for row in pool.rows() if row.is_alive}


def test_a_death_beside_the_successor_makes_no_restart_of_the_next_renewal(make_pool: MakePool) -> None:
    pool = make_pool(workers=1)
    pool.start_leader()
    door = pool.door(is_real_time=True)
    running = door.submit(b"gate:a")
    door.pump_started()
    old = pool.worker_pids()[0]
    pool.tell({"t": "renew"})
    door.pump(lambda: sum(row.is_alive and row.state is State.READY for row in pool.rows()) == 2)
    kill(old)
    assert pool.hear() == {"t": "renewed"}
    pool.open_gate()
    assert door.pump_all(running) == ["a@1"]
    pool.tell({"t": "renew"})
    assert pool.hear() == {"t": "renewed"}
    assert sum(row.restarts for row in pool.rows()) == 0
    kill(pool.worker_pids()[0])
    door.pump(lambda: sum(row.restarts for row in pool.rows()) == 1)


def test_a_worker_outdated_twice_is_replaced_by_one_that_is_not(make_pool: MakePool) -> None:
    pool = make_pool(workers=2)
    pool.start_leader()
    door = pool.door(is_real_time=True)
    jobs = [door.submit(b"gate:a"), door.submit(b"gate:b")]
    door.pump_started(2)
    pool.tell({"t": "renew"})
    door.pump(lambda: sum(row.is_alive for row in pool.rows()) == 3)
    half = set(pool.worker_pids())
    pool.tell({"t": "renew"})
    pool.open_gate(2)
    assert sorted(door.pump_all(*jobs)) == ["a@0", "b@0"]
    # The first renewal may end before the second is heard of.
    door.pump(lambda: not half & set(pool.worker_pids()) and sum(row.is_alive for row in pool.rows()) == 2)


def test_a_worker_that_died_is_replaced_in_its_own_seat_whichever_that_is(make_pool: MakePool) -> None:
    pool = make_pool(workers=1)
    leader = pool.start_leader()
    pool.tell({"t": "renew"})
    assert pool.hear() == {"t": "renewed"}
    (row,) = (row for row in pool.rows() if row.is_alive)
    assert row is pool.rows()[1]
    door = pool.door(is_real_time=True)
    pid = row.pid
    kill(pid)
    door.pump(lambda: row.pid not in (0, pid) and row.state is State.READY)
    become_subreaper()
    kill(leader)
    os.waitpid(leader, 0)
    pid = row.pid
    kill(pid)
    os.waitpid(pid, 0)
    pool.start_leader()
    assert row.is_alive and row.pid != pid and not pool.rows()[0].is_alive


def test_a_leader_that_hands_over_leaves_its_workers_to_the_next_which_replaces_them(
    make_pool: MakePool,
) -> None:
    become_subreaper()
    pool = make_pool(workers=2)
    leader = pool.start_leader()
    old = set(pool.worker_pids())
    door = pool.door(is_real_time=True)
    running = door.submit(b"gate:kept")
    door.pump_started()
    pool.tell({"t": "hand_over"})
    pool.leaders.remove(leader)
    _, status = os.waitpid(leader, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert {row.pid for row in pool.rows() if row.state is State.READY} == old
    assert door.pump_all(door.submit(b"ok:meanwhile")) == ["meanwhile@0"]
    pool.open_gate()
    pool.start_leader()
    assert door.pump_all(running) == ["kept@0"]
    assert not old & set(pool.worker_pids())
    assert not door.metrics.errors
    for pid in old:
        os.waitpid(pid, 0)
