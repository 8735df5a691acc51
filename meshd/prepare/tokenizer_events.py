"""What a tokenizer tells about its work, and where a prepare worker counts it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

from meshd.metrics.cells import MetricRow

ENGINE_ERROR: Final = "engine_error"
NO_SAFE_CUT: Final = "no_safe_cut"
NO_TEMPLATE: Final = "no_chat_template"
"""Reasons of ``fallback``: something slower or coarser was used instead."""

MATCH: Final = "match"
MISMATCH: Final = "mismatch"
"""Results of ``crosscheck``."""


class TokenizerEvents(Protocol):
    """Told once for each event; every call is on the path of a job and must be cheap."""

    def fallback(self, reason: str) -> None: ...

    def bounded(self, offered_bytes: int, tokenized_bytes: int) -> None:
        """A head was asked of ``offered_bytes`` of text and ``tokenized_bytes`` were tokenized for it."""
        ...

    def crosscheck(self, result: str) -> None: ...

    def engine_off(self, source: str) -> None:
        """The fast engine of the tokenizer at ``source`` was found to differ and is now off on the node."""
        ...


class NoEvents:
    """For a tokenizer that is in no prepare worker."""

    def fallback(self, reason: str) -> None:
        pass

    def bounded(self, offered_bytes: int, tokenized_bytes: int) -> None:
        pass

    def crosscheck(self, result: str) -> None:
        pass

    def engine_off(self, source: str) -> None:
        pass


class CountedEvents:
    """Counts in the metric row of a prepare worker; ``log_error`` is its log's ``error``."""

    def __init__(self, row: MetricRow, log_error: Callable[..., None]) -> None:
        self._log_error = log_error
        self._fallbacks = {
            reason: row.counter("mesh_prepare_fallbacks_total", reason=reason)
            for reason in (ENGINE_ERROR, NO_TEMPLATE, NO_SAFE_CUT)
        }
        self._crosschecks = {
            result: row.counter("mesh_tokenizer_crosscheck_total", result=result)
            for result in (MATCH, MISMATCH)
        }
        self._offered = row.counter("mesh_prepare_bounded_bytes_total", kind="offered")
        self._tokenized = row.counter("mesh_prepare_bounded_bytes_total", kind="tokenized")

    def fallback(self, reason: str) -> None:
        self._fallbacks[reason].inc()

    def bounded(self, offered_bytes: int, tokenized_bytes: int) -> None:
        self._offered.inc(offered_bytes)
        self._tokenized.inc(tokenized_bytes)

    def crosscheck(self, result: str) -> None:
        self._crosschecks[result].inc()

    def engine_off(self, source: str) -> None:
        self._log_error(
            "tokenizer_engine_off",
            path=source,
            message="fastokens gave other ids than tokenizers and is not used for this tokenizer any more",
        )
