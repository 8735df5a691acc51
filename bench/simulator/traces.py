"""Traces: who asks what, and when. Seeded, so that every policy meets the same requests.

A prompt is not text here but what routing sees of it: a chain of blocks, hashed as block_keys.py hashes them.
Two prompts that open with the same parts share the opening of their chains. Lengths are in tokens, at four
bytes a token; parts are rounded to whole blocks of 32 tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random
from typing import Final

from xxhash import xxh3_64_intdigest

BYTES_PER_TOKEN: Final = 4
BLOCK_TOKENS: Final = 32  # 128 bytes
_FINE_BLOCKS: Final = 64  # of 128 bytes; then every eighth block ends a key of 1024 bytes
_COARSE: Final = 8


class Prompt:
    """A growing chain of blocks; ``grown`` shares what was there before."""

    __slots__ = ("blocks",)

    def __init__(self, blocks: tuple[int, ...] = ()) -> None:
        self.blocks = blocks

    def grown(self, part: str, tokens: int) -> Prompt:
        """Return this prompt followed by a part; equal names are equal texts."""
        chain = list(self.blocks)
        key = chain[-1] if chain else 0
        for number in range(max(1, round(tokens / BLOCK_TOKENS))):
            key = xxh3_64_intdigest(f"{part}/{number}".encode(), key)
            chain.append(key)
        return Prompt(tuple(chain))

    @property
    def tokens(self) -> int:
        return len(self.blocks) * BLOCK_TOKENS

    @property
    def text_bytes(self) -> int:
        return self.tokens * BYTES_PER_TOKEN

    def routing_keys(self) -> bytes:
        """Return the keys that the prefix index would be asked for: fine at first, then coarse."""
        fine, rest = self.blocks[:_FINE_BLOCKS], self.blocks[_FINE_BLOCKS:]
        coarse = rest[_COARSE - 1 :: _COARSE]
        last = rest[-1:] if len(rest) % _COARSE else ()
        return array("Q", (*fine, *coarse, *last)).tobytes()


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a session. ``think_s``: pause before it, after the answer to the one before."""

    prompt: Prompt
    output_tokens: int
    think_s: float


@dataclass(frozen=True, slots=True)
class Session:
    """Turns that follow each other; ``starts_s`` is when the first one is sent."""

    name: str
    starts_s: float
    turns: tuple[Turn, ...]


Trace = Callable[[Random, float, float], Iterator[Session]]
"""(random, sessions a second, seconds) → sessions in order of their start."""


def _starts(random: Random, per_s: float, seconds: float) -> Iterator[float]:
    at_s = 0.0
    while (at_s := at_s + random.expovariate(per_s)) < seconds:
        yield at_s


def chats(random: Random, per_s: float, seconds: float) -> Iterator[Session]:
    """Multi-turn chats: a system prompt of one of 20 products, then turns of people who read and type."""
    for number, start in enumerate(_starts(random, per_s, seconds)):
        product = random.randrange(20)
        prompt = Prompt().grown(f"chat system {product}", 400)
        turns = []
        for turn in range(1 + min(15, int(random.expovariate(1 / 5)))):
            prompt = prompt.grown(f"chat {number} user {turn}", random.randint(20, 400))
            output = random.randint(50, 500)
            turns.append(Turn(prompt, output, random.expovariate(1 / 12)))
            prompt = prompt.grown(f"chat {number} answer {turn}", output)
        yield Session(f"chat {number}", start, tuple(turns))


def shared_prompts(random: Random, per_s: float, seconds: float) -> Iterator[Session]:
    """Single questions under few long system prompts with examples, one of them far the most popular."""
    weights = [1 / (rank + 1) for rank in range(12)]
    for number, start in enumerate(_starts(random, per_s, seconds)):
        system = random.choices(range(12), weights)[0]
        prompt = Prompt().grown(f"long system {system}", 3000 + 200 * system)
        prompt = prompt.grown(f"question {number}", random.randint(30, 300))
        yield Session(f"question {number}", start, (Turn(prompt, random.randint(20, 200), 0.0),))


def agents(random: Random, per_s: float, seconds: float) -> Iterator[Session]:
    """Agents in tool loops: many quick turns, each with a tool's output on top of all before."""
    for number, start in enumerate(_starts(random, per_s, seconds)):
        prompt = Prompt().grown(f"agent tools {random.randrange(4)}", 2500)
        prompt = prompt.grown(f"agent {number} task", random.randint(100, 1000))
        turns = []
        for turn in range(random.randint(5, 30)):
            output = random.randint(40, 250)
            turns.append(Turn(prompt, output, random.expovariate(1 / 0.8)))
            prompt = prompt.grown(f"agent {number} call {turn}", output)
            prompt = prompt.grown(f"agent {number} result {turn}", random.randint(100, 1500))
        yield Session(f"agent {number}", start, tuple(turns))


def documents(random: Random, per_s: float, seconds: float) -> Iterator[Session]:
    """Questions about documents of 4,000 to 30,000 tokens; popularity by Zipf's law over 400 of them."""
    weights = [1 / (rank + 1) for rank in range(400)]
    lengths = [random.randint(4000, 30000) for _ in weights]
    for number, start in enumerate(_starts(random, per_s, seconds)):
        document = random.choices(range(400), weights)[0]
        prompt = Prompt().grown("document system", 200).grown(f"document {document}", lengths[document])
        turns = []
        for turn in range(1 + int(random.expovariate(1))):
            prompt = prompt.grown(f"reader {number} {turn}", random.randint(20, 100))
            output = random.randint(50, 300)
            turns.append(Turn(prompt, output, random.expovariate(1 / 20)))
            prompt = prompt.grown(f"reader {number} answer {turn}", output)
        yield Session(f"reader {number}", start, tuple(turns))


TRACES: Final[dict[str, Trace]] = {
    "chats": chats,
    "shared_prompts": shared_prompts,
    "agents": agents,
    "documents": documents,
}
