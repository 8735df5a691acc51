"""What a successor finds on the rings, with workers played by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

MS = 1_000_000
MakePool = Callable[..., Any]


def test_a_successor_voids_old_jobs_and_keeps_their_slots_until_they_are_answered(
    make_pool: MakePool,
) -> None:
    pool = make_pool(workers=2)
    first, second = pool.hand_workers()
    dead = pool.door()
    jobs = [dead.submit(b"a"), dead.submit(b"b"), dead.submit(b"c")]
    running = first.take()
    pool.time[0] += MS
    successor = pool.door()
    busy = successor.slab.in_use_bytes
    assert busy > 0
    old = {job.slot.view_offset for job in jobs}
    fresh = successor.submit(b"new")
    assert fresh.slot.view_offset not in old
    assert second.step() == "skipped b"
    first.finish(running)
    steps = [second.step(), first.step(), first.step()]
    assert sorted(filter(None, steps)) == ["new", "skipped c"]
    successor.client.drain_completions()
    assert successor.answer(fresh) == "new" and len(successor.results) == 1
    assert successor.slab.in_use_bytes == 0
    assert successor.metrics.outcomes == 1
