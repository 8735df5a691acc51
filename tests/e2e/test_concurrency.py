"""A thousand requests at once over 64 connections: every answer is the answer to its own request."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import random
import re

import aiohttp

from tests.fakes.node import running, wait_until

REQUESTS = 1000
CONNECTIONS = 64
SMALLEST, LARGEST = 1 << 10, 2 << 20
PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses", "/generate")


def body_of(number: int) -> tuple[str, bool, bytes]:
    """The path, whether it streams, and the body of one request: sizes spread evenly over their logarithm."""
    rng = random.Random(number)
    path = PATHS[number % len(PATHS)]
    is_stream = rng.random() < 0.4
    size = int(math.exp(rng.uniform(math.log(SMALLEST), math.log(LARGEST))))
    if number in (0, 1):
        size = (SMALLEST, LARGEST)[number]
    tail = "ü€ " if number % 4 == 0 else "and "
    text = f"request-{number} "
    text += (f"{rng.getrandbits(64):x} " * 8 + tail) * (size // 120) + "x" * (size % 120)
    members: dict = {"stream": is_stream, "model": "m1"}
    if path == "/generate":
        members["text"] = text
    elif path == "/v1/completions":
        members["prompt"] = text
    elif path == "/v1/responses":
        members |= {"input": text, "store": False}
    else:
        members |= {"messages": [{"role": "user", "content": text}], "max_tokens": 200}
    return path, is_stream, json.dumps(members, ensure_ascii=False).encode()


def check(number: int, body: bytes, answer: bytes) -> None:
    """The upstream makes its ids from a digest of the body it got, and its text from the prompt."""
    digest = hashlib.sha256(body).hexdigest()[:24].encode()
    assert set(re.findall(rb"request-(\d+)", answer)) == {b"%d" % number}, "another request's text"
    assert set(re.findall(rb"\b(?:[a-z]+[-_])?([0-9a-f]{24})\b", answer)) == {digest}, "made of other bytes"


async def ask_all(url: str) -> None:
    connector = aiohttp.TCPConnector(limit=CONNECTIONS)
    timeout = aiohttp.ClientTimeout(total=90)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:

        async def ask(number: int) -> None:
            path, is_stream, body = body_of(number)
            headers = {"content-type": "application/json", "x-request-id": f"r-{number}"}
            async with session.post(url + path, data=body, headers=headers) as answer:
                data = await answer.read()
                assert answer.status == 200, (number, data)
                assert answer.headers["x-request-id"] == f"r-{number}"
                assert answer.content_type == ("text/event-stream" if is_stream else "application/json")
                check(number, body, data)

        await asyncio.gather(*(ask(number) for number in range(REQUESTS)))


def test_thousand_requests_over_64_connections_each_get_their_own_answer(backends):
    # Everything waits for everything here on few CPUs, upstreams that answer their probes included.
    patience = (
        "--prepare-timeout-ms",
        "60000",
        "--prepare-queue-timeout-ms",
        "60000",
        "--disable-health-check",
    )
    with running("--io-processes", "2", "--prepare-workers", "2", *patience, backends=backends) as node:
        wait_until(lambda: node.request("GET", "/readiness")[0] == 200, "not ready")
        asyncio.run(ask_all(node.url))
        wait_until(lambda: len(node.access_lines()) == REQUESTS, "access lines are missing")
        lines = node.access_lines()
        assert {line["request_id"] for line in lines} == {f"r-{number}" for number in range(REQUESTS)}
        assert {line["outcome"] for line in lines} == {"completed"}
        assert {line["io_process"] for line in lines} == {0, 1}
        wait_until(lambda: not node.held(), f"left behind: {node.held()}")
