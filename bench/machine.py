"""The machine: which CPUs to use, which programs are there, and what to write beside every result."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bench import BenchError

PACKAGES: Final = ("meshd", "uvloop", "httptools", "orjson", "fastapi", "uvicorn", "aiohttp", "tokenizers")
VERSION_FLAGS: Final = {"wrk": "-v", "nginx": "-v", "haproxy": "-v"}


@dataclass(frozen=True, slots=True)
class Cpus:
    """``front``: the front end's core. ``rest``: the core of backend and load generator."""

    front: int
    rest: int


def choose_cpus(wanted: str = "") -> Cpus:
    """``"A,B"``, or else the first and the last CPU that this process may use."""
    available = sorted(os.sched_getaffinity(0))
    if wanted:
        front, _, rest = wanted.partition(",")
        if not (
            front.isdigit() and rest.isdigit() and {int(front), int(rest)} <= set(available) and front != rest
        ):
            raise BenchError(
                f"--cpus wants two different CPUs of {available}, such as {available[0]},{available[-1]}"
            )
        return Cpus(int(front), int(rest))
    if len(available) < 2:
        raise BenchError("two CPUs are needed: one for the front end, one for backend and load generator")
    return Cpus(available[0], available[-1])


def pinned(cpu: int, command: list[str]) -> list[str]:
    """The command, held to one CPU with all its children."""
    return ["taskset", "--cpu-list", str(cpu), *command]


def missing(programs: Iterable[str]) -> list[str]:
    """Those programs that are not installed."""
    return [program for program in programs if find_program(program) is None]


def require(programs: Iterable[str], made_by: str = "") -> None:
    """Raise unless all programs are there; the message tells how to get them: ``made_by``, or on Debian."""
    absent = missing(programs)
    if absent and made_by:
        raise BenchError(f"not there: {', '.join(absent)}; run {made_by}")
    if absent:
        packages = {"cc": "gcc libc6-dev", "taskset": "util-linux"}
        names = " ".join(packages.get(program, program) for program in absent)
        raise BenchError(f"not installed: {', '.join(absent)}. On Debian: apt-get install {names}")


def find_program(name: str) -> str | None:
    """Where a program is; nginx and haproxy live in /usr/sbin, which a user's PATH may lack."""
    return shutil.which(name) or shutil.which(name, path="/usr/sbin:/usr/local/sbin:/sbin")


def free_port() -> int:
    """A TCP port of 127.0.0.1 that was free a moment ago."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def describe(cpus: Cpus) -> dict[str, Any]:
    """What a reader needs to judge the numbers: hardware, kernel, versions, and who else was busy."""
    return {
        "cpu": _cpu_model(),
        "cpus_online": os.cpu_count(),
        "cpu_front_end": cpus.front,
        "cpu_backend_and_load": cpus.rest,
        "kernel": platform.release(),
        "python": sys.version.split()[0],
        "load_average": os.getloadavg(),
        "packages": {name: version for name in PACKAGES if (version := _package(name))},
        "programs": {
            name: _first_line(name, flag) for name, flag in VERSION_FLAGS.items() if find_program(name)
        },
    }


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _package(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _first_line(program: str, flag: str) -> str:
    command = [find_program(program) or program, flag]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    return done.stdout.partition("\n")[0].strip()
