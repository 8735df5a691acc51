"""The points of the big table: which workloads, at which sizes and with how many clients."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Final

from bench import BenchError
from bench.workload import Workload

SIZES: Final = {
    "1k": 1 << 10,
    "16k": 16 << 10,
    "64k": 64 << 10,
    "128k": 128 << 10,
    "512k": 512 << 10,
    "1m": 1 << 20,
}
CLIENTS: Final = (1, 4, 16, 64, 256)
STREAMS: Final = (16, 64, 256)
WHOLE_SIZES: Final = ("1k", "16k", "128k")
FAIRNESS_TIMES: Final = 4  # a prompt of 1 MiB takes half a second or more, and a round needs many
WHOLE_CLIENTS: Final = (1, 16)
WHOLE_PROMPT_TOKENS: Final = 1 << 22  # more than a prompt of the largest size can have


@dataclass(frozen=True, slots=True)
class Setup:
    """How front ends are started; points of one setup share their processes.

    ``meshd_args``: for meshd alone. ``is_apart``: I/O and preparation on different cores, two a front end.
    ``has_floors``: whether front ends that do not look into bodies take part.
    """

    name: str
    what: str
    policy: str
    meshd_args: tuple[str, ...] = ()
    is_apart: bool = False
    has_floors: bool = False
    wants_tokenizing: bool = False


# without a bound on waiting for the tokenizer, for the baseline has none
PATIENT: Final = ("--prepare-timeout-ms", "60000", "--prepare-queue-timeout-ms", "60000")
WHOLE: Final = ("--prefix-token-count", str(WHOLE_PROMPT_TOKENS), *PATIENT)
PROXY: Final = Setup("proxy", "parse and forward, round robin", "round_robin", has_floors=True)
TOKENIZE: Final = Setup("tokenize", "parse, hash the first 256 tokens, forward by a hash ring", "prefix_hash")
WHOLE_PROMPTS: Final = Setup(
    "whole", "the same over all tokens of the prompt", "prefix_hash", WHOLE, wants_tokenizing=True
)
FAIRNESS: Final = Setup(
    "fairness",
    "1 KiB requests while one client sends 1 MiB prompts, all tokens of all prompts hashed; two cores",
    "prefix_hash",
    WHOLE,
    is_apart=True,
    wants_tokenizing=True,
)
SETUPS: Final = (PROXY, TOKENIZE, WHOLE_PROMPTS, FAIRNESS)


@dataclass(frozen=True, slots=True)
class Point:
    """One cell of the grid. ``name``: what ``--points`` is matched with, such as ``proxy/16k/64``."""

    name: str
    kind: str
    setup: Setup
    workload: Workload


def all_points(seconds: float) -> list[Point]:
    """The whole grid, by setup."""
    return [
        *_sizes(PROXY, SIZES, CLIENTS, seconds),
        *(_stream(count, seconds) for count in STREAMS),
        *(_mixed(clients, seconds) for clients in (16, 64)),
        *_sizes(TOKENIZE, SIZES, CLIENTS, seconds),
        *_sizes(WHOLE_PROMPTS, WHOLE_SIZES, WHOLE_CLIENTS, seconds),
        # sixteen of these would wait longer than wrk does
        *_sizes(WHOLE_PROMPTS, ("1m",), (1,), seconds),
        Point(
            "fairness/16",
            "fairness",
            FAIRNESS,
            Workload(clients=16, seconds=FAIRNESS_TIMES * seconds, long_clients=1, long_bytes=SIZES["1m"]),
        ),
    ]


SMALL_SIZES: Final = ("1k", "128k", "1m")  # with few, some and many clients; the others with sixteen
SMALL_CLIENTS: Final = (1, 16, 256)
SMALL: Final = (
    *(
        f"{kind}/{size}/{clients}"
        for kind in ("proxy", "tokenize")
        for size in SIZES
        for clients in (SMALL_CLIENTS if size in SMALL_SIZES else (16,))
    ),
    "stream/16",
    "stream/256",
    "mixed/16",
    "whole/16k/16",
    "whole/1m/1",
    "fairness/16",
)
QUICK: Final = (
    "proxy/1k/16",
    "proxy/64k/4",
    "stream/64",
    "mixed/16",
    "tokenize/1k/16",
    "whole/16k/1",
    "fairness/16",
)


@dataclass(frozen=True, slots=True)
class Grid:
    """A choice of points, and how they are measured unless told otherwise. ``what``: for --help."""

    what: str
    patterns: tuple[str, ...]
    seconds: float
    rounds: int


GRIDS: Final = {
    "full": Grid("everything, about three hours with all front ends", ("*",), 5.0, 3),
    "small": Grid("all workloads and sizes, some numbers of clients, about 25 minutes", SMALL, 2.0, 2),
    "quick": Grid("does it work at all? Not for figures", QUICK, 1.0, 2),
}


def choose(points: Sequence[Point], patterns: Sequence[str]) -> list[Point]:
    """The points that match one of the shell patterns; `BenchError` for a pattern that matches none."""
    for pattern in patterns:
        if not any(fnmatchcase(point.name, pattern) for point in points):
            raise BenchError(f"no point is named {pattern}; there are {points[0].name} … {points[-1].name}")
    return [point for point in points if any(fnmatchcase(point.name, pattern) for pattern in patterns)]


def _sizes(setup: Setup, sizes: Iterable[str], clients: Sequence[int], seconds: float) -> list[Point]:
    return [
        Point(f"{setup.name}/{size}/{count}", setup.name, setup, Workload(count, seconds, SIZES[size]))
        for size in sizes
        for count in clients
    ]


def _stream(count: int, seconds: float) -> Point:
    return Point(f"stream/{count}", "stream", PROXY, Workload(clients=count, seconds=seconds, streams=count))


def _mixed(clients: int, seconds: float) -> Point:
    workload = Workload(clients=clients, seconds=seconds, long_clients=4, long_bytes=SIZES["128k"])
    return Point(f"mixed/{clients}", "mixed", PROXY, workload)
