"""The leader as a real process, started as the supervisor starts it."""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import meshd
from meshd.api.endpoints import ENDPOINTS
from meshd.api.view import NEEDS_TOKENS
from meshd.config import Settings
from meshd.control import Manifest, Role, State
from meshd.memory import Segment
from meshd.metrics import layout as metric_cells
from meshd.prepare.tokenizer_board import Copy, Desired, Entry, TokenizerBoard

MakePool = Callable[..., Any]
CHAT = next(endpoint for endpoint in ENDPOINTS if endpoint.path == "/v1/chat/completions")


DEMO_TOKENIZER = str(Path(meshd.__file__).parent / "backend" / "tokenizer")


class Started:
    """A leader process and our end of its link. ``before``: the one whose work it takes over."""

    def __init__(self, pool: Any, before: Started | None = None, **settings: Any) -> None:
        topology = pool.topology
        self.half = 0 if before is None else 1
        self.row = pool.board.row(topology.board_leader(0, self.half))
        self.link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        fds = {"board": pool.board.segment.fd, "rings": pool.rings.fd, "link": theirs.fileno()}
        self._metrics = Segment.create("metrics", metric_cells.segment_size(topology.metric_rows))
        fds["metrics"] = self._metrics.fd
        if before is None:
            self._segment = TokenizerBoard.create(2 * len(topology.groups))
            self.tokenizers = TokenizerBoard(self._segment)
            path = settings.get("tokenizer_path", "")
            self.want(*[Entry("id", "default", path, Copy(1, path))] if path else ())
        else:
            self._segment, self.tokenizers = before._segment, before.tokenizers
        fds["tokenizers"] = self._segment.fd
        fds |= {f"slab{seat}": slab.fd for seat, slab in enumerate(pool.slabs)}
        fds |= {f"bell_io{seat}": bell for seat, bell in enumerate(pool.io_bells)}
        fds |= {f"bell_prepare{seat}": bell for seat, bell in enumerate(pool.bells)}
        manifest = Manifest(
            role=Role.LEADER,
            index=0,
            seat=self.row.seat,
            supervisor_pid=os.getpid(),
            topology=topology,
            settings=Settings(**settings).to_dict(),
            fds=fds,
            takes_over=before is not None,
        )
        manifest_fd = manifest.to_memfd()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "meshd.birth", "meshd.prepare.zygote", "--manifest-fd", str(manifest_fd)],
            pass_fds=[manifest_fd, *fds.values()],
            stderr=subprocess.PIPE,
        )
        os.close(manifest_fd)
        theirs.close()

    def want(self, *entries: Entry) -> None:
        """Say what the controller would."""
        self.tokenizers.publish(Desired(entries, 100))

    def wait_ready(self) -> None:
        self.wait_for("ready")

    def wait_for(self, message: str) -> None:
        assert select.select([self.link], [], [], 60)[0]
        assert json.loads(self.link.recv(1000)) == {"t": message}

    def wait_until(self, is_so: Callable[[], bool]) -> None:
        end = time.monotonic() + 60
        while not is_so():
            assert time.monotonic() < end and self.process.poll() is None
            time.sleep(0.01)

    def state_of(self, serial: int) -> str:
        """What this leader says of a copy."""
        copies = self.tokenizers.reports()[self.half].copies
        return copies[serial].state if serial in copies else ""

    def tell(self, message: str) -> None:
        self.link.send(json.dumps({"t": message}).encode())

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


def test_a_worker_that_dies_while_a_load_goes_on_is_replaced_at_once(make_pool: MakePool) -> None:
    pool = make_pool(workers=2)
    leader = Started(pool)
    leader.wait_ready()
    leader.want(Entry("id", "m1", "/nowhere", None, Copy(1, "/nowhere")))  # three tries: four seconds
    leader.wait_until(lambda: leader.state_of(1) == "loading")
    old = pool.worker_pids()
    os.kill(old[0], signal.SIGKILL)
    beat = leader.row.heartbeat_ns
    leader.wait_until(lambda: pool.worker_pids()[0] not in (0, old[0]) and leader.row.heartbeat_ns > beat)
    assert leader.state_of(1) == "loading"
    leader.wait_until(lambda: leader.state_of(1) == "failed")
    assert pool.worker_pids()[1] == old[1]
    code, stderr = leader.end()
    assert code == 0 and "Traceback" not in stderr


@pytest.mark.parametrize("is_ready", [True, False], ids=["serving", "starting"])
def test_a_leader_that_is_told_to_quit_while_it_loads_ends_at_once(
    make_pool: MakePool, is_ready: bool
) -> None:
    pool = make_pool(workers=1)
    leader = Started(pool, model_path="" if is_ready else "/nowhere")
    if is_ready:
        leader.wait_ready()
    leader.want(Entry("id", "m1", "/nowhere", Copy(1, "/nowhere")))
    leader.wait_until(lambda: leader.state_of(1) == "loading")
    code, stderr = leader.end()
    assert code == 0 and "Traceback" not in stderr
    assert leader.state_of(1) == "loading"
    assert not any(row.is_alive for row in pool.rows())


