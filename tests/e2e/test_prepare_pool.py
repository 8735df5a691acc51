"""The preparation pool of a real node: who waits for whom, what is refused when, and what is counted.

Jobs are made long by text that can only be tokenized whole (no place to cut it safely), about a second for a
MiB; and they are made to wait, or to run for ever, by stopping prepare workers with SIGSTOP.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Iterator

import pytest

from meshd.control import BoardRow, Role, State
from tests.e2e.conftest import DEMO_TOKENIZER
from tests.fakes.load import read_response
from tests.fakes.node import Backend, Node, running, wait_until

MIB = 1 << 20
TOKENS = (
    "--policy", "prefix_hash", "--tokenizer-path", DEMO_TOKENIZER, "--tokenizer-engine", "tokenizers",
    "--disable-health-check",
)  # fmt: skip
Answer = tuple[int, dict[str, str], bytes]


@pytest.fixture(scope="module")
def pool(backends: tuple[Backend, Backend]) -> Iterator[Node]:
    """Two I/O processes and two prepare workers with default settings, but for time to tokenize."""
    flags = ("--io-processes", "2", "--prepare-workers", "2", "--prepare-max-tokenize-bytes", str(4 * MIB),
             "--prepare-timeout-ms", "60000", "--prepare-queue-timeout-ms", "20000")  # fmt: skip
    with running(*flags, *TOKENS, backends=backends) as node:
        yield node


@pytest.fixture(scope="module")
def single(backends: tuple[Backend, Backend]) -> Iterator[Node]:
    """One I/O process, one prepare worker, a capacity of two, short time-outs."""
    flags = ("--io-processes", "1", "--prepare-workers", "1", "--prepare-queue-capacity", "2",
             "--prepare-queue-timeout-ms", "3000", "--prepare-timeout-ms", "5000",
             "--prepare-max-tokenize-bytes", str(8 * MIB))  # fmt: skip
    with running(*flags, *TOKENS, backends=backends) as node:
        yield node


def whole_text(size_bytes: int, salt: int = 0) -> str:
    """Text without a space, of that size: it has no safe cut. Each salt gives another one."""
    sentence = "第%d条河流从山上流向大海沿途经过许多城市和村庄"
    parts, size, number = [], 0, salt * 1_000_000
    while size < size_bytes:
        parts.append(sentence % number)
        size += len(parts[-1].encode())
        number += 1
    return "".join(parts).encode()[:size_bytes].decode(errors="ignore")


class Request(threading.Thread):
    """One request on a connection of its own; ``answer`` once it is there, ``took_s`` with it."""

    def __init__(self, node: Node, prompt: object = "a", timeout: float = 60) -> None:
        super().__init__(daemon=True)
        self.node, self.timeout = node, timeout
        self.body = json.dumps(
            {"model": "m1", "prompt": prompt, "max_tokens": 1}, ensure_ascii=False
        ).encode()
        self.answer: Answer | None = None
        self.took_s = 0.0
        self.start()

    def run(self) -> None:
        started = time.monotonic()
        self.answer = self.node.request("POST", "/v1/completions", self.body, timeout=self.timeout)
        self.took_s = time.monotonic() - started

    def result(self) -> tuple[int, str]:
        self.join(self.timeout)
        assert self.answer is not None, "no answer"
        return self.answer[0], self.answer[1].get("x-mesh-error-code", "")


def workers(node: Node) -> list[BoardRow]:
    return [row for row in node.board().rows() if row.role is Role.PREPARE and row.pid]


@contextlib.contextmanager
def stopped(*rows: BoardRow) -> Iterator[None]:
    """Stop prepare workers, idle or in their jobs, for the length of the block."""
    pids = [row.pid for row in rows]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def books(node: Node) -> dict[str, float]:
    """The counts of the pool, by what they are, of one scrape."""
    found = node.metrics()

    def total(name: str, **labels: str) -> float:
        wanted = labels.items()
        return sum(
            value
            for (sample, pairs), value in found.items()
            if sample == f"mesh_prepare_{name}" and wanted <= dict(pairs).items()
        )

    return {
        "submitted": total("jobs_total"),
        "runs": total("run_seconds_count"),
        "claims": total("queue_seconds_count"),
        "rejections": total("rejections_total"),
        "errors": total("errors_total"),
        "queue_full": total("errors_total", reason="prepare_queue_full"),
        "queue_timeout": total("errors_total", reason="prepare_queue_timeout"),
        "timeout": total("errors_total", reason="prepare_timeout"),
        "cancelled": total("errors_total", reason="prepare_cancelled"),
        "retries": total("retries_total"),
        "parsed": total("stage_seconds_count", stage="json_parse"),
        "viewed": total("stage_seconds_count", stage="view"),
        "encoded": total("stage_seconds_count", stage="encode"),
    }


def gauges(node: Node) -> tuple[float, ...]:
    """Jobs waiting and dispatched, workers reserved and busy."""
    names = ("queued_jobs", "dispatched_jobs", "execution_reserved", "busy_workers")
    found = node.metrics()
    return tuple(found[f"mesh_prepare_{name}", ()] for name in names)


@contextlib.contextmanager
def counted(node: Node, **expected: int) -> Iterator[None]:
    """Check what the block adds to the books, at rest; what is not named stays. They always balance."""
    settle(node)
    before = books(node)
    yield
    wanted = {name: before[name] + expected.get(name, 0) for name in before}
    with contextlib.suppress(AssertionError):
        wait_until(lambda: books(node) == wanted, "")
    assert books(node) == wanted
    settle(node)


def settle(node: Node) -> None:
    wait_until(lambda: gauges(node) == (0, 0, 0, 0) and not node.held(), f"not at rest: {gauges(node)}")
    wait_until(lambda: is_balanced(books(node)), f"books do not balance: {books(node)}")


def is_balanced(found: dict[str, float]) -> bool:
    return found["submitted"] == found["runs"] + found["errors"]


def wait_for_jobs(node: Node, jobs: float) -> None:
    wait_until(lambda: node.metric("mesh_prepare_jobs_total") == jobs, "the requests do not arrive")


# ------------------------------------------------------------------------------------- fairness


def test_small_requests_pass_a_long_tokenization_on_the_same_io_process(pool: Node) -> None:
    """Behaviour 1. They take the free worker, hundreds of them, and none waits for the long job's end."""
    long = Request(pool, whole_text(2 * MIB))
    wait_until(lambda: any(row.busy > 1 for row in workers(pool)), "the long job does not run")
    served = 0
    while long.is_alive():
        small = Request(pool)
        assert small.result() == (200, "")
        served += long.is_alive()
    assert long.result() == (200, "")
    assert served >= 10, "small requests wait for the long one"
    settle(pool)


