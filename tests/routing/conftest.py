from __future__ import annotations

from collections.abc import Callable

import pytest

from meshd.routing.upstream import Upstream

MakeUpstream = Callable[..., Upstream]


@pytest.fixture
def make_upstream() -> MakeUpstream:
    """An available upstream ``http://10.0.0.<number + 1>:8000`` of model m1, unless told otherwise."""

    def make(number: int, **changes: object) -> Upstream:
        facts: dict[str, object] = {
            "id": f"id-{number}",
            "base_url": f"http://10.0.0.{number + 1}:8000",
            "models": ("m1",),
            "is_healthy": True,
            "state": "active",
        }
        return Upstream(number=number, **{**facts, **changes})  # type: ignore[arg-type]

    return make
