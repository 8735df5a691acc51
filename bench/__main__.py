"""``python -m bench [requests|streams|memory|table|report|goals|guard|scaling]``: docs/performance.md."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Final, NoReturn

from bench import BenchError
from bench.commands import COMMANDS, make_parser
from bench.compare import run_compare
from bench.goals_command import run_goals
from bench.guard import run_guard
from bench.memory import run_memory
from bench.peers import add_to_path
from bench.report import run_report
from bench.scaling import run_scaling
from bench.table_command import run_table_command

RUN: Final[dict[str, Callable[[argparse.Namespace], int]]] = {
    "requests": run_compare,
    "streams": run_compare,
    "memory": run_memory,
    "table": run_table_command,
    "report": run_report,
    "goals": run_goals,
    "guard": run_guard,
    "scaling": run_scaling,
}


def main(argv: Sequence[str]) -> int:
    """Exit code 0; 1 when a limit was missed or nothing valid was measured; 2 when it could not run."""
    words = ["guard" if word == "--guard" else word for word in argv]
    if not words or words[0] not in (*COMMANDS, "-h", "--help"):
        words.insert(0, "requests")
    args = make_parser().parse_args(words)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _leave)
    try:
        add_to_path(getattr(args, "peer_path", ()))
        return RUN[args.command](args)
    except BenchError as error:
        sys.stderr.write(f"bench: {error}\n")
        return 2


def _leave(number: int, frame: object) -> NoReturn:
    """Unwind, so that whatever was started is ended."""
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
