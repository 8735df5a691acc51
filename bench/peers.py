"""Other routers for inference servers: where their programs are, and how each is started.

They come from PyPI, each into a virtual environment of its own (two of them install programs of one name),
whose ``bin`` directories go onto PATH or behind ``--peer-path``:

    for name in vllm-router smg sglang-router; do
        python -m venv peers/$name && peers/$name/bin/pip install $name
    done
    python -m bench table --peer-path peers/*/bin

They are given no tokenizer. Where a workload asks for ``prefix_hash``, each runs the policy of its own that
looks at the beginning of the text, and the report says so (vllm-router was seen to ask its upstream twice to
render each prompt first; the backend here answers 404, as a server without that route does). All three parse
the body and write it anew, so the backend receives more bytes than the client has sent. Logging is turned
down to warnings, and health checks are off where there is a switch for it; all else is as it comes.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from bench.front_end import FrontEnd, Site
from bench.machine import find_program

ASK_VERSION: Final = "import importlib.metadata, sys; print(importlib.metadata.version(sys.argv[1]))"


def add_to_path(directories: Sequence[Path]) -> None:
    """Let programs of these directories be found before others of their names, by us and by our children.

    Behind the rest of PATH: such a directory also holds a ``python``.
    """
    os.environ["PATH"] = os.pathsep.join(
        [os.environ.get("PATH", ""), *map(str, map(Path.resolve, directories))]
    )


def find_peer(program: str, distribution: str) -> tuple[str, str] | None:
    """(path, version) of the first program of that name on PATH which belongs to the distribution."""
    for directory in os.environ.get("PATH", "").split(os.pathsep):
        path = find_program(program, directory)
        if path and (version := _version_of(Path(path), distribution)):
            return path, version
    return None


def parse_interpreter(first_line: str) -> str | None:
    """The Python that a console script names in its first line."""
    words = first_line.removeprefix("#!").split()
    return words[0] if first_line.startswith("#!") and words and "python" in words[0] else None


def _version_of(script: Path, distribution: str) -> str | None:
    with script.open("rb") as file:
        interpreter = parse_interpreter(file.readline(512).decode(errors="replace"))
    if interpreter is None:
        return None
    done = subprocess.run(
        [interpreter, "-c", ASK_VERSION, distribution], capture_output=True, text=True, check=False
    )
    return done.stdout.strip() if done.returncode == 0 else None


def _start(front_end: str, site: Site, subcommand: Sequence[str], more: Sequence[str]) -> list[str]:
    peer = next(one for one in PEERS if one.name == front_end)
    found = find_peer(peer.programs[0], peer.distribution)
    command = [found[0] if found else peer.programs[0], *subcommand]
    command += ["--host", "127.0.0.1", "--port", str(site.port), "--worker-urls", *site.upstreams]
    command += ["--policy", peer.policies[site.policy]]
    return [*command, "--prometheus-host", "127.0.0.1", "--prometheus-port", str(site.metrics_port), *more]


def _vllm_router(site: Site) -> list[str]:
    # it has no switch against health checks: one a minute
    return _start("vllm-router", site, (), ("--log-level", "warning"))


def _smg(site: Site) -> list[str]:
    return _start("smg", site, ("launch",), ("--log-level", "warn", "--disable-health-check"))


def _sglang_router(site: Site) -> list[str]:
    return _start("sglang-router", site, ("launch",), ("--log-level", "warn", "--disable-health-check"))


COMMON: Final = {policy: policy for policy in ("random", "round_robin", "power_of_two", "cache_aware")}
PEERS: Final = (
    FrontEnd(
        name="vllm-router",
        what="Rust",
        programs=("vllm-router",),
        policies={**COMMON, "prefix_hash": "cache_aware"},
        command=_vllm_router,
        made_by="pip install vllm-router, into an environment of its own",
        distribution="vllm-router",
        rewrites_bodies=True,
    ),
    FrontEnd(
        name="smg",
        what="Rust",
        programs=("smg",),
        policies={**COMMON, "least_load": "least_load", "prefix_hash": "prefix_hash"},
        command=_smg,
        made_by="pip install smg, into an environment of its own",
        distribution="smg",
        rewrites_bodies=True,
    ),
    FrontEnd(
        name="sglang-router",
        what="Rust",
        programs=("sglang-router",),
        policies={**COMMON, "prefix_hash": "cache_aware"},
        command=_sglang_router,
        made_by="pip install sglang-router, into an environment of its own",
        distribution="sglang-router",
        rewrites_bodies=True,
    ),
)


def peer_versions() -> dict[str, str]:
    """The version of each peer that is installed."""
    found = {}
    for one in PEERS:
        if peer := find_peer(one.programs[0], one.distribution):
            found[one.name] = peer[1]
    return found
