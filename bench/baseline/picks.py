"""The two ways in which the baseline picks an upstream: in turn, or by the hash of a tokenized prefix."""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any, Final, Protocol

import xxhash
from blake3 import blake3
from tokenizers import Tokenizer

POINTS: Final = 150
PREFIX_TOKENS: Final = 256
LOAD_FACTOR: Final = 1.25


class Picker(Protocol):
    """Choose an upstream for a prompt, and hear when that request has ended."""

    def pick(self, prompt: Any) -> str: ...

    def release(self, url: str) -> None: ...


class RoundRobin:
    """Upstreams in turn."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._turns = cycle(urls)

    def pick(self, prompt: Any) -> str:
        return next(self._turns)

    def release(self, url: str) -> None:
        pass


class PrefixHash:
    """The hash-ring owner of the first 256 tokens, unless its load is over 1.25 times the mean.

    The whole prompt is tokenized, in the event loop: that is what the plain API of `tokenizers` offers.
    """

    def __init__(self, urls: Sequence[str], tokenizer: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(tokenizer))
        self._loads = dict.fromkeys(urls, 0)
        ring = sorted(
            (_position(f"{url}#".encode() + struct.pack("<Q", i)), url) for url in urls for i in range(POINTS)
        )
        self._positions = [position for position, _ in ring]
        self._owners = [url for _, url in ring]

    def pick(self, prompt: Any) -> str:
        url = self._choose(self._ids(prompt))
        self._loads[url] += 1
        return url

    def release(self, url: str) -> None:
        self._loads[url] -= 1

    def _ids(self, prompt: Any) -> list[int]:
        if isinstance(prompt, list):
            if prompt and isinstance(prompt[0], int):
                return prompt[:PREFIX_TOKENS]
            prompt = prompt[0] if prompt else ""
            if isinstance(prompt, list):
                return prompt[:PREFIX_TOKENS]
        ids: list[int] = self._tokenizer.encode(prompt, add_special_tokens=False).ids
        return ids[:PREFIX_TOKENS]

    def _choose(self, ids: list[int]) -> str:
        key = xxhash.xxh3_64_hexdigest(struct.pack(f"<{len(ids)}I", *ids))
        at = bisect_left(self._positions, _position(key.encode()))
        owner = self._owners[at % len(self._owners)]
        limit = (sum(self._loads.values()) + 1) / len(self._loads) * LOAD_FACTOR
        if self._loads[owner] <= limit:
            return owner
        return min(
            (url for url in self._loads if self._loads[url] <= limit),
            key=self._loads.__getitem__,
            default=owner,
        )


def _position(data: bytes) -> int:
    return int.from_bytes(blake3(data).digest(8), "little")
