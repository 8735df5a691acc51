"""``python -m bench.routing_sim``: compare routing policies on traces, against modelled servers.

No server and no meshd runs: the policies are meshd's own objects, the servers a model (simulator/servers.py),
so the figures tell policies apart and promise no latency. Writes JSON and a plot to bench/out/ and prints
Markdown.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import Final

from bench.simulator.routers import CONTENDERS
from bench.simulator.run import Outcome, simulate
from bench.simulator.servers import ServerModel
from bench.simulator.traces import TRACES

OUT: Final = Path(__file__).parent / "out"
SESSIONS_PER_S: Final = {"chats": 3.2, "shared_prompts": 90.0, "agents": 0.9, "documents": 7.0}
"""For eight servers: loads at which a good policy waits little and a bad one much."""


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.routing_sim", description=__doc__)
    parser.add_argument("--traces", nargs="+", choices=list(TRACES), default=list(TRACES))
    parser.add_argument("--routers", nargs="+", choices=[each.name for each in CONTENDERS])
    parser.add_argument("--servers", type=int, default=8)
    parser.add_argument("--processes", type=int, default=4, help="I/O processes of the router")
    parser.add_argument("--seconds", type=float, default=300.0, help="simulated, of arrivals")
    parser.add_argument("--load", type=float, default=1.0, help="times the usual arrivals")
    parser.add_argument("--cache-tokens", type=int, default=ServerModel().cache_tokens)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--plot", action="store_true", help="also an SVG; needs matplotlib")
    args = parser.parse_args(argv)
    model = ServerModel(cache_tokens=args.cache_tokens)
    outcomes: list[Outcome] = []
    for trace in args.traces:
        per_s = SESSIONS_PER_S[trace] * args.load * args.servers / 8
        sessions = list(TRACES[trace](Random(args.seed), per_s, args.seconds))
        for contender in CONTENDERS:
            if args.routers and contender.name not in args.routers:
                continue
            outcomes.append(
                simulate(
                    trace,
                    sessions,
                    contender,
                    servers=args.servers,
                    processes=args.processes,
                    model=model,
                    seed=args.seed,
                )
            )
        print(f"{markdown(outcomes, trace)}\n", flush=True)
    OUT.mkdir(exist_ok=True)
    path = OUT / f"{time.strftime('%Y%m%d-%H%M%S')}-routing.json"
    path.write_text(
        json.dumps({"arguments": vars(args), "outcomes": [asdict(o) for o in outcomes]}, indent=1)
    )
    print(f"raw figures: {path}")
    if args.plot:
        from bench.simulator.plot import plot

        print(f"plot: {plot(outcomes, path.with_suffix('.svg'))}")
    return 0


def markdown(outcomes: Sequence[Outcome], trace: str) -> str:
    """One trace as a table, the best time to the first token on top."""
    rows = sorted((each for each in outcomes if each.trace == trace), key=lambda each: each.ttft_mean_s)
    lines = [
        f"{trace}, {rows[0].requests} requests" if rows else trace,
        "",
        "| router | cache hits | same server as the turn before | work max/mean | TTFT mean | p50 | p99 |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row.router} | {row.hit_rate:.1%} | {row.affinity:.1%} | {row.imbalance:.2f}"
        f" | {_ms(row.ttft_mean_s)} | {_ms(row.ttft_p50_s)} | {_ms(row.ttft_p99_s)} |"
        for row in rows
    ]
    return "\n".join(lines)


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:,.0f} ms"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
