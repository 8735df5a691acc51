"""The model of one inference server: a prefill queue, a prefix cache of finite size, and decoding.

Prefill is served in order of arrival at a rate of uncached tokens; what was computed enters the cache, and
what was used longest ago leaves it. Decoding starts when prefill is done and slows down with the number of
sequences that run. Rough on purpose: it has the three things that routing can influence, which are waiting,
hits, and crowding, and nothing else.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from bench.simulator.traces import BLOCK_TOKENS, Prompt


@dataclass(frozen=True, slots=True)
class ServerModel:
    """``cache_tokens``: of the prefix cache. Rates are those of a 70B model on a node with eight GPUs."""

    prefill_tokens_per_s: float = 12_000.0
    prefill_fixed_s: float = 0.015
    cache_tokens: int = 400_000
    token_s: float = 0.012  # between two output tokens when it runs alone
    crowding: float = 1 / 64  # how much longer for each sequence that runs beside it


class Server:
    """One server in simulated time."""

    def __init__(self, model: ServerModel) -> None:
        self._model = model
        self._cache: OrderedDict[int, None] = OrderedDict()
        self._free_at_s = 0.0  # when the prefill queue is empty
        self.running = 0
        self.requests = 0
        self.prompt_tokens = 0
        self.hit_tokens = 0
        self.busy_s = 0.0

    def accept(self, prompt: Prompt, now_s: float) -> float:
        """Queue a request; return when its first token is there."""
        self.requests += 1
        self.running += 1
        hit = self._hit_blocks(prompt) * BLOCK_TOKENS
        self.prompt_tokens += prompt.tokens
        self.hit_tokens += hit
        work_s = self._model.prefill_fixed_s + (prompt.tokens - hit) / self._model.prefill_tokens_per_s
        self._free_at_s = max(now_s, self._free_at_s) + work_s
        self.busy_s += work_s
        self._keep(prompt)
        return self._free_at_s

    def decode_s(self, output_tokens: int) -> float:
        """Return how long the rest of an answer takes."""
        return output_tokens * self._model.token_s * (1 + self.running * self._model.crowding)

    def _hit_blocks(self, prompt: Prompt) -> int:
        """Blocks that need no computing; the last one always does."""
        hits = 0
        for block in prompt.blocks[:-1]:
            if block not in self._cache:
                break
            hits += 1
        return hits

    def _keep(self, prompt: Prompt) -> None:
        # a chain's end is evicted before its beginning, as in engines: no child outlives its parent
        for block in reversed(prompt.blocks):
            self._cache[block] = None
            self._cache.move_to_end(block)
        while len(self._cache) * BLOCK_TOKENS > self._model.cache_tokens:
            self._cache.popitem(last=False)
