"""``python -m bench.baseline``: uvicorn with uvloop and httptools, one process a core, no access log."""

from __future__ import annotations

import argparse
import os
import socket
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
    parser.add_argument("--workers", type=int, default=1, help="processes, each with a listener on the port")
    args = parser.parse_args()
    if args.policy == "prefix_hash":
        if args.tokenizer is None:
            parser.error("prefix_hash needs --tokenizer")
        app = make_app(PrefixHash(args.upstreams, args.tokenizer))
    else:
        app = make_app(RoundRobin(args.upstreams))
    for _ in range(args.workers - 1):
        if os.fork() == 0:
            break
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    listener.bind(("127.0.0.1", args.port))
    config = uvicorn.Config(
        app,
        loop="uvloop",
        http="httptools",
        access_log=False,
        log_level="warning",
        timeout_graceful_shutdown=1,
    )
    uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    main()
