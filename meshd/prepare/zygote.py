"""The leader of a prepare group: loads the tokenizers, freezes the heap, forks workers that share both.

Started by the supervisor (meshd/birth.py).

The leader stays single-threaded and runs no job. Engines are imported only after their thread pools have
been switched off in the environment, whatever it said before: a pool that exists at a fork hangs the child.
``gc.freeze`` moves what was loaded out of the collector's sight, so that its passes in the workers do not
write to, and thereby copy, the shared pages.

A load takes seconds, a proof or a download minutes, and nothing may run beside it in a thread. So an interval
timer interrupts it some times a second, between two steps of the interpreter, for one turn of the group:
the leader beats, hears the supervisor, and replaces workers that die while it loads. A single call into an
engine is not interrupted; the longest, reading a large file, takes a few seconds.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from random import Random
from typing import TYPE_CHECKING, Any, Final

from meshd.config import Settings
from meshd.control import ChildLink, Manifest, ProcessBoard, State, start_child
from meshd.errors import StartupError
from meshd.log import Log
from meshd.memory import Segment
from meshd.metrics.catalog import build_catalog
from meshd.metrics.cells import MetricRow
from meshd.prepare.group import PrepareGroup
from meshd.prepare.layout import RINGS_KIND, RINGS_VERSION
from meshd.prepare.tokenizer_board import Copy, TokenizerBoard
from meshd.prepare.tokenizer_set import DEFAULT_NAME
from meshd.prepare.worker import PrepareWorker
from meshd.slab import SLAB_KIND

if TYPE_CHECKING:
    from meshd.prepare.tokenizer import LoadedTokenizer
    from meshd.prepare.tokenizer_copies import TokenizerCopies

_NO_POOLS: Final = {
    "TOKENIZERS_PARALLELISM": "false",
    "RAYON_NUM_THREADS": "1",
    "RAYON_RS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TOKENIZERS_LOG": "warning",
    "RUST_LOG": "warn",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
}
_JOB_BYTES: Final = 2 << 30
"""What a prepare worker may have beside what it begins with: no job in good faith comes near it."""
_FREE_BODY_BYTES: Final = 16 << 20
_BYTES_A_BODY_BYTE: Final = 64  # parsed, ``[],`` is a list of 56 bytes and its place
_STOP_AGAIN_S: Final = 1.0  # until a load is stopped again that did not stop: some callbacks swallow all
_MEANWHILE_S: Final = 0.05  # between two turns of the group while a load goes on
_UNTIL_TOLD_S: Final = 0.005  # between two looks for what to load: a start waits for it


class Leader:
    """The objects of one leader, and of the workers that it forks."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._settings = settings = Settings.from_dict(manifest.settings)
        fds, topology = manifest.fds, manifest.topology
        self._log = self._open_log(f"lead{manifest.index}")
        self._board = ProcessBoard.attach(fds["board"])
        self._rings = Segment.attach(fds["rings"], RINGS_KIND, RINGS_VERSION)
        self._slabs = [Segment.attach(fds[f"slab{seat}"], SLAB_KIND) for seat in range(topology.io_seats)]
        self._metrics = Segment.attach(fds["metrics"], "metrics")
        self._catalog = build_catalog(settings.prometheus_duration_buckets)
        self._io_bells = [fds[f"bell_io{seat}"] for seat in range(topology.io_seats)]
        self._bells = [fds[f"bell_prepare{seat}"] for seat in range(topology.prepare_seats)]
        self._tokenizers = TokenizerBoard.attach(fds["tokenizers"])
        self._link = ChildLink.open(manifest, self._board)
        self._load_until_s = 0.0  # of the load that goes on
        self._stop_at_s = 0.0  # a load that shall not go on is not told so before
        self._copies = self._make_copies()
        self._group = PrepareGroup(
            topology,
            topology.groups[manifest.index],
            manifest.prepare_cpus,
            self._rings,
            self._board,
            self._board.row(manifest.seat),
            self._io_bells,
            self._bells,
            self._link,
            self._run_worker,
            self._log.warning,
            self._on_message,
            time.monotonic_ns,
            self._copies.note_in_force,
        )

    def run(self) -> None:
        """Live until the supervisor says so. Raises ``StartupError`` if the tokenizer cannot be loaded."""
        takes_over = self._manifest.takes_over
        if not takes_over:
            self._group.adopt()
        with self._looking_after_workers():
            while not self._copies.is_told:  # the controller starts when we do
                time.sleep(_UNTIL_TOLD_S)
            while self._copies.follow():
                pass
        if takes_over:
            if not self._link.wait_to_take_over():
                return
            self._group.adopt()
        self._group.renew()
        try:
            self._group.run(self._follow)
        finally:
            self._copies.close()

    def _follow(self) -> None:
        """Do what the board of tokenizers says, with the workers looked after meanwhile."""
        if self._group.is_over:
            return
        # It may load a fast engine: a second in one call, which no timer interrupts, so the group waits.
        has_changed = self._copies.take_proofs()
        if self._copies.is_behind:
            with self._looking_after_workers():
                has_changed |= self._copies.follow()
        if has_changed:
            self._group.renew()

    def _make_copies(self) -> TokenizerCopies:
        # What belongs to every worker, imported before the first fork: it is shared, and a fork is quick.
        import meshd.prepare.build
        import meshd.prepare.run_job  # noqa: F401
        from meshd.prepare.tokenizer_copies import TokenizerCopies

        first_seat = self._manifest.topology.board_leader(0)
        return TokenizerCopies(
            self._tokenizers,
            self._manifest.seat - first_seat,
            os.getpid(),
            self._load,
            time.sleep,
            time.monotonic,
            self._log,
            must=DEFAULT_NAME if self._settings.tokenizer_path else "",
            on_freed=_trim_heap,
            runs_proofs=self._manifest.index == 0,
            may_prove=self._is_node_ready,
        )

    def _is_node_ready(self) -> bool:
        return self._board.row(self._manifest.topology.board_supervisor).state is State.READY

    def _load(self, copy: Copy, timeout_s: float) -> LoadedTokenizer:
        from meshd.prepare.hub import SourceNotFound, find_source
        from meshd.prepare.tokenizer import LoadFailed, load_tokenizer

        self._load_until_s = time.monotonic() + timeout_s
        try:
            try:
                path = find_source(copy.source, timeout_s)
                template = self._settings.chat_template or copy.chat_template_path
                return load_tokenizer(
                    path, self._settings.tokenizer_engine, template or None, self._copies, may_defer=True
                )
            finally:
                self._load_until_s = 0.0  # from here on nothing stops us
        except (SourceNotFound, _LoadStopped) as error:
            raise LoadFailed(str(error)) from error

    @contextmanager
    def _looking_after_workers(self) -> Iterator[None]:
        """Take turns of the group while the block runs; leave the process if one of them ends the group."""

        def interrupt(number: int, frame: object) -> None:
            self._group.turn()
            if self._group.is_over:
                raise SystemExit(0)
            signal.setitimer(signal.ITIMER_REAL, _MEANWHILE_S)  # one at a time, however long it took
            if self._load_until_s:
                self._check_load()

        signal.signal(signal.SIGALRM, interrupt)
        signal.setitimer(signal.ITIMER_REAL, _MEANWHILE_S)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, signal.SIG_IGN)

    def _check_load(self) -> None:
        """Stop the load that goes on if nobody waits for it any more, or it has had its time."""
        now_s = time.monotonic()
        if self._copies.is_load_in_vain:
            reason = "it is not wanted any more"
        elif now_s > self._load_until_s:
            reason = "it took too long"
        else:
            return
        if now_s >= self._stop_at_s:
            self._stop_at_s = now_s + _STOP_AGAIN_S
            raise _LoadStopped(reason)

    def _run_worker(self, seat: int) -> None:
        """The life of a forked worker."""
        from meshd.prepare.build import ViewBuilder
        from meshd.prepare.conversation_cache import ConversationCache
        from meshd.prepare.crosscheck import CrossCheck
        from meshd.prepare.memory_bound import JobMemory
        from meshd.prepare.run_job import JobRunner
        from meshd.prepare.stage_counts import StageCounts
        from meshd.prepare.tokenizer import WorkerTools
        from meshd.prepare.tokenizer_events import CountedEvents

        manifest, settings = self._manifest, self._settings
        log = self._open_log(f"prep{seat}")
        row = MetricRow(self._metrics, manifest.topology.board_prepare(seat), self._catalog)
        events = CountedEvents(row, log.error)
        crosscheck = CrossCheck(settings.tokenizer_crosscheck_ratio, Random().random)
        builder = ViewBuilder(
            self._copies.tokenizer_set(WorkerTools(events, ConversationCache(), crosscheck)),
            settings.prefix_token_count,
            settings.prepare_max_tokenize_bytes,
            clock=time.monotonic_ns,
            on_fallback=events.fallback,
        )
        worker = PrepareWorker(
            manifest.topology,
            seat,
            self._rings,
            self._slabs,
            self._board,
            self._bells[seat],
            self._io_bells,
            JobRunner(
                builder, JobMemory(_JOB_BYTES, _BYTES_A_BODY_BYTE, _FREE_BODY_BYTES), StageCounts(row)
            ).run,
            lambda error: log.error("prepare_job_failed", error="".join(traceback.format_exception(error))),
            manifest.supervisor_pid,
            reopen_log=log.reopen,
            flush_metrics=row.flush,
        )
        worker.run()

    def _on_message(self, message: dict[str, Any]) -> None:
        if message.get("t") == "reopen_logs":
            self._log.reopen()
            self._group.reopen_logs()

    def _open_log(self, name: str) -> Log:
        settings = self._settings
        return Log(name, settings.log_level, settings.json_log, log_dir=settings.log_dir)


class _LoadStopped(BaseException):
    """Raised in the middle of a load that shall not go on; no ``Exception``, which a load may handle."""


def _trim_heap() -> None:
    """Give freed memory back to the system, which the allocator would keep for later."""
    ctypes.CDLL(None).malloc_trim(0)


def main(argv: Sequence[str]) -> int:
    """Be the leader that the supervisor has started; returns the exit code."""
    os.environ.update(_NO_POOLS)
    try:
        Leader(start_child(argv)).run()
    except StartupError as error:
        sys.stderr.write(f"meshd: {error}\n")
        return error.exit_code
    return 0
