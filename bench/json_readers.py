"""``python -m bench.json_readers``: what it costs to read a body with each JSON reader, and what passes.

Measured is what a prepare job needs: the members that routing looks at, by the rules for bodies of
``meshd.api.request_json``. ``facts`` is for a policy that reads no text, ``text`` for one that reads all.
Bodies lie in shared memory, several of them in turn, as a prepare worker finds them: in no cache near it.
"""

from __future__ import annotations

import json
import mmap
import sys
import time
from collections.abc import Callable
from typing import Any, Final

import msgspec
import orjson
import simdjson

from meshd.api.long_json import LONG_BYTES, LongReader
from meshd.api.request_json import parse_body
from meshd.errors import MeshError

SIZES: Final = {"1 KiB": 1 << 10, "16 KiB": 16 << 10, "128 KiB": 128 << 10, "1 MiB": 1 << 20}
BODIES: Final = 16
ROUNDS: Final = 7
ROUND_S: Final = 0.2
SENTENCE: Final = "The quick brown fox is “quoted” \n and naïve; 第一条河流 flows, x == 3.14 or not. "
PLAIN_SENTENCE: Final = "The quick brown fox jumps over one lazy dog, and never looks back at it once. "
Reader = Callable[[bytes | memoryview], Any]


class Facts(msgspec.Struct):
    """The members that a policy without text looks at; others are checked and skipped."""

    model: str
    stream: bool = False
    n: int = 1
    logprobs: bool = False


class Texts(Facts):
    """The same for a policy that reads the text."""

    messages: list[dict[str, Any]] = []  # msgspec copies it
    prompt: str = ""


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


def string_of(size_bytes: int) -> bytes:
    """Return a request of about that size whose text is one plain ASCII string."""
    prompt = (PLAIN_SENTENCE * (size_bytes // len(PLAIN_SENTENCE) + 1))[: size_bytes - 50]
    return json.dumps({"model": "m1", "stream": True, "prompt": prompt}).encode()


SHAPES: Final = {"a chat": body_of, "one string": string_of}


def shared(body: bytes) -> list[memoryview]:
    """Return copies of a body in memory of their own."""
    whole = memoryview(mmap.mmap(-1, len(body) * BODIES))
    copies = [whole[start : start + len(body)] for start in range(0, len(whole), len(body))]
    for copy in copies:
        copy[:] = body
    return copies


def orjson_reader() -> tuple[Reader, Reader]:
    return orjson.loads, orjson.loads


def strict_reader() -> tuple[Reader, Reader]:
    """Orjson, with the checks that it lacks: what decides what a body is."""
    return parse_body, parse_body


def meshd_reader() -> tuple[Reader, Reader]:
    """The same, after simdjson had its try at a long body."""
    reader = LongReader()

    def facts(body: bytes | memoryview) -> Any:
        members = reader.skim(body) if len(body) >= LONG_BYTES else None
        return parse_body(body) if members is None else members

    def text(body: bytes | memoryview) -> Any:
        members = reader.read(body) if len(body) >= LONG_BYTES else None
        return parse_body(body) if members is None else members

    return facts, text


def msgspec_reader() -> tuple[Reader, Reader]:
    decode = msgspec.json.Decoder().decode
    return decode, decode


def msgspec_typed_reader() -> tuple[Reader, Reader]:
    return msgspec.json.Decoder(Facts).decode, msgspec.json.Decoder(Texts).decode


def simdjson_reader() -> tuple[Reader, Reader]:
    parser = simdjson.Parser()

    def facts(body: bytes | memoryview) -> Any:
        document: Any = parser.parse(body)
        return document["model"], document["stream"], document.get("n"), document.get("logprobs")

    def text(body: bytes | memoryview) -> Any:
        document: Any = parser.parse(body)
        messages = document.get("messages")
        found = document["prompt"] if messages is None else messages.as_list()
        return document["model"], document["stream"], found

    return facts, text


READERS: Final[dict[str, Callable[[], tuple[Reader, Reader]]]] = {
    "orjson": orjson_reader,
    "orjson + checks: the strict reader": strict_reader,
    "meshd": meshd_reader,
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
BLANK: Final = b" " * LONG_BYTES  # makes each a long body
DUPLICATE: Final = b'{"model":"first","stream":false,"model":"last"}'


def seconds(read: Reader, bodies: list[memoryview]) -> float:
    """Return the CPU seconds of one call: the best of some rounds, which neighbours disturb least."""
    count, best = 1, float("inf")
    for _ in range(ROUNDS):
        while True:
            started = time.process_time()
            for _ in range(count):
                for body in bodies:
                    read(body)
            took = time.process_time() - started
            if took > ROUND_S / 4:
                break
            count *= 2
        best = min(best, took / count / len(bodies))
    return best


def faults(read: Reader) -> list[str]:
    """Return what the reader gets wrong by the rules for bodies."""
    wrong = []
    for name, (body, must_pass) in CASES.items():
        try:
            read(body + BLANK)
            passes = True
        except (ValueError, RuntimeError, MeshError, RecursionError):
            passes = False
        if passes != must_pass:
            wrong.append(name)
    found = read(DUPLICATE + BLANK)
    model = found["model"] if isinstance(found, dict) else getattr(found, "model", None) or found[0]
    return wrong if model == "last" else [*wrong, "duplicate members"]


def main() -> int:
    """Print a table in Markdown for each shape of body, and one of faults."""
    for shape, make_body in SHAPES.items():
        print(f"| µs, {shape} | {' | '.join(f'{size}: facts, text' for size in SIZES)} |")
        print(f"|---|{'---|' * len(SIZES)}")
        for name, make in READERS.items():
            facts, text = make()
            cells = []
            for size in SIZES.values():
                bodies = shared(make_body(size))
                cells.append(", ".join(f"{seconds(read, bodies) * 1e6:.3g}" for read in (facts, text)))
            print(f"| {name} | {' | '.join(cells)} |", flush=True)
        print()
    print("| reader | wrong about |\n|---|---|")
    for name, make in READERS.items():
        print(f"| {name} | {', '.join(faults(make()[0])) or 'nothing'} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
