"""The fast engine at run time: checked against the reference now and then, and never the last word.

A difference means that the proof at load missed something. From then on nothing that the fast engine said is
to be believed: the switch, one word that all prepare workers of the node share, turns it off for this
tokenizer, and whoever asked starts again with the reference.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from meshd.api.prefix_key import pack_token_ids, unpack_token_ids
from meshd.prepare.engine_proof import Encode
from meshd.prepare.packed_engine import packing
from meshd.prepare.tokenizer_events import ENGINE_ERROR, MATCH, MISMATCH, TokenizerEvents


class EngineSwitch(Protocol):
    """Whether the fast engine of one tokenizer is off; once off, it stays off."""

    @property
    def is_off(self) -> bool: ...

    def turn_off(self) -> None: ...


class LocalSwitch:
    """A switch of this process alone."""

    def __init__(self) -> None:
        self._is_off = False

    @property
    def is_off(self) -> bool:
        return self._is_off

    def turn_off(self) -> None:
        self._is_off = True


class CrossCheck:
    """Says which encodes are repeated by the reference: each with the chance ``ratio``, 0 to 1.

    ``random``: uniform in [0, 1), seeded differently in each prepare worker.
    """

    def __init__(self, ratio: float, random: Callable[[], float]) -> None:
        self._ratio = ratio
        self._random = random

    def is_due(self) -> bool:
        return self._random() < self._ratio


class CheckedEngine:
    """The fast engine of one tokenizer in one prepare worker.

    ``reference`` may raise; what ``fast`` raises costs a second encode and is counted. ``source`` names the
    tokenizer in the log.
    """

    def __init__(
        self,
        fast: Encode,
        reference: Encode,
        switch: EngineSwitch,
        crosscheck: CrossCheck | None,
        events: TokenizerEvents,
        source: str,
    ) -> None:
        self._fast = fast
        self._pack = packing(fast)
        self._reference = reference
        self.switch = switch
        self._crosscheck = crosscheck
        self._events = events
        self._source = source

    def encode(self, text: str) -> list[int]:
        """Return the ids of ``text``. Look at ``switch`` afterwards: this may have turned it off."""
        try:
            ids = self._fast(text)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException:  # a panic of a Rust engine is no Exception
            self._events.fallback(ENGINE_ERROR)
            return self._reference(text)
        if self._crosscheck is not None and self._crosscheck.is_due():
            return self._checked(text, ids)
        return ids

    def pack(self, text: str) -> bytes:
        """Return the ids of ``text`` packed. Look at ``switch`` afterwards, as for ``encode``."""
        try:
            packed = self._pack(text)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException:
            self._events.fallback(ENGINE_ERROR)
            return pack_token_ids(self._reference(text))
        if self._crosscheck is not None and self._crosscheck.is_due():
            return pack_token_ids(self._checked(text, unpack_token_ids(packed)))
        return packed

    def _checked(self, text: str, ids: list[int]) -> list[int]:
        expected = self._reference(text)
        if ids == expected:
            self._events.crosscheck(MATCH)
            return ids
        self._events.crosscheck(MISMATCH)
        if not self.switch.is_off:  # only who turns it off tells
            self.switch.turn_off()
            self._events.engine_off(self._source)
        return expected
