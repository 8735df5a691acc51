"""The proofs that are still to be run for copies that serve already, one after the other, in the background.

A node serves as soon as its tokenizers are loaded: by the reference engine and by whole texts, which is right
and slow. What a proof allows comes when it has ended, seconds later. Nothing of it begins before the node is
ready, for a start has no CPU time to spare: then each leader loads the fast engines, one of them runs the
proofs, and the others wait for what it reports.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from meshd.prepare.child_answers import NoAnswer
from meshd.prepare.cut_proof import Cuts
from meshd.prepare.proof_child import ProofChild
from meshd.prepare.proof_record import Proof
from meshd.prepare.tokenizer_proof import Found, Unproved

LOOK_S: Final = 0.5  # how often what others report is read
RETRY_S: Final = 10.0  # until a child is tried again that could not be forked


class Child(Protocol):
    """``ProofChild``."""

    def answers(self) -> list[str] | None: ...
    def close(self) -> None: ...


class OpenProofs:
    """``runs``: whether this leader runs proofs; ``find``: what others have reported; ``may_begin``: whether
    it is time to.
    """

    def __init__(
        self,
        runs: bool,
        find: Callable[[str], Proof | None],
        may_begin: Callable[[], bool] = lambda: True,
        start: Callable[[Callable[[], Sequence[str]]], Child] = ProofChild,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._runs = runs
        self._find = find
        self._may_begin = may_begin
        self._start = start
        self._clock = clock
        self._open: dict[int, Unproved] = {}
        self._differences: dict[int, str] = {}  # of fast engines that brought their child to no end
        self._child: Child | None = None
        self._running = -1
        self._look_at = self._start_at = 0.0

    def add(self, serial: int, unproved: Unproved) -> None:
        """Have the proof of a copy run."""
        self._open[serial] = unproved

    def keep_only(self, serials: set[int]) -> None:
        """Forget the proofs of copies that are not wanted any more."""
        if self._running not in serials:
            self._end_child()
        for serial in set(self._open) - serials:
            del self._open[serial]

    def ended(self) -> list[tuple[int, Found, Proof | None]]:
        """Return what has been found since the last call, with what is worth keeping.

        Does not wait, but for the load of one fast engine, about a second.
        """
        if not self._open or not self._may_begin():
            return []
        incomplete = next((each for each in self._open.values() if not each.is_complete), None)
        if incomplete is not None:
            incomplete.complete()
            return []
        found = self._from_others()
        if self._runs:
            found += self._from_child()
            if self._child is None and self._open and self._clock() >= self._start_at:
                self._start_next()
        return found

    def close(self) -> None:
        """End the child that runs."""
        self._end_child()

    def _start_next(self) -> None:
        serial, unproved = next(iter(self._open.items()))
        try:
            self._child = self._start(unproved.work)
        except NoAnswer:  # no more processes for now, which says nothing about the tokenizer
            self._start_at = self._clock() + RETRY_S
        else:
            self._running = serial

    def _from_others(self) -> list[tuple[int, Found, Proof | None]]:
        now = self._clock()
        if now < self._look_at:
            return []
        self._look_at = now + LOOK_S
        found: list[tuple[int, Found, Proof | None]] = []
        for serial, unproved in list(self._open.items()):
            proof = self._find(unproved.key)
            if proof is not None:
                if serial == self._running:
                    self._end_child()
                del self._open[serial]
                found.append((serial, Found.of(proof), proof))
        return found

    def _from_child(self) -> list[tuple[int, Found, Proof | None]]:
        if self._child is None:
            return []
        serial = self._running
        unproved = self._open[serial]
        try:
            answers = self._child.answers()
            if answers is None:
                return []
            found = unproved.found(answers)
        except NoAnswer as broken:
            self._end_child()
            reason = str(broken)
            if unproved.fast is not None:  # perhaps the engine's doing: again without it
                self._differences[serial] = reason
                self._open[serial] = unproved.without_fast()
                return []
            found = Found("", Cuts(reason, reason), is_final=False)
        self._end_child()
        del self._open[serial]
        difference = self._differences.pop(serial, "")
        if difference:
            found = Found(difference, found.cuts, is_final=False)
        return [(serial, found, unproved.proof_of(found))]

    def _end_child(self) -> None:
        if self._child is not None:
            self._child.close()
            self._child = None
            self._running = -1

    def __repr__(self) -> str:
        return f"OpenProofs({sorted(self._open)}, running={self._running})"
