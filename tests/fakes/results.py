"""Results of prepare jobs, as a worker writes them."""

from __future__ import annotations

from meshd.api.view import RoutingView
from meshd.prepare.codec import ViewWriter


def encode_view(view: RoutingView, out: memoryview) -> int:
    """Write the view as a worker that has written none before; return its length."""
    return ViewWriter().write(view, out, 0, len(out))
