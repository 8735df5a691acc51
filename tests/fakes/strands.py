"""Strands without an event loop, for what waits for promises alone."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

from meshd.strand import Strand


class FaultRaiser:
    """Stands in for the loop of such a strand: what fails in it fails in the test."""

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        raise context["exception"]


def run_strand(coroutine: Coroutine[Any, Any, None]) -> None:
    """Run it up to its first wait; it goes on within the call that keeps the promise."""
    Strand(FaultRaiser()).begin(coroutine)  # type: ignore[arg-type]
