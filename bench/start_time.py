"""How long meshd takes from exec to ready, with a tokenizer, four I/O processes and four prepare workers.

Ready is when /readiness has answered 200 *and* the supervisor has said that every process is up; the later of
the two counts. All CPUs of the machine may be used, as after a boot; files are in the page cache and modules
in bytecode, as an installation has them, which the first, uncounted start sees to. A completion must then
succeed at once, else the start counts for nothing.
"""

from __future__ import annotations

import http.client
import os
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Final

from bench import BenchError
from bench.backend import Backend
from bench.front_end import FrontEnd, Site
from bench.launch import PROBE, end_tree
from bench.machine import free_port

PROCESSES: Final = 4
ENTRIES: Final = 150_000
POLL_S: Final = 0.01
LIMIT_S: Final = 60.0
READY_LINE: Final = b'"event":"ready"'
FLAGS: Final = (
    *("--io-processes", str(PROCESSES), "--prepare-workers", str(PROCESSES)),
    *("--log-level", "info", "--json-log"),
)


def time_start(front_end: FrontEnd, tokenizer: Path, backend: Backend) -> float:
    """Seconds of one start; the node is ended. Raises `BenchError` with the end of its log when it failed."""
    with tempfile.TemporaryDirectory(prefix="meshd-start-", ignore_cleanup_errors=True) as name:
        directory = Path(name)
        port, log_path = free_port(), directory / "log"
        site = Site(directory, port, free_port(), backend.urls, "prefix_hash", tokenizer, FLAGS)
        command = front_end.command(site)
        with log_path.open("wb") as log:
            began_s = time.monotonic()
            process = subprocess.Popen(
                command, stdout=log, stderr=log, start_new_session=True, env=_environment()
            )
        try:
            ready_s = _wait_until_ready(process, port, log_path, began_s)
            if (status := _ask(port, "POST", "/v1/completions", PROBE)) != 200:
                raise BenchError(f"{front_end.name} was ready, yet answered {status}")
            return ready_s - began_s
        finally:
            end_tree(process)


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def _wait_until_ready(process: subprocess.Popen[bytes], port: int, log_path: Path, began_s: float) -> float:
    is_ready = False
    while process.poll() is None and time.monotonic() - began_s < LIMIT_S:
        is_ready = is_ready or _ask(port, "GET", "/readiness") == 200
        if is_ready and READY_LINE in log_path.read_bytes():
            return time.monotonic()
        time.sleep(POLL_S)
    tail = log_path.read_bytes()[-2000:].decode(errors="replace")
    raise BenchError(f"meshd was not ready after {time.monotonic() - began_s:.0f} s\n{tail}")


def _ask(port: int, method: str, path: str, body: bytes = b"") -> int:
    """The status; 0 while nobody answers."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT_S)
    try:
        connection.request(method, path, body, {"content-type": "application/json"})
        answer = connection.getresponse()
        answer.read()
        return answer.status
    except (OSError, http.client.HTTPException):
        return 0
    finally:
        connection.close()