def test_flood_of_long_prompts_on_one_io_process_starves_nobody_on_another(pool: Node) -> None:
    """Behaviour 1. Whoever floods has both workers; a small request waits for no more than a job of his."""
    flooders, others = connections_by_process(pool)
    bodies = [raw_request(whole_text(MIB // 4, salt)) for salt in range(4)]
    is_over = threading.Event()
    floods = [Flood(connection, body, is_over) for connection, body in zip(flooders, bodies, strict=True)]
    try:
        wait_until(lambda: sum(row.busy > 1 for row in workers(pool)) == 2, "both workers run long jobs")
        for _ in range(2):
            for connection in others:
                connection.sendall(raw_request("small"))
                assert receive(connection).startswith(b"HTTP/1.1 200")
    finally:
        is_over.set()
        for flood in floods:
            flood.join(30)
    assert all(flood.served for flood in floods) and not any(flood.failed for flood in floods)
    for connection in (*flooders, *others):
        connection.close()
    settle(pool)


def connections_by_process(node: Node) -> tuple[list[socket.socket], list[socket.socket]]:
    """Open connections until each I/O process has four: the kernel chooses, the access log tells."""
    found: dict[int, list[socket.socket]] = {0: [], 1: []}
    while min(len(group) for group in found.values()) < 4:
        connection = node.connect(timeout=60)
        port = connection.getsockname()[1]
        connection.sendall(raw_request("hello"))
        receive(connection)
        wait_until(lambda port=port: process_of(node, port) is not None, "no access line")
        group = found[process_of(node, port) or 0]
        if len(group) < 4:
            group.append(connection)
        else:
            connection.close()
    return found[0], found[1]


def process_of(node: Node, port: int) -> int | None:
    lines = (line for line in node.access_lines() if line["client"].endswith(f":{port}"))
    return next((line["io_process"] for line in lines), None)


def raw_request(prompt: str) -> bytes:
    body = json.dumps({"model": "m1", "prompt": prompt, "max_tokens": 1}, ensure_ascii=False).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: h\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


def receive(connection: socket.socket) -> bytes:
    """Read one response that has a content-length."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += connection.recv(65536) or cut()
    head, _, body = data.partition(b"\r\n\r\n")
    length = next(
        int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")
    )
    while len(body) < length:
        body += connection.recv(65536) or cut()
    return head


def cut() -> bytes:
    raise EOFError("the connection was closed")


class Flood(threading.Thread):
    """Sends the same long request again and again on one connection."""

    def __init__(self, connection: socket.socket, request: bytes, is_over: threading.Event) -> None:
        super().__init__(daemon=True)
        self.connection, self.request, self.is_over = connection, request, is_over
        self.served = self.failed = 0
        self.start()

    def run(self) -> None:
        while not self.is_over.is_set():
            self.connection.sendall(self.request)
            if receive(self.connection).startswith(b"HTTP/1.1 200"):
                self.served += 1
            else:
                self.failed += 1


def test_256_overlapping_requests_are_all_served_with_default_settings(pool: Node) -> None:
    """Behaviours 3 and 13: one job each, under a policy that needs tokens too."""

    async def ask(number: int, all_connected: asyncio.Barrier) -> bytes:
        reader, writer = await asyncio.open_connection(pool.host, pool.port)
        await all_connected.wait()
        writer.write(raw_request(f"number {number}"))
        async with asyncio.timeout(30):
            head, _ = await read_response(reader)
        writer.close()
        return head

    async def ask_all() -> list[bytes]:
        all_connected = asyncio.Barrier(256)
        return await asyncio.gather(*(ask(number, all_connected) for number in range(256)))

    jobs = {"submitted": 256, "runs": 256, "claims": 256, "parsed": 256, "viewed": 256, "encoded": 256}
    with counted(pool, **jobs):
        heads = asyncio.run(ask_all())
    assert {head.split(b" ")[1] for head in heads} == {b"200"}


# ------------------------------------------------------------- admission, time-outs, cancellation


def test_fourth_request_of_a_stopped_worker_is_refused_at_once_and_the_pool_serves_on(single: Node) -> None:
    """Behaviour 2, and the gauges while it lasts: one dispatched, two waiting, one worker reserved."""
    jobs = {"submitted": 4, "runs": 3, "claims": 3, "errors": 1, "queue_full": 1}
    with counted(single, **jobs, parsed=3, viewed=3, encoded=3):
        before = single.metric("mesh_prepare_jobs_total")
        with stopped(*workers(single)):
            taken = []
            for number in range(3):
                taken.append(Request(single))
                wait_for_jobs(single, before + number + 1)
            refused = Request(single)
            assert refused.result() == (503, "prepare_queue_full")
            wait_until(lambda: gauges(single)[:3] == (2, 1, 1), f"{gauges(single)}", 2)
        assert refused.answer is not None
        assert refused.answer[1]["retry-after"] == "1"
        assert [request.result() for request in taken] == [(200, "")] * 3


def test_queued_job_whose_client_left_never_runs_and_is_counted_once(single: Node) -> None:
    """Behaviour 4."""
    jobs = {"submitted": 3, "runs": 1, "claims": 1, "errors": 2, "cancelled": 2}
    with counted(single, **jobs, parsed=1, viewed=1, encoded=1):
        before = single.metric("mesh_prepare_jobs_total")
        with stopped(*workers(single)):
            first = Request(single)
            wait_for_jobs(single, before + 1)
            for leave in (finish, reset):
                client = single.connect()
                client.sendall(raw_request("gone"))
                wait_for_jobs(single, before + 2 + (leave is reset))
                leave(client)
            wait_until(lambda: gauges(single)[0] == 0, "still waiting", 2)
        assert first.result() == (200, "")


def finish(client: socket.socket) -> None:
    client.close()


def reset(client: socket.socket) -> None:
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()


def test_job_that_waits_too_long_is_prepare_queue_timeout_and_never_runs(single: Node) -> None:
    """Behaviour 5: dispatched or waiting makes no difference."""
    with counted(single, submitted=2, errors=2, queue_timeout=2), stopped(*workers(single)):
        requests = [Request(single), Request(single)]
        assert [request.result() for request in requests] == [(504, "prepare_queue_timeout")] * 2
        assert all(2.9 <= request.took_s < 4.5 for request in requests)


def test_job_that_runs_too_long_is_prepare_timeout_at_that_moment(single: Node) -> None:
    """Behaviour 5. Its worker counts as reserved and busy until it returns; then the pool serves on."""
    with counted(single, submitted=2, runs=1, claims=2, errors=1, timeout=1, parsed=1, viewed=1, encoded=1):
        (row,) = workers(single)
        long = Request(single, whole_text(2 * MIB))
        wait_until(lambda: row.busy > 1, "the long job does not run")
        with stopped(row):
            assert long.result() == (504, "prepare_timeout")
            assert 4.9 <= long.took_s < 6.5
            # The answer is on its way before the same tick writes the gauges.
            wait_until(lambda: gauges(single) == (0, 0, 1, 1), "the gauges do not tell of the job")
        wait_until(lambda: not row.busy, "the worker does not return")
        assert Request(single).result() == (200, "")
        assert row.restarts == 0 or row.pid


def test_job_that_ended_in_time_is_forwarded_though_its_deadline_passes_before_the_connection_opens() -> None:
    """Behaviour 6: the upstream takes no connection, its queue is full, until all deadlines have passed."""
    with socket.socket() as server, contextlib.ExitStack() as queued:
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        flags = ("--io-processes", "1", "--prepare-workers", "1", "--worker-urls", url,
                 "--disable-health-check", "--prepare-timeout-ms", "400",
                 "--prepare-queue-timeout-ms", "400")  # fmt: skip
        with running(*flags) as node:
            while True:
                client = queued.enter_context(socket.socket())
                client.settimeout(0.2)
                try:
                    client.connect(server.getsockname())
                except TimeoutError:
                    break
            request = Request(node)
            wait_until(lambda: node.metric("mesh_prepare_run_seconds_count") == 1, "not prepared")
            prepared = time.monotonic()
            wait_until(lambda: time.monotonic() > prepared + 0.6, "the clock stands still")
            assert request.answer is None
            answer = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-type: application/json\r\n\r\n{}"
            server.settimeout(20)
            while request.answer is None:
                connection, _ = server.accept()
                with connection:
                    connection.settimeout(0.2)
                    with contextlib.suppress(TimeoutError, ConnectionError):
                        if connection.recv(65536).startswith(b"POST /v1/completions "):
                            connection.sendall(answer)
                            request.join(10)
            assert request.result() == (200, "")
            assert books(node)["errors"] == 0


def test_refused_requests_are_runs_with_stages_and_a_rejection(pool: Node) -> None:
    """Behaviours 7 and 8 as far as a client can cause them: each job of a mixed load has one outcome."""
    mix: list[object] = ["fine", "text", ["a", "b"], [1, 2, 3], {"no": 1}, 5, [1, -1], [[1], [2]]]
    outcomes = {200: 0, 400: 0}
    jobs = {"submitted": 24, "runs": 24, "claims": 24, "parsed": 24, "rejections": 9}
    settle(pool)
    before = books(pool)
    for prompt in mix * 3:
        outcomes[Request(pool, prompt).result()[0]] += 1
    assert outcomes == {200: 15, 400: 9}
    wait_until(lambda: books(pool)["runs"] == before["runs"] + 24, "not counted")
    after = books(pool)
    assert {name: after[name] - before[name] for name in jobs} == jobs
    assert pool.metric("mesh_prepare_rejections_total", reason="invalid_request") >= 9
    settle(pool)


# -------------------------------------------------------------------------------------- deaths


def test_jobs_of_a_killed_io_process_never_run_and_are_counted_as_cancelled(pool: Node) -> None:
    """Behaviour 11: no slot, no gauge, and the books balance over the death."""
    rows = [row for row in pool.board().rows() if row.role is Role.IO and row.pid]
    settle(pool)
    before = books(pool)
    with stopped(*workers(pool)):
        clients = [pool.connect() for _ in range(8)]
        for client in clients:
            client.sendall(raw_request("never"))
        wait_for_jobs(pool, before["submitted"] + 8)
        for row in rows:
            dead = row.pid
            os.kill(dead, signal.SIGKILL)
            wait_until(lambda row=row, dead=dead: row.pid not in (0, dead), "not replaced")
            wait_until(lambda row=row: row.state is State.READY, "not ready", 30)
    settle(pool)
    after = books(pool)
    assert after["cancelled"] == before["cancelled"] + 8
    assert after["runs"] == before["runs"]
    assert Request(pool).result() == (200, "")
    for client in clients:
        client.close()


def test_pool_that_stays_dead_for_10_s_is_unhealthy_and_recovers_by_itself(single: Node) -> None:
    """Behaviour 10, and a crash loop: the worker is made to wait, which the log and ``meshd ps`` tell.

    Its leader is stopped while the worker waits for its replacement; it is replaced itself after 10 s.
    """
    settle(single)
    (row,) = workers(single)
    leader = next(row for row in single.board().rows() if row.role is Role.LEADER and row.pid)
    restarts = single.metric("mesh_process_restarts_total", kind="prepare")
    for _ in range(5):
        wait_until(lambda: row.pid and row.state is State.READY, "not replaced")
        dead = row.pid
        os.kill(dead, signal.SIGKILL)
        wait_until(lambda dead=dead: row.pid != dead, "still there")
    died_at = time.monotonic()
    wait_until(lambda: row.restart_at_ns, "no back-off")
    os.kill(leader.pid, signal.SIGSTOP)
    assert any(each["state"] == "backoff" for each in single.ps() if each["role"] == "prepare")
    last = next(line for line in reversed(single.lines) if line["event"] == "prepare_worker_died")
    assert last["next_start_s"] == 1
    assert Request(single).result() == (504, "prepare_queue_timeout")
    assert health(single) == {"/liveness": 200, "/health": 503, "/readiness": 200}
    wait_until(lambda: health(single)["/liveness"] == 503, "not failed", 20)
    assert time.monotonic() - died_at > 9.5
    assert health(single) == {"/liveness": 503, "/health": 503, "/readiness": 503}
    refused = Request(single).result()
    if refused != (200, ""):
        assert refused == (503, "prepare_pool_closed")
    wait_until(lambda: set(health(single).values()) == {200}, "it does not recover", 30)
    assert Request(single).result() == (200, "")
    assert single.metric("mesh_process_restarts_total", kind="prepare") >= restarts + 5
    settle(single)


def health(node: Node) -> dict[str, int]:
    return {path: node.request("GET", path)[0] for path in ("/liveness", "/health", "/readiness")}


def test_crash_loop_of_one_worker_leaves_the_node_healthy_and_is_seen(pool: Node) -> None:
    row = workers(pool)[0]
    for _ in range(5):
        wait_until(lambda: row.pid and row.state is State.READY, "not replaced")
        dead = row.pid
        os.kill(dead, signal.SIGKILL)
        wait_until(lambda dead=dead: row.pid != dead, "still there")
    wait_until(lambda: row.restart_at_ns, "no back-off")
    assert pool.metric("mesh_prepare_live_workers") == 1
    assert pool.metric("mesh_process_restarts_total", kind="prepare") >= 4
    assert set(health(pool).values()) == {200}
    assert Request(pool).result() == (200, "")
    wait_until(lambda: pool.metric("mesh_prepare_live_workers") == 2, "it does not come back")
    settle(pool)


# ------------------------------------------------------------------------------------- shutdown


def test_shutdown_with_a_stuck_job_and_waiting_ones_is_clean_and_in_time(
    backends: tuple[Backend, Backend],
) -> None:
    """Behaviours 12 and 26: who has not started is told that the pool closes; the stuck job blocks nobody."""
    flags = ("--io-processes", "1", "--prepare-workers", "1", "--shutdown-grace-period-secs", "2",
             "--prepare-timeout-ms", "60000", "--prepare-queue-timeout-ms", "60000")  # fmt: skip
    with running(*flags, *TOKENS, backends=backends) as node:
        (row,) = workers(node)
        stuck = Request(node, whole_text(MIB - 100))
        wait_until(lambda: row.busy > 1, "the long job does not run")
        os.kill(row.pid, signal.SIGSTOP)
        waiting = [Request(node) for _ in range(3)]
        wait_for_jobs(node, 4)
        started = time.monotonic()
        assert node.stop() == 0
        took_s = time.monotonic() - started
        assert [request.result() for request in waiting] == [(503, "prepare_pool_closed")] * 3
        assert all(request.took_s > 1.5 for request in waiting), "they had the grace period"
        assert stuck.result() == (503, "admission_closed")
        assert 2 <= took_s < 4
        assert not [line for line in node.raw_lines if "Traceback" in line]
