"""The gate: a request enters with a ticket, waits for one, or is refused.

At most ``max_concurrent`` tickets are held and at most ``queue_size`` requests wait, over all I/O
processes of the node; without a bound a ticket is one store into this process's own cell. Requests are
served in order of arrival within one process. How the bounds hold is told in `limits`, who comes next in
`line`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from meshd.admission.body_memory import BodyMemory
from meshd.admission.cells import GRANTED, HELD, SEGMENT_KIND, WAITING, Cells, segment_size
from meshd.admission.limits import GrantRate, SharedBound
from meshd.admission.line import Ending, Place, SharedLine, Wake
from meshd.errors import MeshError
from meshd.memory import Fence, Segment

__all__ = ["SEGMENT_KIND", "Gate", "GateLimits", "Ticket", "segment_size"]


@dataclass(frozen=True, slots=True)
class GateLimits:
    """Bounds of the node. ``max_concurrent`` ≤ 0: no bound. ``queue_size`` 0: enter at once or never."""

    max_concurrent: int
    queue_size: int
    queue_timeout_ns: int
    body_memory_bytes: int


class Ticket:
    """The right of one request to be served; released exactly once."""

    __slots__ = ("_gate",)

    def __init__(self, gate: Gate) -> None:
        self._gate: Gate | None = gate

    def release(self) -> None:
        """Let the next one in. ``RuntimeError`` the second time."""
        gate = self._gate
        if gate is None:
            raise RuntimeError("a ticket was released twice")
        self._gate = None
        gate._line.give(1)


class Gate:
    """The gate of one I/O process.

    ``row``: its seat; ``owner``: its process id. ``wake``: make another process's gate poll soon, given
    its row; without it a free place may wait for that process's next poll. Whoever owns the gate calls
    ``poll`` after each wake-up and at least every 50 ms.
    """

    def __init__(
        self,
        segment: Segment,
        row: int,
        rows: int,
        owner: int,
        limits: GateLimits,
        clock_ns: Callable[[], int],
        wake: Wake = lambda row: None,
    ) -> None:
        cells, fence = Cells(segment, row, rows, owner), Fence()
        bound = limits.max_concurrent if limits.max_concurrent > 0 else None
        self._held = SharedBound(cells, HELD, bound, fence)
        self._waiting = SharedBound(cells, WAITING, limits.queue_size, fence)
        self._line = SharedLine(self._held, self._waiting, row, wake)
        self._granted = SharedBound(cells, GRANTED, None, fence)
        self._granted.own = int(cells.column(GRANTED)[row])  # it only grows, through every owner
        self._rate = GrantRate()
        self._queue_timeout_ns = limits.queue_timeout_ns
        self._clock_ns = clock_ns
        self._is_closed = False
        self.memory = BodyMemory(cells, limits.body_memory_bytes, fence, wake)

    @property
    def held(self) -> int:
        """Tickets held in this process."""
        return self._held.own

    @property
    def waiting(self) -> int:
        """Requests of this process that wait for a ticket."""
        return self._waiting.own

    @property
    def has_waiting(self) -> bool:
        """Whether a request of this process waits, for a ticket or for body memory."""
        return self._waiting.own > 0 or self.memory.has_waiting

    def try_admit(self) -> Ticket | None:
        """Give a ticket at once; ``None`` without room, or while another request waits.

        Raises ``MeshError`` ``admission_closed``.
        """
        if self._is_closed:
            raise _closed()
        if not self._line.try_take(1):
            return None
        return self._ticket()

    def wait(self, on_end: Callable[[Ticket | MeshError], None]) -> Place:
        """Wait for a ticket; ``on_end`` gets it, or the refusal, and is not called from inside this call.

        Raises ``MeshError``: ``admission_full`` if too many wait already, ``admission_closed``.
        """
        if self._is_closed:
            raise _closed()

        def end(ending: Ending) -> None:
            on_end(self._ticket() if ending is Ending.GRANTED else self._refusal(ending))

        place = self._line.join(1, self._clock_ns() + self._queue_timeout_ns, end)
        if place is None:
            raise MeshError(
                "admission_full",
                "Too many requests are waiting already.",
                retry_after_s=self._retry_after_s(),
            )
        return place

    def leave(self, place: Place) -> bool:
        """Give a place in the queue up; False if ``on_end`` was called before, perhaps with a ticket."""
        return self._line.leave(place)

    def poll(self) -> None:
        """Take what has become free, and end waits that lasted too long."""
        now_ns = self._clock_ns()
        if self._held.bound is not None:
            self._rate.note(self._granted.ever(), now_ns)
        self._line.poll(now_ns)
        self.memory.poll(now_ns)

    def close(self) -> None:
        """Refuse whoever waits and whoever comes; tickets held stay good."""
        self._is_closed = True
        self._line.close()
        self.memory.close()

    def _ticket(self) -> Ticket:
        if self._held.bound is not None:
            self._granted.try_take()
        return Ticket(self)

    def _refusal(self, ending: Ending) -> MeshError:
        if ending is Ending.CLOSED:
            return _closed()
        return MeshError(
            "admission_timeout", "No place became free in time.", retry_after_s=self._retry_after_s()
        )

    def _retry_after_s(self) -> int:
        return self._rate.retry_after_s(self._waiting.total(), self._granted.ever(), self._clock_ns())

    def __repr__(self) -> str:
        return f"Gate({self._line}, {self.memory})"


def _closed() -> MeshError:
    return MeshError("admission_closed", "The server is shutting down.")
