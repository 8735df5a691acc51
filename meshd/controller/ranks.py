"""Make one upstream for each data-parallel rank of a server (``--dp-aware``); pure."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import replace

from meshd.routing.registry import Upstream


def ranks_of(origin: Upstream, numbers: Sequence[int]) -> list[Upstream]:
    """Return the ranks of ``origin``, one for each of ``numbers``; its own id stays that of the server."""
    return [
        replace(
            origin,
            number=number,
            id=str(uuid.uuid4()),
            dp_rank=rank,
            dp_size=len(numbers),
            origin_id=origin.id,
        )
        for rank, number in enumerate(numbers)
    ]
