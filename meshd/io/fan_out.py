"""Ask every origin that may keep a stored response, and find the one answer for the client.

A Responses resource operation goes to all ``origins``: at most 32 are asked at a time, in
their order. The first 2xx to arrive wins and ends all other exchanges. Without one the best answer counts,
5xx before others before 404, ties by order; so an answer that is no 2xx is kept, its body unread and bounded
by the connection, until every origin has answered or failed, and a better one replaces it.

Each origin's load is counted from the moment it is asked until its exchange ends. Whatever happens, a
cancellation included, everything is given back within a turn of the loop, except what the winner holds; that
is the caller's.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from meshd.api.endpoints import RESPONSES_PATH, Endpoint
from meshd.errors import MeshError
from meshd.io.headers import forwarded_fields, upstream_head
from meshd.io.http1 import RequestHead, ResponseHead
from meshd.io.leg import Leg, error_type_of
from meshd.io.tracing import NO_TRACE
from meshd.io.upstream import UpstreamFailure
from meshd.routing.retry_rules import BUSY, FAILURES

if TYPE_CHECKING:
    from meshd.io.account import Record
    from meshd.io.services import Services
    from meshd.io.tracing import LegTrace
    from meshd.routing.conditions import Outcome
    from meshd.routing.placement import Placement
    from meshd.routing.upstream import Upstream

MAX_ASKED: Final = 32
ANSWER_SECS: Final = 30.0
"""How long each of several origins may take, unless the first-byte timer says otherwise."""


class Holder(Protocol):
    """Who counts load: the placer, or what stands before it."""

    def hold(self, upstream: Upstream) -> Placement: ...

    def release(self, placement: Placement) -> None: ...

    def report(self, placement: Placement, outcome: Outcome, began_s: float, ended_s: float) -> bool: ...

    def note_busy(self, upstream: Upstream, advice: bytes | None, now_s: float) -> str: ...


class Winner(NamedTuple):
    """The answer to relay. The caller owes the leg and the placement one release each."""

    leg: Leg
    response: ResponseHead
    authority: str
    placement: Placement


@dataclass(frozen=True, slots=True)
class ResourceRequest:
    """One resource operation; ``resource_id`` is the decoded id, ``head`` the client's own."""

    head: RequestHead
    endpoint: Endpoint
    resource_id: str
    request_id: str
    record: Record | None = None  # takes what is traced of it

    def to_head(self) -> RequestHead:
        """Return the client's head with the path that upstreams are asked for."""
        path = self.endpoint.path.replace(f"{RESPONSES_PATH}/{{id}}", f"{RESPONSES_PATH}/{self.resource_id}")
        return self.head.with_target(path.encode("ascii") + self.head.query)


@dataclass(slots=True)
class _Answer:
    order: int
    winner: Winner

    @property
    def is_success(self) -> bool:
        return 200 <= self.winner.response.status < 300

    @property
    def key(self) -> tuple[int, int]:
        """The smallest is the best answer."""
        status = self.winner.response.status
        if self.is_success:
            return 0, self.order
        return (1 if status >= 500 else 3 if status == 404 else 2), self.order


