"""The routers under comparison: meshd's own policy objects, and others by their published descriptions.

Ours run as they are, on a registry, load cells and a prefix index of their own. A router sees the load that
it shares: meshd's I/O processes one count, the others each only what they sent themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from random import Random
from typing import Final, Protocol

from bench.simulator.traces import Prompt
from meshd.api.prefix_key import key_position
from meshd.api.view import RoutingView
from meshd.memory import Segment
from meshd.routing.policies.cache_aware import CacheAware
from meshd.routing.policies.consistent_hash import ConsistentHash
from meshd.routing.policies.least_load import LeastLoad
from meshd.routing.policies.power_of_two import PowerOfTwo
from meshd.routing.policies.prefix_hash import PrefixHash
from meshd.routing.policies.random_choice import RandomChoice
from meshd.routing.policies.round_robin import RoundRobin
from meshd.routing.policy import Candidates, Policy
from meshd.routing.prefix_index import SEGMENT_KIND, PrefixIndex, segment_bytes
from meshd.routing.registry import Registry
from meshd.routing.upstream import Upstream

_PREFIX_BLOCKS: Final = 8  # 256 tokens
_INDEX_BYTES: Final = 64 << 20


class Router(Protocol):
    """Chooses a server for each request and hears when it has ended."""

    def pick(self, prompt: Prompt, session: str, now_s: float) -> int: ...

    def ended(self, server: int, ticket: int) -> None: ...

    @property
    def ticket(self) -> int:
        """Identifies the last pick to ``ended``: the process that made it."""
        ...


class _Loads:
    def __init__(self, servers: int) -> None:
        self.counts = [0] * servers

    def load(self, number: int) -> int:
        return self.counts[number]

    def loads(self, numbers: Iterable[int]) -> list[int]:
        return [self.counts[number] for number in numbers]


class MeshdRouter:
    """``processes`` I/O processes that share loads and index; requests arrive at them in turn."""

    def __init__(
        self, make: Callable[[int, _Index], Policy], servers: int, processes: int, random: Random
    ) -> None:
        upstreams = [
            Upstream(
                number=number,
                id=f"u{number}",
                base_url=f"http://10.0.0.{number + 1}:8000",
                is_healthy=True,
                state="active",
            )
            for number in range(servers)
        ]
        self._candidates = Candidates(upstreams, Registry(1, upstreams))
        self._loads = _Loads(servers)
        index = _Index(processes)
        self._policies = [make(process, index) for process in range(processes)]
        self._index = index
        self._random = random
        self.ticket = 0

    def pick(self, prompt: Prompt, session: str, now_s: float) -> int:
        self._index.now_ns = int(now_s * 1e9)
        key = prompt.blocks[min(_PREFIX_BLOCKS, len(prompt.blocks)) - 1]
        view = RoutingView(
            "m",
            token_ids=b"some",
            prefix_key=key,
            key_position=key_position(key),
            text_bytes=prompt.text_bytes,
            block_keys=prompt.routing_keys(),
            session_key=session.encode(),
        )
        policy = self._policies[self._random.randrange(len(self._policies))]
        upstream = policy.pick(self._candidates, view, self._loads).upstream
        assert upstream is not None
        if policy.recorder is not None:
            policy.recorder.record(upstream, view)
        self._loads.counts[upstream.number] += 1
        return upstream.number

    def ended(self, server: int, ticket: int) -> None:
        self._loads.counts[server] -= 1


class _Index:
    """The prefix index of one simulated node, made when a policy asks for it."""

    def __init__(self, processes: int) -> None:
        self.now_ns = 0
        self._processes = processes
        self._segment: Segment | None = None

    def seat(self, process: int) -> PrefixIndex:
        if self._segment is None:
            self._segment = Segment.create(SEGMENT_KIND, segment_bytes(_INDEX_BYTES, self._processes))
        return PrefixIndex(self._segment, process, self._processes, _INDEX_BYTES, lambda: self.now_ns)


class TreeRouter:
    """Cache-aware routing with a prefix tree in each process, after the published description of its kind.

    Balanced: the server with the longest match if that covers more than ``threshold`` of the text, else the
    one with the smallest tree. Imbalanced: the least loaded. Trees, loads and turns are each process's own.
    """

    def __init__(
        self,
        servers: int,
        processes: int,
        random: Random,
        threshold: float = 0.3,
        balance_abs: int = 64,
        balance_rel: float = 1.5,
    ) -> None:
        self._random = random
        self._threshold = threshold
        self._abs = balance_abs
        self._rel = balance_rel
        self._trees: list[list[set[int]]] = [[set() for _ in range(servers)] for _ in range(processes)]
        self._loads = [[0] * servers for _ in range(processes)]
        self.ticket = 0

    def pick(self, prompt: Prompt, session: str, now_s: float) -> int:
        self.ticket = process = self._random.randrange(len(self._trees))
        trees, loads = self._trees[process], self._loads[process]
        least, most = min(loads), max(loads)
        if most - least > self._abs and most > least * self._rel:
            server = loads.index(least)
        else:
            depths = [_depth(tree, prompt) for tree in trees]
            best = max(range(len(depths)), key=depths.__getitem__)
            is_hit = depths[best] / len(prompt.blocks) > self._threshold
            server = best if is_hit else min(range(len(trees)), key=lambda each: len(trees[each]))
        trees[server].update(prompt.blocks)
        loads[server] += 1
        return server

    def ended(self, server: int, ticket: int) -> None:
        self._loads[ticket][server] -= 1


def _depth(tree: set[int], prompt: Prompt) -> int:
    low, high = 0, len(prompt.blocks)
    while low < high:
        middle = (low + high) // 2
        if prompt.blocks[middle] in tree:
            low = middle + 1
        else:
            high = middle
    return low


@dataclass(frozen=True, slots=True)
class Contender:
    """A router by name; ``make``: servers, processes and random → router."""

    name: str
    what: str
    make: Callable[[int, int, Random], Router]


def _ours(name: str, what: str, make: Callable[[int, _Index, Random], Policy]) -> Contender:
    def build(servers: int, processes: int, random: Random) -> Router:
        return MeshdRouter(lambda process, index: make(process, index, random), servers, processes, random)

    return Contender(name, what, build)


def _cache_aware(threshold: float, balance_abs: int, balance_rel: float) -> Callable[..., Policy]:
    return lambda process, index, random: CacheAware(
        index.seat(process), process, threshold, balance_abs, balance_rel
    )


CONTENDERS: Final = (
    _ours("random", "uniform", lambda process, index, random: RandomChoice(random)),
    _ours("round_robin", "in turn, each process its own", lambda process, index, random: RoundRobin(process)),
    _ours("power_of_two", "less loaded of two", lambda process, index, random: PowerOfTwo(random)),
    _ours("least_load", "least loaded", lambda process, index, random: LeastLoad(process)),
    _ours(
        "prefix_hash", "first 256 tokens, bounded load 1.25", lambda process, index, random: PrefixHash(1.25)
    ),
    _ours("consistent_hash", "session header", lambda process, index, random: ConsistentHash(process)),
    _ours("cache_aware", "0.3, 64, 1.5 (flags' defaults)", _cache_aware(0.3, 64, 1.5)),
    _ours("cache_aware 8/1.5", "0.3, 8, 1.5", _cache_aware(0.3, 8, 1.5)),
    _ours("cache_aware 16/1.5", "0.3, 16, 1.5", _cache_aware(0.3, 16, 1.5)),
    _ours("cache_aware t=0.1", "0.1, 64, 1.5", _cache_aware(0.1, 64, 1.5)),
    _ours("cache_aware t=0.6", "0.6, 64, 1.5", _cache_aware(0.6, 64, 1.5)),
    Contender(
        "tree, one process",
        "prefix tree, smallest tree on a miss",
        lambda n, p, random: TreeRouter(n, 1, random),
    ),
    Contender(
        "tree per process", "the same in each process apart", lambda n, p, random: TreeRouter(n, p, random)
    ),
)
