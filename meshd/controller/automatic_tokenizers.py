"""The tokenizers that registered upstreams bring with them: one a model, by a label that is a path here.

The label ``tokenizer_path``, else ``model_path``, of a model's first upstream. Many servers report a path of
their own host or a hub id, so a path that is not here is nothing unusual: it is logged once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from meshd.controller.tokenizers import TokenizerKeeper, Wanted
from meshd.log import Log
from meshd.prepare.tokenizer_board import MAX_TEXT_BYTES
from meshd.routing.upstream import UNKNOWN_MODEL, Upstream

KEPT_S: Final = 300.0
"""How long a tokenizer is kept that no upstream names any more: its model may be moving to another server."""

_LABELS: Final = ("tokenizer_path", "model_path")


class AutomaticTokenizers:
    """Adds, replaces and removes the entries of labels; those that somebody registered are left alone."""

    def __init__(
        self,
        keeper: TokenizerKeeper,
        log: Log,
        clock: Callable[[], float],
        exists: Callable[[str], bool] = os.path.exists,
    ) -> None:
        self._keeper = keeper
        self._log = log
        self._clock = clock
        self._exists = exists
        self._followed: Sequence[Upstream] | None = None
        self._said: set[Wanted] = set()
        self._unnamed_since_s: dict[str, float] = {}

    def follow(self, upstreams: Sequence[Upstream]) -> None:
        """Bring the entries to what these upstreams say; free while it is the same set as the last time."""
        if upstreams != self._followed:
            self._followed = upstreams
            named = named_tokenizers(upstreams)
            for wanted in named:
                self._bring(wanted)
            self._note_unnamed({wanted.name for wanted in named})
        if self._unnamed_since_s:
            self._drop_unnamed()

    def _bring(self, wanted: Wanted) -> None:
        old = self._keeper.named(wanted.name)
        if old is not None:
            is_same = old.origin != "label" or old.asked_for == wanted.source
            if is_same or not self._is_here(wanted):
                return
        elif self._keeper.is_dismissed(wanted) or not self._is_here(wanted):
            return
        answer = self._keeper.add(wanted, replaces=True, origin="label")
        if isinstance(answer, str):
            self._say("tokenizer_not_registered", wanted, "there are too many")

    def _is_here(self, wanted: Wanted) -> bool:
        if self._exists(wanted.source):
            return True
        self._say("tokenizer_not_here", wanted, "its path does not exist on this host")
        return False

    def _say(self, event: str, wanted: Wanted, reason: str) -> None:
        if wanted not in self._said:
            self._said.add(wanted)
            self._log.info(event, model=wanted.name, path=wanted.source, reason=reason)

    def _note_unnamed(self, named: set[str]) -> None:
        now_s = self._clock()
        left = {entry.name for entry in self._keeper.entries if entry.origin == "label"} - named
        self._unnamed_since_s = {name: self._unnamed_since_s.get(name, now_s) for name in left}

    def _drop_unnamed(self) -> None:
        now_s = self._clock()
        for name, since_s in list(self._unnamed_since_s.items()):
            if now_s - since_s >= KEPT_S:
                del self._unnamed_since_s[name]
                entry = self._keeper.named(name)
                if entry is not None and entry.origin == "label":
                    self._keeper.remove(entry, is_dismissed=False)


def named_tokenizers(upstreams: Iterable[Upstream]) -> list[Wanted]:
    """Return what the first upstream of each model names, in registration order."""
    found: dict[str, Wanted] = {}
    seen: set[str] = set()
    for upstream in upstreams:
        if upstream.state == "starting":
            continue
        path = next((upstream.labels[label] for label in _LABELS if upstream.labels.get(label)), "")
        for model in upstream.models:
            if model in seen or model == UNKNOWN_MODEL:
                continue
            seen.add(model)
            if path and max(len(path.encode()), len(model.encode())) <= MAX_TEXT_BYTES:
                found[model] = Wanted(model, path)
    return list(found.values())
