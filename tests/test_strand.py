"""Strands and promises, by the order in which things happen."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from meshd.strand import Promise, Strand


class Scene:
    """A strand whose coroutine notes what it lives through in ``seen``."""

    def __init__(self) -> None:
        self.seen: list[object] = []
        self.strand = Strand(asyncio.get_running_loop())

    async def wait_for(self, *awaitables: Any) -> None:
        for awaitable in awaitables:
            try:
                self.seen.append(await awaitable)
            except asyncio.CancelledError:
                self.seen.append("cancelled")
                raise
            except ValueError as error:
                self.seen.append(str(error))

    def begin(self, *awaitables: Any) -> None:
        self.strand.begin(self.wait_for(*awaitables))


def scene(play: Callable[[Scene], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        await play(Scene())

    asyncio.run(run())


def test_strand_goes_on_within_the_call_that_keeps_its_promise() -> None:
    async def play(it: Scene) -> None:
        first, second = Promise[str](), Promise[str]()
        it.begin(first, second)
        first.set_result("one")
        assert it.seen == ["one"]
        second.set_exception(ValueError("two"))
        assert it.seen == ["one", "two"]
        assert it.strand.is_over

    scene(play)


def test_promise_kept_before_the_wait_is_no_wait() -> None:
    async def play(it: Scene) -> None:
        promise = Promise[str]()
        promise.set_result("early")
        it.begin(promise)
        assert it.seen == ["early"] and it.strand.is_over

    scene(play)


def test_only_the_first_result_of_a_promise_counts() -> None:
    promise = Promise[int]()
    with pytest.raises(asyncio.InvalidStateError):
        promise.result()
    promise.set_result(1)
    promise.set_result(2)
    promise.set_exception(ValueError())
    assert (promise.done(), promise.result(), promise.exception()) == (True, 1, None)


def test_strand_waits_for_futures_tasks_and_turns_of_the_loop() -> None:
    async def play(it: Scene) -> None:
        future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        it.begin(future, asyncio.create_task(asyncio.sleep(0, "task")), asyncio.sleep(0, "turn"))
        future.set_result("future")
        for _ in range(9):
            await asyncio.sleep(0)
        assert it.seen == ["future", "task", "turn"] and it.strand.is_over

    scene(play)


def test_cancelled_strand_drops_what_its_promise_brings_then() -> None:
    async def play(it: Scene) -> None:
        promise = Promise[str]()
        it.begin(promise)
        it.strand.cancel()
        promise.set_result("late")
        assert it.seen == []
        await asyncio.sleep(0)
        assert it.seen == ["cancelled"] and it.strand.is_over
        it.strand.cancel()  # harmless

    scene(play)


def test_cancelled_strand_cancels_the_future_that_it_waits_for() -> None:
    async def play(it: Scene) -> None:
        future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        it.begin(future)
        it.strand.cancel()
        await asyncio.sleep(0)
        assert future.cancelled() and it.seen == ["cancelled"] and it.strand.is_over

    scene(play)


def test_what_a_future_gave_at_the_moment_of_a_cancellation_is_not_lost() -> None:
    async def play(it: Scene) -> None:
        future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        it.begin(future, Promise[str]())
        future.set_result("given")
        it.strand.cancel()
        for _ in range(3):
            await asyncio.sleep(0)
        assert it.seen == ["given", "cancelled"] and it.strand.is_over

    scene(play)


def test_strand_that_is_cancelled_while_it_runs_is_cancelled_at_its_next_wait() -> None:
    async def play(it: Scene) -> None:
        async def cancel_itself() -> str:
            it.strand.cancel()
            return "running"

        it.begin(cancel_itself(), Promise[str]())
        await asyncio.sleep(0)
        assert it.seen == ["running", "cancelled"]

    scene(play)


def test_fault_in_a_strand_is_the_loops_and_not_the_callers() -> None:
    async def play(it: Scene) -> None:
        told: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _loop, context: told.append(context))
        promise = Promise[str]()
        it.begin(promise)
        promise.set_exception(RuntimeError("fault"))
        assert it.strand.is_over and str(told[0]["exception"]) == "fault"

    scene(play)


def test_task_waits_for_a_promise_as_for_a_future() -> None:
    async def play(it: Scene) -> None:
        kept, broken = Promise[str](), Promise[str]()
        task = asyncio.create_task(it.wait_for(kept, broken))
        await asyncio.sleep(0)
        kept.set_result("kept")
        assert it.seen == []  # a turn later, as with a future
        await asyncio.sleep(0)
        broken.set_exception(ValueError("broken"))
        await task
        assert it.seen == ["kept", "broken"]

    scene(play)


def test_cancelled_task_abandons_its_promise() -> None:
    async def play(it: Scene) -> None:
        promise = Promise[str]()
        task = asyncio.create_task(it.wait_for(promise))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert it.seen == ["cancelled"] and promise.done() and not promise.cancel()

    scene(play)
