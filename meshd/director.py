"""Decide: who may enter, what a body means, and where it goes. The same calls serve every front door.

It moves no bytes. `wait_for_ticket` and `reserve` may wait for room, the promise of `prepare` is kept by a
prepare worker, `place` is pure computation over shared memory. What is taken here has one release each.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final, Literal

from meshd.admission.gate import Gate, Ticket
from meshd.api.endpoints import Endpoint
from meshd.api.health import HealthFacts
from meshd.api.view import NEEDS_TOKENS, RoutingView
from meshd.control import ProcessBoard, Topology
from meshd.errors import MeshError
from meshd.prepare.client import PrepareClient
from meshd.prepare.job import Job, Result
from meshd.routing.conditions import Conditions, Outcome
from meshd.routing.explanation import explanation
from meshd.routing.origins import first_available
from meshd.routing.placement import FAN_OUT, Placement, Placer
from meshd.routing.readiness import node_facts
from meshd.routing.retry_budget import RetryBudget
from meshd.routing.retry_rules import DERANK_S, RetryRules, retry_after_s
from meshd.routing.upstream import Upstream
from meshd.slab import BodySlab, Slot
from meshd.strand import Promise

BackPressure = Literal["deranked", "cooldown"]

KEPT_BYTES: Final = 4096  # of a body; the slot of one takes twice that at least
UNKNOWN_LENGTH_BYTES: Final = 65536  # what a body of unknown length reserves at first


class BodyRoom:
    """Room for one body: a share of the node's body memory, and the slot that it pays for."""

    __slots__ = ("_gate", "_kept", "_reserved_bytes", "_view_bytes", "slot")

    def __init__(self, gate: Gate, slot: Slot, reserved_bytes: int) -> None:
        self._gate = gate
        self._reserved_bytes = reserved_bytes
        self._kept = b""
        self._view_bytes = 0  # of a view area that was widened; an ordinary one is not counted
        self.slot = slot

    @property
    def body(self) -> memoryview:
        return self.slot.body

    def fill(self, body: bytes) -> None:
        """Store a whole body, instead of the one before.

        A small one is kept as it is, too: that costs less than to read it again.
        """
        self.slot.fill(body)
        self._kept = body if len(body) <= KEPT_BYTES else b""

    def content(self, body_bytes: int) -> bytes | memoryview:
        """Return the whole body, of so many bytes, which this room keeps until `release`."""
        return self._kept or self.slot.body[:body_bytes]

    def grow(self, body_bytes: int) -> bool:
        """Make room for ``body_bytes`` in all, keeping what is there; False if there is none now."""
        more = body_bytes - self._reserved_bytes
        if more > 0 and not self._gate.memory.grow(more):
            return False
        self._reserved_bytes += max(0, more)
        slot = self.slot.grow(body_bytes)
        if slot is None:
            return False
        self.slot = slot
        return True

    def widen_view(self, view_bytes: int) -> bool:
        """Make the view area so long, once and before any job; False if there is no memory for it now."""
        if not self._gate.memory.grow(view_bytes):
            return False
        if not self.slot.widen_view(view_bytes):
            self._gate.memory.release(view_bytes)
            return False
        self._reserved_bytes += view_bytes
        self._view_bytes = view_bytes
        return True

    def settle_view(self, view_bytes: int) -> None:
        """Give back what was reserved for the view area beyond what was written into it."""
        surplus = self._view_bytes - view_bytes
        if surplus > 0:
            self._view_bytes = view_bytes
            self._reserved_bytes -= surplus
            self._gate.memory.release(surplus)

    def release(self, job: Job | None) -> None:
        """Give both back; the slot of a job no sooner than no prepare worker can touch it."""
        if job is None:
            self.slot.release()
        else:
            job.release_slot()
        self._gate.memory.release(self._reserved_bytes)

    def __repr__(self) -> str:
        return f"BodyRoom({self._reserved_bytes} bytes, {self.slot!r})"


