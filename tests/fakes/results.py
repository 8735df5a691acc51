"""Results of prepare jobs, as one worker writes them and one reader finds them."""

from __future__ import annotations

from meshd.api.view import RoutingView
from meshd.memory import Segment
from meshd.prepare.codec import Results, ViewWriter
from meshd.prepare.stopwatch import StageTimes
from meshd.slab import BodySlab


def encode_view(view: RoutingView, out: memoryview, times: StageTimes | None = None) -> int:
    """Write the view as a worker that has written none before; return its length."""
    return ViewWriter().write(view, times or StageTimes(), out, 0, len(out))


def seconds_in(record: bytes) -> dict[str, float]:
    """Return the stage times of one result, as they are counted: only those of stages that ran."""
    slab = BodySlab(Segment.create("slab", 1 << 20), len(record))
    slot = slab.reserve(1)
    assert slot is not None
    slot.view[: len(record)] = record
    results = Results(slab)
    results.read(slot.view_offset, slot.view, len(record))
    return {name: seconds for name, (seconds,) in results.take_seconds()}
