"""``python -m bench.baseline``: one uvicorn worker with uvloop and httptools, no access log."""

from __future__ import annotations

import argparse
from pathlib import Path

import uvicorn

from bench.baseline.app import make_app
from bench.baseline.picks import PrefixHash, RoundRobin


def main() -> None:
    """Serve until SIGTERM."""
    parser = argparse.ArgumentParser(prog="python -m bench.baseline")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--policy", choices=("round_robin", "prefix_hash"), default="round_robin")
    parser.add_argument("--tokenizer", type=Path, help="tokenizer.json; needed for prefix_hash")
    parser.add_argument("--upstreams", nargs="+", required=True)
    args = parser.parse_args()
    if args.policy == "prefix_hash":
        if args.tokenizer is None:
            parser.error("prefix_hash needs --tokenizer")
        app = make_app(PrefixHash(args.upstreams, args.tokenizer))
    else:
        app = make_app(RoundRobin(args.upstreams))
    uvicorn.run(
        app,
        host="127.0.0.1",
        port=args.port,
        loop="uvloop",
        http="httptools",
        workers=1,
        access_log=False,
        log_level="warning",
        timeout_graceful_shutdown=1,
    )


if __name__ == "__main__":
    main()
