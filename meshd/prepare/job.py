"""One body on its way through the preparation pool, as its I/O process knows it.

States and what moves them (RUNNING of the specification is OUT with a claimed descriptor)::

    NEW ──submit──> WAITING ──dispatch──> OUT ──result──> FINISHED
                      ^  ^                │ │                     ^
                      │  └─ moved, ───────┘ └─ may be torn ──> HELD ──┘ whole
                      │     or first death                      │
                      └───────────────── torn, runs again ──────┘
    WAITING, OUT, HELD ──deadline, second death, pool closed──> FINISHED
    WAITING, OUT, HELD ──client left──> CANCELLED

Only the I/O process makes a job terminal. Result, deadline and departure race; the first one it sees counts
and the others find a terminal job and are dropped.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from meshd.api.answer import Answer
from meshd.api.view import RoutingView
from meshd.errors import MeshError
from meshd.slab import Slot
from meshd.strand import Promise

if TYPE_CHECKING:
    from meshd.prepare.lane import Entry

Result = RoutingView | Answer | MeshError


class JobState(Enum):
    """Where a job is; see above."""

    NEW = "new"
    WAITING = "waiting"
    OUT = "out"  # its descriptor is on a ring, claimed or not
    HELD = "held"  # its result may be torn: waits until its other descriptors are answered
    FINISHED = "finished"
    CANCELLED = "cancelled"


class Job(Promise[Result]):
    """One body to be prepared, and the promise of its result or error, which is not kept after cancel.

    The job borrows ``slot`` from ``submit`` until ``release_slot``. ``claimed_ns`` and ``finished_ns`` say
    when the worker ran the attempt that gave the result; both stay 0 if none did.
    """

    __slots__ = (
        "body_length",
        "claimed_ns",
        "deaths",
        "endpoint_number",
        "entry",
        "finish_by_ns",
        "finished_ns",
        "held_result",
        "is_claim_counted",
        "is_release_due",
        "is_suspect",
        "needs",
        "open_descriptors",
        "slot",
        "start_by_ns",
        "state",
        "submitted_ns",
    )

    def __init__(self, endpoint_number: int, needs: int, slot: Slot, body_length: int) -> None:
        super().__init__()
        self.endpoint_number = endpoint_number
        self.needs = needs
        self.slot = slot
        self.body_length = body_length
        self.submitted_ns = self.start_by_ns = self.finish_by_ns = 0
        self.claimed_ns = self.finished_ns = 0
        self.state = JobState.NEW
        self.deaths = 0  # of workers that were running it
        self.entry: Entry | None = None  # the descriptor whose result counts; others were withdrawn
        self.open_descriptors = 0  # all that name it and are not answered
        self.held_result: tuple[int, int] | None = None  # outcome and view length, while HELD
        self.is_suspect = False  # a withdrawn descriptor may have written into the view
        self.is_release_due = False
        self.is_claim_counted = False  # in the metric of the time that jobs wait

    @property
    def is_terminal(self) -> bool:
        return self.state is JobState.FINISHED or self.state is JobState.CANCELLED

    @property
    def is_running(self) -> bool:
        """Whether a prepare worker has claimed the descriptor that counts."""
        return self.entry is not None and self.entry.is_claimed

    @property
    def run_s(self) -> float:
        """How long the attempt ran that gave the result; 0 if none did."""
        return (self.finished_ns - self.claimed_ns) * 1e-9

    def release_slot(self) -> None:
        """Give the slot back as soon as no prepare worker can touch it. Call it exactly once."""
        if self.open_descriptors:
            self.is_release_due = True
        else:
            self.slot.release()

    def __repr__(self) -> str:
        return (
            f"Job({self.state.value}, {self.body_length} bytes, deaths={self.deaths},"
            f" open={self.open_descriptors})"
        )
