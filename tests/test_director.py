"""The room of a body: what is filled in is what comes out, kept apart or read from the slot."""

from __future__ import annotations

from typing import Any

import pytest

from meshd.director import KEPT_BYTES, BodyRoom
from meshd.memory import Segment
from meshd.slab import SLAB_KIND, BodySlab

SMALL = b"s" * KEPT_BYTES
LARGE = b"l" * (KEPT_BYTES + 1)


@pytest.mark.parametrize("bodies", [(SMALL,), (LARGE,), (SMALL, LARGE), (LARGE, SMALL), (SMALL, b"s")])
def test_content_is_the_body_that_was_filled_in_last(bodies: tuple[bytes, ...]) -> None:
    slab = BodySlab(Segment.create(SLAB_KIND, 1 << 20), 8192)
    slot = slab.reserve(len(LARGE))
    assert slot is not None
    gate: Any = None
    room = BodyRoom(gate, slot, len(LARGE))
    for body in bodies:
        room.fill(body)
    assert room.content(len(bodies[-1])) == bodies[-1]
    assert room.body[: len(bodies[-1])] == bodies[-1]