class Director:
    """The decisions of one front door."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        gate: Gate,
        slab: BodySlab,
        prepare: PrepareClient,
        placer: Placer,
        board: ProcessBoard,
        topology: Topology,
        queue_timeout_ns: int,
        has_tokenizer: Callable[[], bool],
        *,
        conditions: Conditions,
        budget: RetryBudget,
        retry_rules: RetryRules,
        uniform: Callable[[], float] = random.random,
    ) -> None:
        self._loop = loop
        self._gate = gate
        self._slab = slab
        self._prepare = prepare
        self._placer = placer
        self._board = board
        self._topology = topology
        self._queue_timeout_ns = queue_timeout_ns
        self._has_tokenizer = has_tokenizer
        self._conditions = conditions
        self.budget = budget
        self.retry_rules = retry_rules
        self._uniform = uniform
        self._is_flush_due = False

    # -------------------------------------------------------------------------------------- entering

    def try_admit(self) -> Ticket | None:
        """Return a ticket at once, or None when the request has to wait for one."""
        return self._gate.try_admit()

    async def wait_for_ticket(self) -> Ticket:
        """Wait in line; raise MeshError `admission_full`, `admission_timeout` or `admission_closed`."""
        future: asyncio.Future[Ticket] = self._loop.create_future()

        def end(result: Ticket | MeshError) -> None:
            if future.done():
                if isinstance(result, Ticket):
                    result.release()
            elif isinstance(result, MeshError):
                future.set_exception(result)
            else:
                future.set_result(result)

        place = self._gate.wait(end)
        try:
            return await future
        except asyncio.CancelledError:
            if not self._gate.leave(place) and _was_granted(future):
                future.result().release()
            raise

    def try_reserve(self, body_bytes: int | None) -> BodyRoom | None:
        """Return room for a body (None: unknown length) at once, or None when `reserve` has to wait."""
        wanted = UNKNOWN_LENGTH_BYTES if body_bytes is None else body_bytes
        if not self._gate.memory.reserve(wanted):
            return None
        slot = self._slab.reserve(wanted)
        if slot is None:
            self._gate.memory.release(wanted)
            return None
        return BodyRoom(self._gate, slot, wanted)

    async def reserve(self, body_bytes: int | None) -> BodyRoom:
        """Return room for a body (None: unknown length), before its first byte is stored.

        Waits as long as a ticket may be waited for; raises MeshError `buffer_budget_exhausted`.
        """
        wanted = UNKNOWN_LENGTH_BYTES if body_bytes is None else body_bytes
        if not self._gate.memory.reserve(wanted):
            await self._wait_for_memory(wanted)
        slot = self._slab.reserve(wanted)
        if slot is None:
            self._gate.memory.release(wanted)
            raise MeshError("buffer_budget_exhausted", "No memory is free for this request body.")
        return BodyRoom(self._gate, slot, wanted)

    async def _wait_for_memory(self, wanted: int) -> None:
        memory = self._gate.memory
        future: asyncio.Future[None] = self._loop.create_future()

        def end(error: MeshError | None) -> None:
            if future.done():
                if error is None:
                    memory.release(wanted)
            elif error is None:
                future.set_result(None)
            else:
                future.set_exception(error)

        place = memory.wait(wanted, time.monotonic_ns() + self._queue_timeout_ns, end)
        try:
            await future
        except asyncio.CancelledError:
            if not memory.leave(place) and _was_granted(future):
                memory.release(wanted)
            raise

    # ------------------------------------------------------------------------------------- preparing

    def job(self, endpoint: Endpoint, room: BodyRoom, body_length: int) -> Job:
        """Make the prepare job of a body that is whole; `prepare` runs it."""
        return Job(endpoint.number, self._placer.needs_of(endpoint), room.slot, body_length)

    def prepare(self, job: Job) -> Promise[Result]:
        """Submit the job, which promises its view, or the MeshError that refuses the request.

        Whoever stops waiting for it calls `cancel` first. Raises MeshError when the pool takes no job.
        """
        self._prepare.submit(job)
        if self._gate.held <= 1:
            self._prepare.flush_doorbells()  # no other request is here whose job could share the wake-up
        elif not self._is_flush_due:
            self._is_flush_due = True
            self._loop.call_soon(self._flush)
        return job

    def cancel(self, job: Job) -> None:
        """Forget a job whose result nobody waits for any more; harmless when it has ended."""
        self._prepare.cancel(job)

    def _flush(self) -> None:
        """Ring the doorbells of this tick: one wake-up for all the jobs it submitted."""
        self._is_flush_due = False
        self._prepare.flush_doorbells()

    # --------------------------------------------------------------------------------------- placing

    @property
    def needs_session(self) -> bool:
        """Whether views have to carry the session key of their request."""
        return self._placer.needs_session

    def place(self, endpoint: Endpoint, view: RoutingView, tried: Collection[int] = ()) -> Placement:
        """Choose an upstream and count its load; raise MeshError when there is none.

        ``tried``: numbers of the upstreams that this request has been to.
        """
        return self._placer.place(endpoint, view, tried)

    def explain(self, endpoint: Endpoint, view: RoutingView) -> Mapping[str, Any]:
        """Return where a request would be placed now, and why, as JSON; raise what `place` would."""
        rehearsal = self._placer.rehearse(endpoint, view, self.retry_rules.max_s)
        return explanation(rehearsal, endpoint, view, self._conditions)

    def ready_in_s(self, endpoint: Endpoint, view: RoutingView) -> float:
        """Return in how many seconds a request can be placed, infinite if that is not known."""
        return self._placer.ready_in_s(endpoint, view)

    def retry_delay_s(self, retry: int) -> float:
        """Return the delay before retry number ``retry``, from 1, with its jitter."""
        return self.retry_rules.delay_s(retry, self._uniform)

    def report(self, placement: Placement, outcome: Outcome, began_s: float, ended_s: float) -> bool:
        """Tell the breaker how an exchange ended, before its release; False if a failure got lost."""
        return self._placer.report(placement, outcome, began_s, ended_s)

    def note_busy(self, upstream: Upstream, advice: bytes | None, now_s: float) -> BackPressure:
        """Heed a 429 or 503 on the whole node; ``advice``: its `retry-after`. Returns what was done."""
        delay_s = retry_after_s(advice, time.time)
        if delay_s is None:
            self._conditions.derank(upstream.number, now_s + DERANK_S)
            return "deranked"
        self._conditions.cool_down(upstream.number, now_s + delay_s)
        return "cooldown"

    def origins(self, endpoint: Endpoint) -> tuple[Upstream, ...]:
        """Return the origins that a resource operation asks; raise MeshError when there are none."""
        return self._placer.origins(endpoint)

    def first_available(self) -> Upstream:
        """Return the first upstream that takes requests; raise MeshError when there is none."""
        return first_available(self._placer.registry, self._conditions.is_available)

    def hold(self, upstream: Upstream, policy: str = FAN_OUT, reason: str = FAN_OUT) -> Placement:
        """Count the load of an upstream that is asked without having been picked."""
        return self._placer.hold(upstream, policy, reason)

    def release(self, placement: Placement) -> None:
        self._placer.release(placement)

    def model_label(self, model: str) -> str:
        """Return the bounded name of a model for metrics."""
        return self._placer.label_of(model)

    # ----------------------------------------------------------------------------------------- facts

    @property
    def has_waiting(self) -> bool:
        """Whether a request of this process waits for room: then a wake-up may be for it."""
        return self._gate.has_waiting

    def poll(self) -> None:
        """Serve those who wait for room; called often, see `Gate.poll`."""
        self._gate.poll()

    def close(self) -> None:
        """Take nobody in any more."""
        self._gate.close()

    @property
    def held_tickets(self) -> int:
        return self._gate.held

    @property
    def waiting_requests(self) -> int:
        return self._gate.waiting

    @property
    def reserved_bytes(self) -> int:
        return self._gate.memory.reserved_bytes

    @property
    def body_memory_bytes(self) -> int:
        """The bound on body memory of the node."""
        return self._gate.memory.bound_bytes

    def health_facts(self) -> HealthFacts:
        return node_facts(
            self._board,
            self._topology,
            self._placer.registry,
            self._conditions,
            self.retry_rules.max_s,
            needs_tokens=bool(self._placer.needs & NEEDS_TOKENS),
            has_tokenizer=self._has_tokenizer(),
        )

    def __repr__(self) -> str:
        return f"Director({self._gate!r}, {self._prepare!r})"


def _was_granted(future: asyncio.Future[Any]) -> bool:
    """Whether a grant and a cancellation met: what was granted has to go back."""
    return future.done() and not future.cancelled() and future.exception() is None
