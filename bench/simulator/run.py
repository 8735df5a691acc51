"""One simulation: sessions against servers through one router, event by event."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count
from random import Random
from statistics import fmean

from bench.simulator.routers import Contender
from bench.simulator.servers import Server, ServerModel
from bench.simulator.traces import Session


@dataclass(frozen=True, slots=True)
class Outcome:
    """``hit_rate``: prompt tokens found in a cache. ``imbalance``: largest over mean prefill work.

    ``affinity``: turns that met the server of the turn before them. Times to the first token in seconds.
    """

    trace: str
    router: str
    requests: int
    hit_rate: float
    imbalance: float
    affinity: float
    ttft_p50_s: float
    ttft_p99_s: float
    ttft_mean_s: float


def simulate(
    trace: str,
    sessions: Iterable[Session],
    contender: Contender,
    *,
    servers: int,
    processes: int,
    model: ServerModel,
    seed: int,
) -> Outcome:
    """Play ``sessions`` to their end. A turn is sent when the one before it is answered and thought about."""
    router = contender.make(servers, processes, Random(seed))
    fleet = [Server(model) for _ in range(servers)]
    order = count()  # ties in time go by age
    events: list[tuple[float, int, int, Session, int]] = []  # time, order, kind, session, turn
    ttfts: list[float] = []
    places: dict[str, int] = {}
    tickets: dict[tuple[str, int], tuple[int, int]] = {}
    kept = followed = 0
    for session in sessions:
        heapq.heappush(events, (session.starts_s, next(order), _SEND, session, 0))
    while events:
        now_s, _, kind, session, number = heapq.heappop(events)
        turn = session.turns[number]
        if kind == _SEND:
            server = router.pick(turn.prompt, session.name, now_s)
            tickets[session.name, number] = server, router.ticket
            if session.name in places:
                followed += 1
                kept += places[session.name] == server
            places[session.name] = server
            first_at_s = fleet[server].accept(turn.prompt, now_s)
            ttfts.append(first_at_s - now_s)
            ends_s = first_at_s + fleet[server].decode_s(turn.output_tokens)
            heapq.heappush(events, (ends_s, next(order), _END, session, number))
        else:
            server, ticket = tickets.pop((session.name, number))
            router.ended(server, ticket)
            fleet[server].running -= 1
            if number + 1 < len(session.turns):
                next_s = now_s + session.turns[number + 1].think_s
                heapq.heappush(events, (next_s, next(order), _SEND, session, number + 1))
    ttfts.sort()
    work = [server.busy_s for server in fleet]
    return Outcome(
        trace=trace,
        router=contender.name,
        requests=len(ttfts),
        hit_rate=sum(s.hit_tokens for s in fleet) / max(1, sum(s.prompt_tokens for s in fleet)),
        imbalance=max(work) / fmean(work),
        affinity=kept / followed if followed else 1.0,
        ttft_p50_s=ttfts[len(ttfts) // 2],
        ttft_p99_s=ttfts[int(len(ttfts) * 0.99)],
        ttft_mean_s=fmean(ttfts),
    )


_SEND = 0
_END = 1
