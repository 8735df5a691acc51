"""The machine: which programs are there, and what to write beside every result."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import socket
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from bench import BenchError
from bench.cpu_sets import Cpus

PACKAGES: Final = ("meshd", "uvloop", "httptools", "orjson", "fastapi", "uvicorn", "aiohttp", "tokenizers")
PINS: Final = Path(__file__).parent / "baseline" / "requirements.txt"
VERSION_FLAGS: Final = {"wrk": "-v", "nginx": "-v", "haproxy": "-v"}


def pinned(cpus: Iterable[int], command: list[str]) -> list[str]:
    """The command, held to these CPUs with all its children."""
    return ["taskset", "--cpu-list", ",".join(map(str, sorted(cpus))), *command]


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


def find_program(name: str, directory: str | None = None) -> str | None:
    """Where a program is; nginx and haproxy live in /usr/sbin, which a user's PATH may lack."""
    if directory is not None:
        return shutil.which(name, path=directory)
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
        "date": time.strftime("%Y-%m-%d"),
        "cpu": _cpu_model(),
        "is_virtual": " hypervisor" in Path("/proc/cpuinfo").read_text(),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / (1 << 30)),
        "cpus_online": os.cpu_count(),
        "cpus_front_end": list(cpus.front),
        "cpus_backend": list(cpus.backend),
        "cpus_load": list(cpus.load),
        "kernel": platform.release(),
        "python": _interpreter(),
        "revision": _revision(),
        "load_average": os.getloadavg(),
        "not_as_pinned": differing_from_pins(),
        "packages": {name: version for name in PACKAGES if (version := _package(name))},
        "programs": {
            name: _first_line(name, flag) for name, flag in VERSION_FLAGS.items() if find_program(name)
        },
    }


def parse_pins(text: str) -> dict[str, str]:
    """name → version of the lines ``name==version`` of a requirements file."""
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    return {name: version for line in lines if line for name, _, version in [line.partition("==")]}


def differing_from_pins() -> dict[str, str]:
    """The packages of the baseline whose installed version is not the pinned one: name → the pinned one."""
    pins = parse_pins(PINS.read_text())
    return {name: version for name, version in pins.items() if _package(name) != version}


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _interpreter() -> str:
    """Version and make of this Python: built otherwise, the same version differs by a fifth."""
    is_shared = "libpython" in Path("/proc/self/maps").read_text()
    kind = "with a shared libpython" if is_shared else "in one executable"
    return (
        f"{platform.python_version()} of {platform.python_build()[1]}, {platform.python_compiler()}, {kind}"
    )


def _revision() -> str | None:
    """The commit of the checkout, ``+`` where files differ from it; None outside a checkout."""
    git = ["git", "-C", str(Path(__file__).parents[1])]
    try:
        found = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True)
        changed = subprocess.run([*git, "status", "--porcelain", "meshd", "bench"], capture_output=True)
    except FileNotFoundError:
        return None
    return found.stdout.strip() + ("+" if changed.stdout else "") if found.returncode == 0 else None


def _package(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _first_line(program: str, flag: str) -> str:
    command = [find_program(program) or program, flag]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    return done.stdout.partition("\n")[0].strip()
