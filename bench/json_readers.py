"""``python -m bench.json_readers``: what it costs to read a body with each JSON reader, and what passes.

Measured is what a prepare job needs: the members that routing looks at, by the rules for bodies of
``meshd.api.request_json``. ``facts`` is for a policy that reads no text, ``text`` for one that reads all.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any, Final

import msgspec
import orjson
import simdjson

from meshd.api.request_json import parse_body
from meshd.errors import MeshError

SIZES: Final = {"1 KiB": 1 << 10, "16 KiB": 16 << 10, "128 KiB": 128 << 10, "1 MiB": 1 << 20}
ROUNDS: Final = 7
ROUND_S: Final = 0.2
SENTENCE: Final = "The quick brown fox is “quoted” \n and naïve; 第一条河流 flows, x == 3.14 or not. "
Reader = Callable[[bytes], Any]


class Facts(msgspec.Struct):
    """The members that a policy without text looks at; others are checked and skipped."""

    model: str
    stream: bool = False
    n: int = 1
    logprobs: bool = False


class Texts(Facts):
    """The same for a policy that reads the text."""

    messages: list[dict[str, Any]] = []  # msgspec copies it


def body_of(size_bytes: int) -> bytes:
    """Return a chat request of about that size: turns of up to 4 KiB, and a tool."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    messages: list[dict[str, str]] = []
    left = size_bytes - 300
    while left > 0:
        text = (SENTENCE * 40)[: min(left, 3800)]
        messages.append({"role": ("user", "assistant")[len(messages) % 2], "content": text})
        left -= len(json.dumps(messages[-1], ensure_ascii=False).encode())
    whole = {"model": "m1", "messages": messages, "tools": [tool], "stream": True, "temperature": 0.7}
    return json.dumps(whole, ensure_ascii=False).encode()


def orjson_reader() -> tuple[Reader, Reader]:
    return orjson.loads, orjson.loads


def meshd_reader() -> tuple[Reader, Reader]:
    """Orjson, with the checks that it lacks."""
    return parse_body, parse_body


def msgspec_reader() -> tuple[Reader, Reader]:
    decode = msgspec.json.Decoder().decode
    return decode, decode


def msgspec_typed_reader() -> tuple[Reader, Reader]:
    return msgspec.json.Decoder(Facts).decode, msgspec.json.Decoder(Texts).decode


def simdjson_reader() -> tuple[Reader, Reader]:
    parser = simdjson.Parser()

    def facts(body: bytes) -> Any:
        document: Any = parser.parse(body)
        return document["model"], document["stream"], document.get("n"), document.get("logprobs")

    def text(body: bytes) -> Any:
        document: Any = parser.parse(body)
        return document["model"], document["stream"], document["messages"].as_list()

    return facts, text


READERS: Final[dict[str, Callable[[], tuple[Reader, Reader]]]] = {
    "orjson": orjson_reader,
    "orjson + checks (meshd)": meshd_reader,
    "msgspec, untyped": msgspec_reader,
    "msgspec, typed": msgspec_typed_reader,
    "pysimdjson": simdjson_reader,
}

_DEEP: Final = 600
CASES: Final[dict[str, tuple[bytes, bool]]] = {
    # what it is: the body, and whether it must pass
    "NaN": (b'{"model":"m","stream":false,"x":NaN}', False),
    "lone surrogate": (b'{"model":"m","stream":false,"x":"\\ud800"}', False),
    "broken UTF-8": (b'{"model":"m","stream":false,"x":"\xff"}', False),
    "rest after the value": (b'{"model":"m","stream":false} x', False),
    "600 levels": (b'{"model":"m","stream":false,"x":' + b"[" * _DEEP + b"]" * _DEEP + b"}", False),
    "integer of 30 digits": (b'{"model":"m","stream":false,"x":%s}' % (b"7" * 30), True),
    "1e999": (b'{"model":"m","stream":false,"x":1e999}', True),
}
DUPLICATE: Final = b'{"model":"first","stream":false,"model":"last"}'


def seconds(read: Reader, body: bytes) -> float:
    """Return the CPU seconds of one call: the best of some rounds, which neighbours disturb least."""
    count, best = 1, float("inf")
    for _ in range(ROUNDS):
        while True:
            started = time.process_time()
            for _ in range(count):
                read(body)
            took = time.process_time() - started
            if took > ROUND_S / 4:
                break
            count *= 2
        best = min(best, took / count)
    return best


def faults(read: Reader) -> list[str]:
    """Return what the reader gets wrong by the rules for bodies."""
    wrong = []
    for name, (body, must_pass) in CASES.items():
        try:
            read(body)
            passes = True
        except (ValueError, RuntimeError, MeshError, RecursionError):
            passes = False
        if passes != must_pass:
            wrong.append(name)
    found = read(DUPLICATE)
    model = found["model"] if isinstance(found, dict) else getattr(found, "model", None) or found[0]
    return wrong if model == "last" else [*wrong, "duplicate members"]


def main() -> int:
    """Print two tables in Markdown."""
    print(f"| µs | {' | '.join(f'{size}: facts, text' for size in SIZES)} |")
    print(f"|---|{'---|' * len(SIZES)}")
    for name, make in READERS.items():
        facts, text = make()
        cells = []
        for size in SIZES.values():
            body = body_of(size)
            cells.append(", ".join(f"{seconds(read, body) * 1e6:.3g}" for read in (facts, text)))
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
    print("\n| reader | wrong about |\n|---|---|")
    for name, make in READERS.items():
        print(f"| {name} | {', '.join(faults(make()[0])) or 'nothing'} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
