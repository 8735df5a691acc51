"""With ``MESHD_COMPILE=1`` the hot modules become one C extension (mypyc); else meshd stays pure Python.

`make compiled` is the way to build it; docs/decisions/0005-optional-compiled-build.md tells the reasons.
Nothing but this file reads the variable, and the sources are the same for both.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import sysconfig
from pathlib import Path
from typing import Final

from setuptools import Extension, setup

# What a request passes through. All of it in one unit: a call into a module of another unit, or of no unit,
# costs what it costs in Python, so that half of the modules bring far less than half of the gain.
HOT: Final = (
    "errors.py",
    "config/errors.py",  # a subclass of a compiled class has to be compiled as well
    "slab.py",
    "strand.py",
    "director.py",
    "metrics/cells.py",
    "admission/*.py",
    "routing/*.py",
    "routing/policies/*.py",
    "api/*.py",
    "prepare/build.py",
    "prepare/chat_messages.py",
    "prepare/client.py",
    "prepare/codec.py",
    "prepare/conversation_cache.py",
    "prepare/crosscheck.py",
    "prepare/dispatch.py",
    "prepare/job.py",
    "prepare/lane.py",
    "prepare/layout.py",
    "prepare/memory_bound.py",
    "prepare/pool_health.py",
    "prepare/prefix_tokens.py",
    "prepare/quarantine.py",
    "prepare/ring.py",
    "prepare/run_job.py",
    "prepare/stage_counts.py",
    "prepare/stopwatch.py",
    "prepare/tokenize.py",
    "prepare/tokenizer_set.py",
    "prepare/worker.py",
    "io/*.py",
)
# `python -m` runs sources only; packages hold nothing but a docstring. asyncio.Transport has a field, and
# mypyc would put its table of methods in the same place (tests/test_setup.py finds such classes). Spans are
# exported by a thread, with a library that need not be there. The rest runs now and then, never for a request
# that is placed; left alone, it takes the stand-ins of its tests.
LEFT_OUT: Final = frozenset(
    {
        "process.py",
        "__init__.py",
        "tls_transport.py",
        "span_export.py",
        "assembly.py",
        "departure.py",
        "drain.py",
        "explain.py",
        "gauges.py",
    }
)
_TELLS_ONLY: Final = frozenset({"egg_info", "dist_info"})  # pip asks for these before it builds


def main() -> None:
    """Build whatever setuptools was asked for."""
    compiles = os.environ.get("MESHD_COMPILE") == "1" and _TELLS_ONLY.isdisjoint(sys.argv)
    setup(ext_modules=_extensions() if compiles else [])


def _extensions() -> list[Extension]:
    _require_compiler()
    try:
        from mypyc.build import mypycify
    except ImportError:
        sys.exit(
            "MESHD_COMPILE=1 needs mypy beside setuptools: pip install mypy 'setuptools>=77', "
            "then pip install --no-build-isolation . (make compiled does it all)"
        )
    extensions: list[Extension] = mypycify(
        modules(Path()), group_name="meshd", opt_level="3", debug_level="0"
    )
    return extensions


def _require_compiler() -> None:
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")[0]
    if shutil.which(compiler) is None:
        sys.exit(f"MESHD_COMPILE=1 needs a C compiler: {compiler} is not installed (apt-get install gcc)")
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        sys.exit("MESHD_COMPILE=1 needs the headers of this Python (apt-get install python3-dev)")


def modules(root: Path) -> list[str]:
    """Return the paths of the modules to compile, relative to the root of the project."""
    found = (path for pattern in HOT for path in (root / "meshd").glob(pattern))
    return sorted(str(path.relative_to(root)) for path in found if path.name not in LEFT_OUT)


if __name__ == "__main__":
    main()
