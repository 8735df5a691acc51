"""The copies of tokenizers that one leader holds, kept as the tokenizer board wants them.

A leader loads every copy that an entry names, the current one and the next; what serves is decided on the
board. ``follow`` does what has changed there, ``tokenizer_set`` is what a worker forked now gets. Each step
is reported on the board at once, so the controller sees a load that is going on.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, replace
from typing import Any, Final

from meshd.errors import StartupError
from meshd.log import Log
from meshd.prepare.open_proofs import OpenProofs
from meshd.prepare.proof_record import Proof
from meshd.prepare.tokenizer import LoadedTokenizer, LoadFailed, WorkerTools
from meshd.prepare.tokenizer_board import Copy, Desired, Entry, Loaded, Report, TokenizerBoard
from meshd.prepare.tokenizer_events import NoEvents
from meshd.prepare.tokenizer_set import TokenizerSet

TRIES: Final = 3
PAUSE_S: Final = 2.0
LIMIT_S: Final = 300.0
RETRY_S: Final = 30.0
"""After which a successor tries again to load what its group has served before."""

Load = Callable[[Copy, float], LoadedTokenizer]
"""Loads one copy within so many seconds; raises ``LoadFailed``."""


class TokenizerCopies:
    """All copies of one leader. ``leader``: its area on the board; ``pid``: its own.

    ``load`` may run for minutes; ``pause`` sleeps so many seconds. ``must``: name of the entry without whose
    current copy no leader is to start, empty for none. ``on_freed``: called when copies were dropped, to give
    their memory back to the system. ``runs_proofs``: whether this leader runs the proofs of the node;
    ``may_prove``: whether it is time to.
    """

    def __init__(
        self,
        board: TokenizerBoard,
        leader: int,
        pid: int,
        load: Load,
        pause: Callable[[float], None],
        clock: Callable[[], float],
        log: Log,
        must: str = "",
        on_freed: Callable[[], None] = lambda: None,
        runs_proofs: bool = True,
        may_prove: Callable[[], bool] = lambda: True,
    ) -> None:
        self._board = board
        self._leader = leader
        self._load = load
        self._pause = pause
        self._clock = clock
        self._log = log
        self._must = must
        self._on_freed = on_freed
        self._seen = 0
        self._retry_at_s: float | None = None
        self._copies: dict[int, LoadedTokenizer] = {}
        self._serving: dict[str, int] = {}
        self._report = Report(pid)
        self._loading: Copy | None = None
        self._proof: Proof | None = None  # of the copy that is being loaded
        # Of a predecessor whose report is about to be overwritten, too.
        self._proofs = _proofs_in(board.reports())
        self._open_proofs = OpenProofs(runs_proofs, self._reported_proof, may_prove)

    @property
    def is_told(self) -> bool:
        """Whether the board names what to load."""
        return self._board.generation() > 0

    @property
    def is_behind(self) -> bool:
        """Whether the board says something that ``follow`` has not done, or a load is to be tried again."""
        return self._board.generation() != self._seen or self._is_retry_due

    @property
    def is_load_in_vain(self) -> bool:
        """Whether the copy that is being loaded is not wanted any more."""
        copy = self._loading
        return copy is not None and copy.serial not in _copies_of(self._board.desired())

    def follow(self) -> bool:
        """Do what the board says until workers forked from now on would get another set; say whether they do.

        Loads one copy after the other, and returns as soon as one more serves: call it again for the rest.
        Free while nothing changes on the board. Raises ``StartupError`` if the entry that must be there
        cannot be loaded.
        """
        if self._is_retry_due:
            self._forget_failed()
        while (generation := self._board.generation()) != self._seen:
            desired = self._board.desired()
            wanted = _copies_of(desired)
            self._drop_all_but(wanted)
            serving = {
                entry.name: entry.current.serial
                for entry in desired.entries
                if entry.current is not None and entry.current.serial in self._copies
            }
            if serving != self._serving:
                self._serving = serving
                self._freeze()
                return True
            missing = next((c for serial, c in wanted.items() if serial not in self._report.copies), None)
            if missing is None:
                self._seen = generation
            else:
                self._take(missing, desired)
        return False

    def find(self, key: str) -> Proof | None:
        """Return a proof that some leader of this node has run."""
        self._proof = self._reported_proof(key)
        return self._proof

    def _reported_proof(self, key: str) -> Proof | None:
        return self._proofs.get(key) or _proofs_in(self._board.reports()).get(key)

    def keep(self, proof: Proof) -> None:
        """Remember a proof for the leaders to come, if the copy is loaded."""
        self._proof = proof

    def take_proofs(self) -> bool:
        """Let copies work as their proofs allow that have ended; True if the workers have to be renewed."""
        is_renewal_due = False
        for serial, found, proof in self._open_proofs.ended():
            loaded = self._copies.get(serial)
            if loaded is None:
                continue
            self._copies[serial] = loaded = loaded.proved(found)
            is_renewal_due |= serial in self._serving.values()
            self._tell_loaded(serial, loaded, proof)
        if is_renewal_due:
            self._freeze()
        return is_renewal_due

    def close(self) -> None:
        """End a proof that runs."""
        self._open_proofs.close()

    def tokenizer_set(self, tools: WorkerTools | None = None) -> TokenizerSet:
        """Return the set of a worker that is forked now; ``tools``: its own."""
        tools = tools or WorkerTools(NoEvents())
        held = {name: serial for name, serial in self._serving.items() if serial in self._copies}
        entries = {
            name: self._copies[serial].for_worker(tools, self._board.engine_switch(serial))
            for name, serial in held.items()
        }
        return TokenizerSet(entries, held, self._board)

    def note_in_force(self) -> None:
        """Report that every worker has the set that ``tokenizer_set`` returns, and none an older one."""
        self._tell(replace(self._report, in_force=frozenset(self._serving.values())))
        self._log.info("tokenizers_in_force", names=" ".join(sorted(self._serving)) or None)

    def _take(self, copy: Copy, desired: Desired) -> None:
        name = _name_of(copy, desired)
        self._tell(self._report.with_copy(copy.serial, Loaded("loading")))
        self._proof = None
        self._loading = copy
        loaded, reason = self._try(copy)
        is_in_vain = self.is_load_in_vain
        self._loading = None
        if is_in_vain:  # `follow` sees what is wanted instead
            return
        if loaded is None:
            self._tell(self._report.with_copy(copy.serial, Loaded("failed", message=reason)))
            self._log.error("tokenizer_failed", name=name, path=copy.source, message=reason)
            if any(copy == entry.current and entry.status == "completed" for entry in desired.entries):
                self._retry_at_s = self._clock() + RETRY_S
            is_serving = any(copy == entry.current for entry in desired.entries)
            if name == self._must and is_serving and not self._report.in_force:
                raise StartupError(f"the tokenizer at {copy.source} cannot be loaded: {reason}")
            return
        self._copies[copy.serial] = loaded
        self._log.info("tokenizer_loaded", name=name, path=copy.source)
        if loaded.unproved is not None:
            self._open_proofs.add(copy.serial, loaded.unproved)
        self._tell_loaded(copy.serial, loaded, self._proof)

    def _tell_loaded(self, serial: int, loaded: LoadedTokenizer, proof: Proof | None) -> None:
        if loaded.unproved is None:
            if loaded.warning:
                self._log.warning("tokenizer_engine", message=loaded.warning)
            self._log.info(
                "tokenizer_proved",
                path=loaded.source,
                engine=loaded.engine,
                bounded=loaded.may_bound,
                problem=loaded.cuts.head or loaded.cuts.pieces or None,
            )
        kept = None if proof is None else asdict(proof)
        told = Loaded("loaded", loaded.engine, loaded.vocab_size, proof=kept)
        self._tell(self._report.with_copy(serial, told))

    def _try(self, copy: Copy) -> tuple[LoadedTokenizer | None, str]:
        end = self._clock() + LIMIT_S
        reason = ""
        for tried in range(TRIES):
            if tried:
                self._pause(PAUSE_S)
            if self.is_load_in_vain:
                break
            left_s = end - self._clock()
            if left_s <= 0:
                return None, f"it was not loaded within {LIMIT_S:.0f} s: {reason}"
            try:
                return self._load(copy, left_s), ""
            except LoadFailed as error:
                reason = str(error)
        return None, reason

    @property
    def _is_retry_due(self) -> bool:
        return self._retry_at_s is not None and self._clock() >= self._retry_at_s

    def _forget_failed(self) -> None:
        """Have copies loaded again that others loaded and we could not: their files may be whole by now."""
        self._retry_at_s = None
        serving = {
            entry.current.serial for entry in self._board.desired().entries if entry.current is not None
        }
        failed = {serial for serial, loaded in self._report.copies.items() if loaded.state == "failed"}
        again = failed & serving
        kept = {serial: loaded for serial, loaded in self._report.copies.items() if serial not in again}
        self._tell(replace(self._report, copies=kept))
        self._seen = 0

    def _drop_all_but(self, wanted: Mapping[int, Any]) -> None:
        gone = [serial for serial in self._report.copies if serial not in wanted]
        if not gone:
            return
        for serial in gone:
            self._copies.pop(serial, None)
        self._open_proofs.keep_only(set(self._copies))
        kept = {serial: loaded for serial, loaded in self._report.copies.items() if serial in wanted}
        self._tell(replace(self._report, copies=kept, in_force=self._report.in_force & wanted.keys()))

    def _tell(self, report: Report) -> None:
        self._report = report
        self._board.report(self._leader, report)

    def _freeze(self) -> None:
        """Keep the collector of the workers off what they share; what is garbage now goes first."""
        gc.unfreeze()
        gc.collect()
        self._on_freed()
        gc.freeze()

    def __repr__(self) -> str:
        return f"TokenizerCopies({self._serving}, {sorted(self._copies)})"


def _proofs_in(reports: Iterable[Report]) -> dict[str, Proof]:
    told = (loaded.proof for report in reports for loaded in report.copies.values())
    return {proof["key"]: Proof(**proof) for proof in told if proof}


def _copies_of(desired: Desired) -> dict[int, Copy]:
    """Return the copies to hold by serial, those that serve before those that are to."""
    current = [entry.current for entry in desired.entries]
    following = [entry.next for entry in desired.entries]
    return {copy.serial: copy for copy in (*current, *following) if copy is not None}


def _name_of(copy: Copy, desired: Desired) -> str:
    def has(entry: Entry) -> bool:
        return copy in (entry.current, entry.next)

    return next((entry.name for entry in desired.entries if has(entry)), "")
