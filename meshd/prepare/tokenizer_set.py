"""The tokenizers of one prepare worker by name, and the rule by which a model finds its own.

A worker gets its set at its fork and never a new copy after that; what was removed since, it drops when it
looks next. Dropping frees the worker's own pages alone: those it shares are its leader's to give back.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from meshd.prepare.tokenizer import LoadedTokenizer

DEFAULT_NAME: Final = "default"
_UNKNOWN: Final = "unknown"  # what a client writes that knows no model


class Removals(Protocol):
    """Which copies are out of use; ``TokenizerBoard`` is one."""

    def removals(self) -> int: ...
    def is_removed(self, serial: int) -> bool: ...


class TokenizerSet:
    """``entries``: by name. ``serials``: of their copies, by name, for those that ``removals`` may name."""

    def __init__(
        self,
        entries: Mapping[str, LoadedTokenizer],
        serials: Mapping[str, int] | None = None,
        removals: Removals | None = None,
    ) -> None:
        self._entries = dict(entries)
        self._serials = dict(serials or {})
        self._removals = removals
        self._seen = -1

    def find(self, model: str) -> LoadedTokenizer | None:
        """Return the tokenizer of ``model``, ``None`` if no entry fits.

        The entry of that name, else ``default``. No model, an empty one or ``unknown``: ``default``, else the
        only entry.
        """
        removals = self._removals
        if removals is not None and removals.removals() != self._seen:
            self._drop_removed(removals)
        entries = self._entries
        found = entries.get(DEFAULT_NAME)
        if model and model != _UNKNOWN:
            return entries.get(model, found)
        if found is None and len(entries) == 1:
            return next(iter(entries.values()))
        return found

    def first(self) -> LoadedTokenizer | None:
        """Return the tokenizer that was registered first, ``None`` if there is none."""
        self.find("")  # drops what was removed
        return next(iter(self._entries.values()), None)

    def _drop_removed(self, removals: Removals) -> None:
        self._seen = removals.removals()
        for name, serial in self._serials.items():
            if removals.is_removed(serial):
                self._entries.pop(name, None)

    def __repr__(self) -> str:
        return f"TokenizerSet({sorted(self._entries)})"
