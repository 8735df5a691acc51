"""The budget of body memory: reserved bytes over all I/O processes stay within one bound.

A process keeps a little of what was released in hand (`_LEASE_BYTES`): ordinary bodies then touch no shared
word, which saves 3 µs a request. The lease counts as reserved, and goes back when anyone waits.

It is only arithmetic; the bytes themselves live in a `slab`. A body of known length reserves all of it
before its first byte is stored, and may wait for it. One of unknown length starts small and grows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from meshd.admission.cells import BODY_BYTES, BODY_WAITING, Cells
from meshd.admission.limits import SharedBound
from meshd.admission.line import Ending, Place, SharedLine, Wake
from meshd.errors import MeshError
from meshd.memory import Fence

_LEASE_BYTES: Final = 1 << 20


class BodyMemory:
    """The budget as one I/O process sees it; ``bound_bytes``: for the node."""

    def __init__(self, cells: Cells, bound_bytes: int, fence: Fence, wake: Wake) -> None:
        assert cells.row is not None, "only an I/O process reserves"
        self.bound_bytes = bound_bytes
        self._bytes = SharedBound(cells, BODY_BYTES, bound_bytes, fence)
        waiting = SharedBound(cells, BODY_WAITING, None, fence)
        self._waiting = waiting
        self._line = SharedLine(self._bytes, waiting, cells.row, wake)
        self._lease_bytes = min(_LEASE_BYTES, bound_bytes // 64)
        self._in_hand = 0

    @property
    def reserved_bytes(self) -> int:
        """What requests of this process hold."""
        return self._bytes.own - self._in_hand

    @property
    def has_waiting(self) -> bool:
        """Whether a request of this process waits for room."""
        return self._waiting.own > 0

    def reserve(self, body_bytes: int) -> bool:
        """Reserve at once; False without room, or while another request waits for more than is in hand."""
        if body_bytes <= self._in_hand:
            self._in_hand -= body_bytes
            return True
        return self._line.try_take(body_bytes)

    def grow(self, more_bytes: int) -> bool:
        """Reserve more for a body that is already arriving: ahead of those who wait, and never waiting.

        It holds memory that those who wait need, so letting it end is the way out.
        """
        return self._bytes.try_take(more_bytes)

    def wait(self, body_bytes: int, deadline_ns: int, on_end: Callable[[MeshError | None], None]) -> Place:
        """Wait for room; ``on_end(None)`` when the bytes are reserved, else with the refusal.

        Never called from inside this call. ``ValueError`` for more than the bound, which no wait grants.
        """
        if body_bytes > self.bound_bytes:
            raise ValueError(f"{body_bytes} bytes can never be reserved of {self.bound_bytes}")
        place = self._line.join(body_bytes, deadline_ns, lambda ending: on_end(_refusal(ending)))
        assert place is not None, "the line for body memory has no bound of its own: tickets bound it"
        return place

    def leave(self, place: Place) -> bool:
        """Stop waiting; False if ``on_end`` was called before, and reserved bytes are the caller's."""
        return self._line.leave(place)

    def release(self, body_bytes: int) -> None:
        """Give reserved bytes back, once. ``RuntimeError`` for more than this process holds."""
        in_hand = self._in_hand + body_bytes
        if in_hand <= self._lease_bytes and not self._waiting.own and in_hand <= self._bytes.own:
            self._in_hand = in_hand
        else:
            self._line.give(body_bytes)

    def poll(self, now_ns: int) -> None:
        """See ``Gate.poll``, which calls it."""
        if self._in_hand and (self._waiting.own or self._waiting.is_held_elsewhere()):
            in_hand, self._in_hand = self._in_hand, 0
            self._line.give(in_hand)
        self._line.poll(now_ns)

    def close(self) -> None:
        """Refuse those who wait."""
        self._line.close()

    def __repr__(self) -> str:
        return f"BodyMemory({self._line})"


def _refusal(ending: Ending) -> MeshError | None:
    if ending is Ending.GRANTED:
        return None
    if ending is Ending.CLOSED:
        return MeshError("admission_closed", "The server is shutting down.")
    return MeshError("buffer_budget_exhausted", "The server has no memory free for this request body.")
