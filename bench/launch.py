"""Start one front end on its cores, know that it is really the one that answers, and stop it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Final
from urllib.error import URLError
from urllib.request import Request, urlopen

from bench import BenchError, tree
from bench.front_end import FrontEnd, Site
from bench.machine import free_port, pinned

READY_S: Final = 120.0  # loading and proving a large tokenizer takes a while on a slow machine
STOP_S: Final = 20.0
PROOF: Final = "meshd:proof"
SETTLE_S: Final = 60.0  # proofs of a large tokenizer go on behind its back
IDLE_WINDOW_S: Final = 1.0
IDLE_SHARE: Final = 0.1  # an idle meshd takes 2 to 3 % of a core: five processes that look around
CALM_S: Final = 40.0
CALM_WINDOW_S: Final = 0.1
CALM_SHARE: Final = 0.4  # four clock ticks of ten: an idle front end shows one at most
POLL_S: Final = 0.1
PROBE: Final = b'{"model":"m1","prompt":"Are you there?","max_tokens":16}'
LOG_TAIL_BYTES: Final = 4000


class Running:
    """A started front end; a context manager that ends the whole tree.

    The constructor returns when a process of the tree listens on the port and a completion through it came
    back from the backend with the right body length. It raises `BenchError` with the end of the log if the
    front end died, did not answer in time, or let a thread out of its cores.
    """

    def __init__(
        self,
        front_end: FrontEnd,
        cpus: Sequence[int],
        upstreams: tuple[str, ...],
        policy: str,
        tokenizer: Path | None = None,
        extra: tuple[str, ...] = (),
    ) -> None:
        self.name = front_end.name
        self.rewrites_bodies = front_end.rewrites_bodies
        self.port = free_port()
        self._directory = tempfile.TemporaryDirectory(prefix="meshd-bench-", ignore_cleanup_errors=True)
        directory = Path(self._directory.name)
        site = Site(directory, self.port, free_port(), upstreams, policy, tokenizer, extra, len(cpus))
        self.command = pinned(cpus, front_end.command(site))
        self._log = directory / "log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                self.command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        self.pid = self._process.pid
        try:
            self._wait_until_ready()
            if stray := tree.strays(self.pid, cpus):
                raise self._failure(f"left its cores: {', '.join(stray[:5])}")
        except BaseException:
            self.stop()
            raise

    def __repr__(self) -> str:
        return f"Running({self.name} pid={self.pid} port={self.port})"

    def cpu_s(self) -> dict[str, float]:
        """CPU seconds of the whole tree so far, by process name."""
        return tree.cpu_by_name(self.pid)

    def settle(self) -> None:
        """Wait until it is idle: what it does after its start on its own belongs to no round."""
        deadline_s = time.monotonic() + SETTLE_S
        while time.monotonic() < deadline_s:
            before_s = sum(self.cpu_s().values())
            time.sleep(IDLE_WINDOW_S)
            after = self.cpu_s()
            is_proving = PROOF in after  # of low priority, so that strangers can make it look idle
            if not is_proving and sum(after.values()) - before_s <= IDLE_SHARE * IDLE_WINDOW_S:
                return

    def calm(self) -> None:
        """Wait until it has done what was left when the load ended: that belongs to nobody's next round.

        A front end that had hundreds of long prompts waiting may work on for a while after its clients left.
        """
        deadline_s = time.monotonic() + CALM_S
        before_s = sum(self.cpu_s().values())
        while time.monotonic() < deadline_s:
            time.sleep(CALM_WINDOW_S)
            now_s = sum(self.cpu_s().values())
            if now_s - before_s <= CALM_SHARE * CALM_WINDOW_S:
                return
            before_s = now_s

    def stop(self) -> None:
        """End the tree and remove its directory."""
        end_tree(self._process)
        self._directory.cleanup()

    def __enter__(self) -> Running:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _wait_until_ready(self) -> None:
        deadline_s = time.monotonic() + READY_S
        reason = "nothing listens on its port"
        while time.monotonic() < deadline_s:
            if self._process.poll() is not None:
                raise self._failure(f"ended with code {self._process.returncode}")
            pids = [process.pid for process in tree.tree(self.pid)]
            if tree.listening_pids(self.port, pids):
                reason = self._probe()
                if not reason:
                    return
            time.sleep(POLL_S)
        raise self._failure(f"not ready after {READY_S:.0f} s: {reason}")

    def _probe(self) -> str:
        """Send one completion; why it was no success, or nothing."""
        request = Request(f"http://127.0.0.1:{self.port}/v1/completions", data=PROBE, method="POST")
        request.add_header("content-type", "application/json")
        try:
            with urlopen(request, timeout=5.0) as answer:
                received = json.load(answer)["usage"]["prompt_tokens"]
        except (URLError, OSError, ValueError, KeyError) as error:
            return str(error)
        if received == len(PROBE) or (self.rewrites_bodies and received > len(PROBE)):
            return ""
        return f"the backend received {received} of {len(PROBE)} bytes"

    def _failure(self, what: str) -> BenchError:
        text = self._log.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace")
        return BenchError(f"{self.name}: {what}\n  command: {' '.join(self.command)}\n{text}")


def end_tree(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM to the root of a session of its own, then SIGKILL for what is left of it after a while."""
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        pass
    for left in tree.all_processes():
        if left.session == process.pid and not left.is_zombie:
            try:
                os.kill(left.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
    process.wait(STOP_S)
