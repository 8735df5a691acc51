"""The leader as a real process, started as the supervisor starts it; and what a job runner answers."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from meshd.api.endpoints import ENDPOINTS
from meshd.api.view import RoutingView, StageTimes
from meshd.config import Settings
from meshd.control import Manifest, Role, State
from meshd.errors import MeshError
from meshd.memory import Segment
from meshd.metrics import layout as metric_cells
from meshd.prepare.codec import HEAD_BYTES, decode_result
from meshd.prepare.layout import OUTCOME_REFUSED, OUTCOME_SKIPPED, OUTCOME_VIEW, Descriptor, job_word
from meshd.prepare.stopwatch import Stopped, Stopwatch
from meshd.prepare.tokenizer_board import Copy, Desired, Entry, TokenizerBoard
from meshd.prepare.zygote import job_runner

MakePool = Callable[..., Any]
CHAT = next(endpoint for endpoint in ENDPOINTS if endpoint.path == "/v1/chat/completions")


class Started:
    """A leader process and our end of its link."""

    def __init__(self, pool: Any, **settings: Any) -> None:
        topology = pool.topology
        path = settings.get("tokenizer_path", "")
        self.link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        fds = {"board": pool.board.segment.fd, "rings": pool.rings.fd, "link": theirs.fileno()}
        self._metrics = Segment.create("metrics", metric_cells.segment_size(topology.metric_rows))
        fds["metrics"] = self._metrics.fd
        self._tokenizers = TokenizerBoard.create(2 * len(topology.groups))
        fds["tokenizers"] = self._tokenizers.fd
        entry = Entry("id", "default", path, Copy(1, path)) if path else None
        TokenizerBoard(self._tokenizers).publish(Desired((entry,) if entry else (), 1))
        fds |= {f"slab{seat}": slab.fd for seat, slab in enumerate(pool.slabs)}
        fds |= {f"bell_io{seat}": bell for seat, bell in enumerate(pool.io_bells)}
        fds |= {f"bell_prepare{seat}": bell for seat, bell in enumerate(pool.bells)}
        manifest = Manifest(
            role=Role.LEADER,
            index=0,
            seat=topology.board_leader(0),
            supervisor_pid=os.getpid(),
            topology=topology,
            settings=Settings(**settings).to_dict(),
            fds=fds,
        )
        manifest_fd = manifest.to_memfd()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "meshd.prepare.zygote", "--manifest-fd", str(manifest_fd)],
            pass_fds=[manifest_fd, *fds.values()],
            stderr=subprocess.PIPE,
        )
        os.close(manifest_fd)
        theirs.close()

    def wait_ready(self) -> None:
        assert select.select([self.link], [], [], 60)[0]
        assert json.loads(self.link.recv(1000)) == {"t": "ready"}

    def end(self) -> tuple[int, str]:
        """Say quit; return exit code and stderr."""
        self.link.send(b'{"t": "quit"}')
        _, stderr = self.process.communicate(timeout=30)
        self.link.close()
        return self.process.returncode, stderr.decode()


def test_a_leader_process_serves_real_bodies_and_ends_when_told(make_pool: MakePool) -> None:
    pool = make_pool(workers=2)
    leader = Started(pool)
    leader.wait_ready()
    door = pool.door(is_real_time=True)
    door.endpoint_number, door.needs = CHAT.number, 0
    good = door.submit(b'{"model": "m1", "stream": true, "messages": [{"role": "user", "content": "hi"}]}')
    bad = door.submit(b'{"model": "m1", "messages": [')
    assert door.pump_all(good, bad) == ["m1", "invalid_request"]
    assert door.results[good].wants_stream
    os.kill(pool.worker_pids()[0], signal.SIGKILL)
    door.pump(lambda: all(pool.worker_pids()) and door.client.check(door.clock()) is None)
    again = door.submit(b'{"model": "m2", "messages": [{"role": "user", "content": "hi"}]}')
    assert door.pump_all(again) == ["m2"]
    code, stderr = leader.end()
    assert code == 0 and "Traceback" not in stderr
    rows = [pool.board.row(pool.topology.board_prepare(seat)) for seat in range(2)]
    assert [row.state for row in rows] == [State.GONE, State.GONE]


def test_a_leader_that_cannot_load_its_tokenizer_says_so_and_ends(make_pool: MakePool) -> None:
    leader = Started(make_pool(workers=1), tokenizer_path="/nonexistent/tokenizer.json")
    _, stderr = leader.process.communicate(timeout=60)
    leader.link.close()
    assert leader.process.returncode == 1
    assert "tokenizer" in stderr.decode() and "Traceback" not in stderr.decode()


class FakeBuilder:
    """Answers with a view or raises."""

    def __init__(self, answer: RoutingView | BaseException) -> None:
        self.answer = answer
        self.watch = Stopwatch(iter(range(5, 1000, 5)).__next__)
        self.watch.start()

    def build(
        self, endpoint: Any, needs: int, body: memoryview, should_stop: Callable[[], bool]
    ) -> RoutingView:
        assert endpoint is CHAT and needs == 3
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer


def run(answer: RoutingView | BaseException, view_bytes: int = 1000) -> tuple[int, Any]:
    view = memoryview(bytearray(view_bytes))
    descriptor = Descriptor(1, 0, 0, 0, view_bytes, 0, job_word(CHAT.number, 3, 0), 0)
    runner = job_runner(FakeBuilder(answer))  # type: ignore[arg-type]
    outcome, length = runner(descriptor, memoryview(b"{}"), view, lambda: False)
    return outcome, decode_result(view[:length]) if length else None


def test_a_view_a_refusal_and_a_stop_are_told_apart() -> None:
    outcome, view = run(RoutingView("m"))
    assert (outcome, view.model) == (OUTCOME_VIEW, "m")
    outcome, refusal = run(MeshError("invalid_request", "messages is missing"))
    assert outcome == OUTCOME_REFUSED
    assert (refusal.error.code, refusal.error.message) == ("invalid_request", "messages is missing")
    assert refusal.stage_ns == StageTimes(json_parse=5), "the time until it refused counts too"
    assert run(Stopped()) == (OUTCOME_SKIPPED, None)


def test_a_view_that_does_not_fit_is_a_refusal_that_does() -> None:
    outcome, refusal = run(RoutingView("m" * 1000), HEAD_BYTES + 60)
    assert (outcome, refusal.error.code) == (OUTCOME_REFUSED, "invalid_request")


def test_an_exception_is_the_workers_to_catch() -> None:
    with pytest.raises(ZeroDivisionError):
        run(ZeroDivisionError())
