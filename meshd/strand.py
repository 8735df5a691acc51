"""A coroutine that goes on within the call that wakes it: what a request is, instead of an asyncio task.

A task costs 9,000 instructions to make and forget, and each time it wakes 5,000 more: a future, a handle, a
turn of the loop. A request waits three times, each time for one of our own callbacks.

    callback ── promise.set_result(…) ──> the strand that waits goes on, up to its next wait ──> the callback

So whoever keeps a promise has left its own state in order before, and does nothing after it that depends on
what the strand may have done: it may have ended, closed connections, or begun the next request.

A strand may wait for asyncio's futures too, and is woken by those as a task is, a turn of the loop later. It
is no task, though: `asyncio.timeout` works only in a task, which a strand then waits for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator
from functools import partial
from typing import Any, Final, Generic, TypeVar, cast

T = TypeVar("T")

_OVER: Final = object()
_NEXT: Final = next  # compiled code would look the name of a builtin up at each step


class Promise(Generic[T]):
    """What one strand waits for, and one callback gives: a result, or an exception that the waiter gets.

    Only the first counts. A task may wait for it as well: to tasks it looks like a future.
    """

    __slots__ = ("_asyncio_future_blocking", "_error", "_is_done", "_result", "_task_wakeup", "strand")

    def __init__(self) -> None:
        self._is_done = False
        self._result: T | None = None
        self._error: BaseException | None = None
        self._task_wakeup: Callable[[], object] | None = None
        self._asyncio_future_blocking = False  # how tasks know a future
        self.strand: Strand | None = None  # that waits for it

    def __repr__(self) -> str:
        return f"Promise(done={self._is_done}, error={self._error!r})"

    def __await__(self) -> Generator[Promise[T], None, T]:
        if not self._is_done:
            self._asyncio_future_blocking = True
            yield self
        return self.result()

    def done(self) -> bool:
        return self._is_done

    def result(self) -> T:
        """Return what was given, or raise it; ``InvalidStateError`` before."""
        if self._error is not None:
            raise self._error
        if not self._is_done:
            raise asyncio.InvalidStateError("the promise has not been kept")
        return cast(T, self._result)

    def exception(self) -> BaseException | None:
        return self._error

    def set_result(self, result: T) -> None:
        if not self._is_done:
            self._result = result
            self._settle()

    def set_exception(self, error: BaseException) -> None:
        if not self._is_done:
            self._error = error
            self._settle()

    def _settle(self) -> None:
        self._is_done = True
        strand = self.strand
        if strand is not None:
            self.strand = None
            strand.go_on()
        elif self._task_wakeup is not None:
            self._task_wakeup()

    # What a task asks of a future.

    def get_loop(self) -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()

    def add_done_callback(self, callback: Callable[[Any], None], *, context: Any = None) -> None:
        self._task_wakeup = partial(self.get_loop().call_soon, callback, self, context=context)

    def cancel(self, msg: object = None) -> bool:
        """Be abandoned by the task that waits."""
        if self._is_done:
            return False
        self.set_exception(asyncio.CancelledError())
        return True


class Strand:
    """Runs one coroutine. ``begin`` runs it up to its first wait; it is over when ``is_over`` says so."""

    __slots__ = ("_is_cancelled", "_loop", "_steps", "_waits_for", "is_over")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._steps: Generator[Any, None, None] | None = None
        self._waits_for: Any = None
        self._is_cancelled = False  # and has not been told yet
        self.is_over = False

    def begin(self, coroutine: Coroutine[Any, None, None]) -> None:
        self._steps = coroutine.__await__()
        self.go_on()

    def go_on(self) -> None:
        """Run up to the next wait; whoever calls it knows that the last one is over."""
        steps = self._steps
        if steps is None:
            return
        self._waits_for = None
        try:
            # `send` would end with a StopIteration that is raised and caught: 4,000 instructions.
            waits_for = _NEXT(steps, _OVER)
        except (Exception, asyncio.CancelledError) as fault:  # as from a task: it is not the caller's
            self._end(fault)
            return
        if waits_for is _OVER:
            self._end()
        else:
            self._wait(waits_for)

    def _wait(self, waits_for: Any) -> None:
        """Be woken when ``waits_for`` is over: a promise, a future, or nothing but a turn of the loop."""
        self._waits_for = waits_for
        if isinstance(waits_for, Promise):
            waits_for.strand = self
        elif waits_for is None:
            self._loop.call_soon(self.go_on)
        else:
            waits_for._asyncio_future_blocking = False
            waits_for.add_done_callback(self._woken)
        if self._is_cancelled:
            self.cancel()

    def _woken(self, future: object) -> None:
        self.go_on()

    def cancel(self) -> None:
        """Let the coroutine get a ``CancelledError`` where it waits, in a turn of the loop.

        What it waits for may be there at that moment; then it goes on with that, and is cancelled at its
        next wait: nothing that was given gets lost.
        """
        waits_for = self._waits_for
        self._is_cancelled = False
        if isinstance(waits_for, Promise):
            waits_for.strand = None
            self._loop.call_soon(self._throw)
        elif waits_for is None or not waits_for.cancel():
            self._is_cancelled = not self.is_over

    def _throw(self) -> None:
        steps = self._steps
        if steps is None:
            return
        try:
            waits_for = steps.throw(asyncio.CancelledError())
        except StopIteration:
            self._end()
        except (Exception, asyncio.CancelledError) as fault:
            self._end(fault)
        else:
            self._wait(waits_for)

    def _end(self, fault: BaseException | None = None) -> None:
        self._steps = None
        self._waits_for = None
        self.is_over = True
        if fault is not None and not isinstance(fault, asyncio.CancelledError):
            self._loop.call_exception_handler({"message": f"{self!r} failed", "exception": fault})
