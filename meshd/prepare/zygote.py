"""The leader of a prepare group: loads the tokenizer, freezes the heap, forks workers that share both.

``python -m meshd.prepare.zygote --manifest-fd N``, started by the supervisor.

The leader stays single-threaded and runs no job. Engines are imported only after their thread pools have
been switched off in the environment, whatever it said before: a pool that exists at a fork hangs the child.
``gc.freeze`` moves what was loaded out of the collector's sight, so that its passes in the workers do not
write to, and thereby copy, the shared pages.
"""

from __future__ import annotations

import gc
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from meshd.api.endpoints import endpoint_by_number
from meshd.config import Settings
from meshd.control import ChildLink, Manifest, ProcessBoard, start_child
from meshd.errors import MeshError, StartupError
from meshd.log import Log
from meshd.memory import Segment
from meshd.metrics.catalog import build_catalog
from meshd.metrics.cells import MetricRow
from meshd.prepare.group import PrepareGroup
from meshd.prepare.layout import (
    OUTCOME_REFUSED,
    OUTCOME_SKIPPED,
    OUTCOME_VIEW,
    RINGS_KIND,
    RINGS_VERSION,
    Descriptor,
)
from meshd.prepare.worker import PrepareWorker, RunJob
from meshd.slab import SLAB_KIND

if TYPE_CHECKING:
    from meshd.prepare.build import ViewBuilder
    from meshd.prepare.tokenizer import TokenizerSet

_NO_POOLS: Final = {
    "TOKENIZERS_PARALLELISM": "false",
    "RAYON_NUM_THREADS": "1",
    "RAYON_RS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TOKENIZERS_LOG": "warning",
    "RUST_LOG": "warn",
}


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
        self._tokenizers: TokenizerSet | None = None
        self._group = PrepareGroup(
            topology,
            topology.groups[manifest.index],
            manifest.prepare_cpus,
            self._rings,
            self._board,
            self._board.row(manifest.seat),
            self._io_bells,
            self._bells,
            ChildLink.open(manifest, self._board),
            self._run_worker,
            self._log.warning,
            self._on_message,
            time.monotonic_ns,
        )

    def run(self) -> None:
        """Live until the supervisor says so. Raises ``StartupError`` if the tokenizer cannot be loaded."""
        self._group.adopt()
        self._tokenizers = self._load_tokenizers()
        gc.collect()
        gc.freeze()
        self._group.run()

    def _load_tokenizers(self) -> TokenizerSet | None:
        from meshd.prepare.tokenizer import LoadFailed, TokenizerSet, load_tokenizer

        settings = self._settings
        path = settings.tokenizer_path or settings.model_path
        if not path:
            return None
        try:
            loaded = load_tokenizer(path, settings.tokenizer_engine, settings.chat_template or None)
        except LoadFailed as error:
            raise StartupError(f"the tokenizer at {path} cannot be loaded: {error}") from error
        if loaded.warning:
            self._log.warning("tokenizer_engine", message=loaded.warning)
        self._log.info("tokenizer_loaded", engine=loaded.engine, path=path)
        if self._manifest.index == 0:  # every group has loaded it, and their gauges would add up
            row = MetricRow(self._metrics, self._manifest.seat, self._catalog)
            row.gauge("mesh_tokenizer_info", tokenizer="default", engine=loaded.engine).set(1)
        return TokenizerSet({"default": loaded})

    def _run_worker(self, seat: int) -> None:
        """The life of a forked worker."""
        from meshd.prepare.build import ViewBuilder

        manifest, settings = self._manifest, self._settings
        log = self._open_log(f"prep{seat}")
        row = MetricRow(self._metrics, manifest.topology.board_prepare(seat), self._catalog)
        builder = ViewBuilder(
            self._tokenizers,
            settings.prefix_token_count,
            settings.prepare_max_tokenize_bytes,
            clock=time.monotonic_ns,
            on_fallback=lambda reason: row.counter("mesh_prepare_fallbacks_total", reason=reason).inc(),
        )
        worker = PrepareWorker(
            manifest.topology,
            seat,
            self._rings,
            self._slabs,
            self._board,
            self._bells[seat],
            self._io_bells,
            job_runner(builder),
            lambda error: log.error("prepare_job_failed", error="".join(traceback.format_exception(error))),
            manifest.supervisor_pid,
        )
        worker.run()

    def _on_message(self, message: dict[str, Any]) -> None:
        if message.get("t") == "reopen_logs":
            self._log.reopen()

    def _open_log(self, name: str) -> Log:
        settings = self._settings
        return Log(name, settings.log_level, settings.json_log, log_dir=settings.log_dir)


def job_runner(builder: ViewBuilder) -> RunJob:
    """Return the function that turns one descriptor and its body into a result in the view area."""
    from meshd.prepare.build import Stopped
    from meshd.prepare.codec import ViewTooLarge, encode_answer, encode_refusal, encode_view

    watch = builder.watch

    def run_job(
        descriptor: Descriptor, body: memoryview, view: memoryview, should_stop: Callable[[], bool]
    ) -> tuple[int, int]:
        try:
            endpoint = endpoint_by_number(descriptor.endpoint_number)
            if endpoint.picks_by == "local":
                model, answer = builder.answers.answer(endpoint, body, should_stop)
                return OUTCOME_VIEW, encode_answer(model, answer, watch.stop(), view)
            result = builder.build(endpoint, descriptor.needs, body, should_stop)
            return OUTCOME_VIEW, encode_view(result, view)
        except MeshError as error:
            return OUTCOME_REFUSED, encode_refusal(error.code, error.message, view, watch.stop())
        except ViewTooLarge:
            return OUTCOME_REFUSED, encode_refusal("invalid_request", "The model name is too long.", view)
        except Stopped:  # nothing was written
            return OUTCOME_SKIPPED, 0

    return run_job


def main(argv: Sequence[str]) -> int:
    """Be the leader that the supervisor has started; returns the exit code."""
    os.environ.update(_NO_POOLS)
    try:
        Leader(start_child(argv)).run()
    except StartupError as error:
        sys.stderr.write(f"meshd: {error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