class FanOut:
    """One resource operation in progress. ``request_deadline``: on the clock of ``io``."""

    def __init__(
        self, io: Services, holder: Holder, request: ResourceRequest, request_deadline: float
    ) -> None:
        self._io = io
        self._holder = holder
        self._request = request
        self._head = request.to_head()
        self._deadline = request_deadline
        self._limit_s: float | None = None
        self._failures: list[str] = []
        self._legs: dict[Leg, str] = {}  # that hold a connection, or wait for one, by the id of the upstream

    async def run(self, origins: Sequence[Upstream]) -> Winner:
        """Ask ``origins``, each once; return the answer to relay.

        Raises ``MeshError`` ``no_worker_response`` if none answered.
        """
        first_byte_s = self._io.first_byte_timeout_s
        self._limit_s = first_byte_s or (ANSWER_SECS if len(origins) > 1 else None)
        waiting = deque(enumerate(origins))
        asked: set[asyncio.Task[_Answer | None]] = set()
        best: _Answer | None = None
        try:
            while waiting or asked:
                while waiting and len(asked) < MAX_ASKED:
                    asked.add(asyncio.create_task(self._ask(*waiting.popleft())))
                done, _ = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    asked.remove(task)
                    best = self._better(best, task.result())
                if best is not None and best.is_success:
                    break
        except BaseException:
            self._drop(best)
            raise
        finally:
            for task in asked:
                task.add_done_callback(self._drop_late)  # it may have its answer at this very moment
                task.cancel()
        if best is None:
            raise MeshError(
                "no_worker_response", "No server answered.", cause="; ".join(self._failures[:MAX_ASKED])
            )
        del self._legs[best.winner.leg]
        return best.winner

    def cut_off(self, removed: Collection[str], cause: str) -> None:
        """End the exchanges with the upstreams that have these ids, as if those had died."""
        for leg, upstream_id in self._legs.items():
            if upstream_id in removed:
                leg.cut_off(cause)

    async def _ask(self, order: int, upstream: Upstream) -> _Answer | None:
        """Return the answer of one origin, None if it gave none."""
        io = self._io
        address, authority = io.pool.target(upstream)
        placement = self._holder.hold(upstream)
        began_at = io.clock()
        leg = Leg(io, self._deadline)
        self._legs[leg] = upstream.id
        answer: _Answer | None = None
        traced, trace_fields = self._trace(upstream)
        try:
            request = self._bytes_for(upstream, authority, trace_fields)
            async with asyncio.timeout(self._time_left_s()):
                response = await leg.ask(address, self._head.method, request, [], needs_fresh=False)
            self._note_status(placement, response, began_at)
            answer = _Answer(order, Winner(leg, response, authority, placement))
        except UpstreamFailure as failure:
            kind = error_type_of(failure)
            if traced is not None:
                traced.error = kind
            self._note_failure(placement, kind, failure.cause, began_at)
        except TimeoutError:
            if traced is not None:
                traced.error = "timeout"
            self._note_failure(placement, "timeout", "no answer in time", began_at)
        finally:
            if traced is not None:
                traced.end(io.clock(), leg)
            if answer is None:  # a cancellation too
                del self._legs[leg]
                leg.close()
                self._holder.release(placement)
        return answer

    def _trace(self, upstream: Upstream) -> tuple[LegTrace | None, bytes]:
        tracing, record = self._io.tracing, self._request.record
        if tracing is None or record is None:
            return NO_TRACE
        return tracing.leg(record, self._request.head, upstream.url)

    def _bytes_for(self, upstream: Upstream, authority: str, trace_fields: bytes) -> bytes:
        key = upstream.api_key
        return upstream_head(
            self._head,
            base_path=upstream.base_path,
            authority=authority,
            fields=forwarded_fields(self._head, key is None, trace_fields),
            body_bytes=0 if self._head.method == "POST" else None,
            request_id=self._request.request_id,
            api_key=key,
            sends_x_api_key=False,
        )

    def _time_left_s(self) -> float | None:
        left_s = max(0.0, self._deadline - self._io.clock())
        return left_s if self._limit_s is None else min(left_s, self._limit_s)

    def _note_status(self, placement: Placement, response: ResponseHead, began_at: float) -> None:
        """Take in what a status says of its upstream; stored responses are asked for all the same."""
        io, status, url = self._io, response.status, placement.upstream.url
        io.metrics.upstream_response(status)
        if status in BUSY:
            advice = response.values.get(b"retry-after")
            io.metrics.backpressure(url, self._holder.note_busy(placement.upstream, advice, io.clock()))
        elif status in FAILURES:
            self._holder.report(placement, "failure", began_at, io.clock())

    def _note_failure(self, placement: Placement, kind: str, cause: str, began_at: float) -> None:
        io, upstream = self._io, placement.upstream
        io.metrics.attempt_failed(kind)
        io.metrics.leg_ended(upstream.url, "failure")
        self._holder.report(placement, "failure", began_at, io.clock())
        self._failures.append(f"{upstream.base_url}: {cause}")

    def _better(self, one: _Answer | None, other: _Answer | None) -> _Answer | None:
        """Return the better of two answers and give the other one back."""
        if one is None or other is None:
            return one or other
        best, rest = (one, other) if one.key < other.key else (other, one)
        self._drop(rest)
        return best

    def _drop(self, answer: _Answer | None) -> None:
        if answer is not None:
            winner = answer.winner
            is_failure = winner.response.status in FAILURES
            self._io.metrics.leg_ended(winner.placement.upstream.url, "failure" if is_failure else "neutral")
            del self._legs[winner.leg]
            winner.leg.release()
            self._holder.release(winner.placement)

    def _drop_late(self, task: asyncio.Task[_Answer | None]) -> None:
        if not task.cancelled():
            self._drop(task.result())

    def __repr__(self) -> str:
        return f"FanOut({self._head.method} {self._head.target!r}, failed={len(self._failures)})"