def test_a_template_that_allocates_without_end_is_413_and_costs_no_worker(
    make_pool: MakePool, tmp_path: Path
) -> None:
    pool = make_pool(workers=1)
    leader = Started(pool)
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages[0].content.ljust(1 if messages | length == 1 else 8000000000) }}")
    leader.want(Entry("id", "default", DEMO_TOKENIZER, Copy(1, DEMO_TOKENIZER, str(template))))
    leader.wait_ready()
    door = pool.door(is_real_time=True)
    door.endpoint_number, door.needs = CHAT.number, NEEDS_TOKENS
    message = b'{"role": "user", "content": "hi"}'
    fine = door.submit(b'{"model": "m1", "messages": [%b]}' % message)
    greedy = door.submit(b'{"model": "m1", "messages": [%b, %b]}' % (message, message))
    again = door.submit(b'{"model": "m2", "messages": [%b]}' % message)
    assert door.pump_all(fine, greedy, again) == ["m1", "tokenizer_input_too_large", "m2"]
    assert sum(row.restarts for row in pool.rows()) == 0 and door.metrics.retries == 0
    code, stderr = leader.end()
    assert code == 0 and "Traceback" not in stderr


def test_a_load_that_comes_to_no_end_is_given_up_when_its_entry_is_removed(
    make_pool: MakePool, tmp_path: Path
) -> None:
    pool = make_pool(workers=1)
    leader = Started(pool)
    leader.wait_ready()
    template = tmp_path / "template.jinja"
    template.write_text("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}")
    leader.want(Entry("id", "m1", DEMO_TOKENIZER, Copy(1, DEMO_TOKENIZER, str(template))))
    leader.wait_until(lambda: leader.state_of(1) == "loading")
    leader.want(Entry("id", "m2", DEMO_TOKENIZER, Copy(2, DEMO_TOKENIZER)))
    states = []
    leader.wait_until(lambda: states.append(leader.state_of(1)) or leader.state_of(2) == "loaded")
    assert "failed" not in states
    code, stderr = leader.end()
    assert code == 0 and "Traceback" not in stderr


def test_an_automatic_entry_that_cannot_be_loaded_is_reported_and_the_leader_serves(
    make_pool: MakePool,
) -> None:
    leader = Started(make_pool(workers=1))
    leader.want(Entry("id", "m1", "/nowhere", Copy(1, "/nowhere")))
    leader.wait_ready()
    leader.wait_until(lambda: leader.state_of(1) == "failed")
    assert leader.end()[0] == 0


def test_a_leader_takes_over_when_all_is_loaded_and_replaces_the_workers_it_finds(
    make_pool: MakePool,
) -> None:
    become_subreaper()
    pool = make_pool(workers=2)
    old = Started(pool, tokenizer_path=DEMO_TOKENIZER, tokenizer_engine="tokenizers")
    old.wait_ready()
    assert old.tokenizers.has_tokenizer()
    workers = set(pool.worker_pids())
    new = Started(pool, old, tokenizer_path=DEMO_TOKENIZER, tokenizer_engine="tokenizers")
    new.wait_for("loaded")
    assert new.state_of(1) == "loaded" and set(pool.worker_pids()) == workers
    beat = new.row.heartbeat_ns
    new.wait_until(lambda: new.row.heartbeat_ns > beat)
    old.tell("hand_over")
    assert old.process.wait(30) == 0
    assert {row.pid for row in pool.rows() if row.state is State.READY} == workers
    new.tell("take_over")
    new.wait_ready()
    assert not workers & set(pool.worker_pids())
    assert new.tokenizers.reports()[1].in_force == {1}
    door = pool.door(is_real_time=True)
    door.endpoint_number, door.needs = CHAT.number, 0
    job = door.submit(b'{"model": "m1", "messages": [{"role": "user", "content": "hi"}]}')
    assert door.pump_all(job) == ["m1"]
    assert new.end()[0] == 0
    for pid in workers:
        os.waitpid(pid, 0)
    old.link.close()


def test_a_successor_that_is_not_wanted_ends_and_leaves_the_workers_alone(make_pool: MakePool) -> None:
    pool = make_pool(workers=1)
    old = Started(pool)
    old.wait_ready()
    workers = pool.worker_pids()
    new = Started(pool, old)
    new.wait_for("loaded")
    assert new.end()[0] == 0
    assert pool.worker_pids() == workers and pool.rows()[0].state is State.READY
    assert old.end()[0] == 0


def become_subreaper() -> None:
    """Be what the supervisor is to orphaned workers."""
    assert ctypes.CDLL(None).prctl(36, ctypes.c_ulong(1), 0, 0, 0) == 0


def test_a_leader_serves_without_the_fast_engine_and_proves_it_when_the_node_is_ready(
    make_pool: MakePool,
) -> None:
    pytest.importorskip("fastokens")
    pool = make_pool(workers=1)
    leader = Started(pool, tokenizer_path=DEMO_TOKENIZER)

    def engine() -> str:
        return leader.tokenizers.reports()[0].copies[1].engine

    leader.wait_ready()
    beat = leader.row.heartbeat_ns
    leader.wait_until(lambda: leader.row.heartbeat_ns - beat > 500_000_000)
    assert engine() == "tokenizers"
    assert "fastokens" not in Path(f"/proc/{leader.process.pid}/maps").read_text()
    pool.board.row(pool.topology.board_supervisor).state = State.READY
    leader.wait_until(lambda: engine() == "fastokens")
    code, stderr = leader.end()
    assert code == 0 and "Traceback" not in stderr
