"""Instructions of user space for one request: by `perf stat` where the CPU lets us count, else by callgrind.

Seconds depend on neighbours, clocks and caches; instructions hardly do. Under callgrind everything is some
forty times slower, so timers and idle looks weigh more than they do in life: an idle window of known length
is counted as well, and its rate taken off. One client sends, since a front end this slow would otherwise find
several requests at each wake-up, which a fast one does not.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from bench import BenchError, tree
from bench.cpu_sets import Cpus
from bench.front_end import FrontEnd, Site
from bench.launch import Running
from bench.load import Sending, send_requests

EVENT: Final = "instructions:u"
BODY: Final = Sending(clients=1, body_bytes=1024)
COUNTED_S: Final = 3.0
IDLE_S: Final = 2.0
FEWEST: Final = 40
IO_PROCESS: Final = "meshd.io.process"


def choose_counter() -> str:
    """``perf``, ``callgrind``, or nothing."""
    if shutil.which("perf") and _perf_value(_perf(["true"])):
        return "perf"
    return "callgrind" if shutil.which("valgrind") and shutil.which("callgrind_control") else ""


def parse_perf(text: str) -> int | None:
    """The count in the output of ``perf stat -x,``; None where the event is not supported or not counted."""
    for line in text.splitlines():
        fields = line.split(",")
        if len(fields) > 2 and fields[2].startswith("instructions"):
            return int(fields[0]) if fields[0].isdigit() else None
    return None


def parse_callgrind(text: str) -> int:
    """The sum of instructions in one dump of callgrind."""
    found = re.search(r"^(?:summary|totals): (\d+)", text, re.MULTILINE)
    return int(found[1]) if found else 0


def per_request(busy: int, busy_s: float, idle: int, idle_s: float, requests: int) -> float:
    """Instructions of one request, less what the same time costs when nothing is to be done.

    Raises `BenchError` where the requests are so few that idling outweighs them.
    """
    if requests < FEWEST:
        raise BenchError(
            f"only {requests} requests were answered while instructions were counted: a busy machine"
        )
    return (busy - idle / idle_s * busy_s) / requests


def count_by_perf(running: Running, cpus: Cpus, sending: Sending, seconds: float) -> float:
    """Instructions of the whole tree for one request."""
    pids = ",".join(str(process.pid) for process in tree.tree(running.pid))
    with subprocess.Popen(
        ["perf", "stat", "-x,", "-e", EVENT, "-p", pids],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as perf:
        loads, _ = send_requests(cpus, running.port, [sending], seconds)
        perf.send_signal(signal.SIGINT)
        output = perf.communicate()[0]
    counted = parse_perf(output)
    if counted is None:
        raise BenchError(f"perf counted nothing:\n{output}")
    return counted / max(1, loads[0].done)


def under_callgrind(front_end: FrontEnd, directory: Path) -> FrontEnd:
    """The same front end, its data process under callgrind, which writes into ``directory``."""
    valgrind = [
        "valgrind",
        "--tool=callgrind",
        "--instr-atstart=no",
        f"--callgrind-out-file={directory}/out.%p",
    ]

    def command(site: Site) -> list[str]:
        plain = front_end.command(site)
        return _with_io_under(valgrind, plain, directory) if "meshd" in plain else [*valgrind, *plain]

    return replace(front_end, command=command)


def count_by_callgrind(running: Running, cpus: Cpus, directory: Path) -> float:
    """Instructions of the one process that runs under callgrind, for one request."""
    pid = _pid_under_valgrind(process.pid for process in tree.tree(running.pid))
    send_requests(cpus, running.port, [BODY], 1.0)  # what is done once is done now
    running.settle()
    _control(pid, "-i", "on")
    _control(pid, "-z")
    began_s = time.monotonic()
    time.sleep(IDLE_S)
    _control(pid, "-d")
    middle_s = time.monotonic()
    loads, _ = send_requests(cpus, running.port, [BODY], COUNTED_S)
    _control(pid, "-d")
    busy_s = time.monotonic() - middle_s
    idle, busy = (parse_callgrind(Path(directory, f"out.{pid}.{number}").read_text()) for number in (1, 2))
    return per_request(busy, busy_s, idle, middle_s - began_s, loads[0].done)


def _with_io_under(valgrind: Sequence[str], plain: Sequence[str], directory: Path) -> list[str]:
    """meshd starts its children with ``sys.executable``: let that be a script that picks one out.

    ``plain``: ``[… PYTHON -m meshd launch …]``; what stands before the Python stays.
    """
    at = list(plain).index("meshd")
    before, python = plain[: at - 2], plain[at - 2]
    script = directory / "python"
    picked = f'case "$*" in *{IO_PROCESS}*) exec {" ".join(valgrind)} {python} "$@";; esac'
    script.write_text(f'#!/bin/sh\n{picked}\nexec {python} "$@"\n')
    script.chmod(0o755)
    program = f"import sys; sys.executable = {str(script)!r}; from meshd.cli import main; sys.exit(main())"
    return [*before, python, "-c", program, *plain[at + 1 :]]


def _pid_under_valgrind(pids: Iterable[int]) -> int:
    for pid in pids:
        try:
            if "valgrind" in os.readlink(f"/proc/{pid}/exe"):
                return pid
        except OSError:
            continue
    raise BenchError("no process runs under valgrind")


def _control(pid: int, *words: str) -> None:
    done = subprocess.run(
        ["callgrind_control", *words, str(pid)], capture_output=True, text=True, check=False
    )
    if done.returncode or "OK" not in done.stdout:
        raise BenchError(f"callgrind_control {' '.join(words)} failed: {done.stdout}{done.stderr}")


def _perf(command: Sequence[str]) -> str:
    whole = ["perf", "stat", "-x,", "-e", EVENT, "--", *command]
    done = subprocess.run(whole, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    return done.stdout


def _perf_value(output: str) -> int:
    return parse_perf(output) or 0
