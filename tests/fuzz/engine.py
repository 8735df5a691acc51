"""Run one fuzz target: seeded, timed, and every input that ever failed is kept and replayed first.

A `Target` is a strategy for bytes and a `check` of them that raises when an invariant does not hold.
How bytes are cut into pieces follows from the bytes themselves (`cuts`), so one file is a whole test case.

    python -m tests.fuzz.request_head --seconds 60 [--seed N]
"""

from __future__ import annotations

import argparse
import hashlib
import random
import signal
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

CORPUS = Path(__file__).parents[1] / "corpus" / "fuzz"
BATCH = 1000  # examples for one hypothesis run: its own bookkeeping grows with their number
HANG_SECS = 10


@dataclass(frozen=True)
class Target:
    """``name``: of the module and of its corpus directory."""

    name: str
    inputs: st.SearchStrategy[bytes]
    check: Callable[[bytes], None]

    def kept(self) -> list[Path]:
        """Return the inputs that failed once, and others worth replaying."""
        return sorted((CORPUS / self.name).glob("*.bin"))

    def keep(self, data: bytes) -> Path:
        path = CORPUS / self.name / f"{hashlib.sha256(data).hexdigest()[:16]}.bin"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return path

    def replay(self) -> int:
        """Check all kept inputs; return how many there are."""
        paths = self.kept()
        for path in paths:
            self.check(path.read_bytes())
        return len(paths)

    def run(self, number: int, examples: int, shrinks: bool = True) -> None:
        """Check ``examples`` inputs made from seed ``number``; the smallest that fails is kept."""
        failing: list[bytes] = []

        @seed(number)
        @settings(
            max_examples=examples,
            deadline=None,
            database=None,
            phases=(Phase.generate, Phase.shrink) if shrinks else (Phase.generate,),
            suppress_health_check=list(HealthCheck),
        )
        @given(self.inputs)
        def one(data: bytes) -> None:
            try:
                self.check(data)
            except BaseException:
                failing.append(data)
                raise

        try:
            one()
        except BaseException:
            if failing:
                print(f"kept {self.keep(min(failing, key=len))}", file=sys.stderr)
            raise


def main(target: Target) -> None:
    """The command line of a target: fuzz for so many seconds."""
    parser = argparse.ArgumentParser(prog=f"python -m tests.fuzz.{target.name}")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    options = parser.parse_args()
    print(f"{target.name}: seed {options.seed}, {target.replay()} kept inputs replayed", flush=True)
    signal.signal(signal.SIGALRM, _hang)
    end = time.monotonic() + options.seconds
    batches = 0
    while time.monotonic() < end:
        signal.alarm(HANG_SECS * 6)
        target.run(options.seed + batches, BATCH)
        batches += 1
    signal.alarm(0)
    print(f"{target.name}: {batches * BATCH} inputs, no failure")


def _hang(_number: int, _frame: FrameType | None) -> None:
    raise TimeoutError("an input, or a batch of them, took far too long")


def cuts(data: bytes, ways: int = 4) -> Iterator[list[bytes]]:
    """Give some ways to cut ``data``: byte by byte, in two at a few places, and in random pieces."""
    yield [data[i : i + 1] for i in range(len(data))]
    rng = random.Random(zlib.crc32(data))
    for _ in range(ways):
        at = rng.randint(0, len(data))
        yield [piece for piece in (data[:at], data[at:]) if piece]
    pieces, at = [], 0
    while at < len(data):
        step = rng.choice((1, 1, 2, 3, 7, 20, 100))
        pieces.append(data[at : at + step])
        at += step
    yield pieces


@st.composite
def mutated(draw: st.DrawFn, base: st.SearchStrategy[bytes], words: list[bytes]) -> bytes:
    """Take an input of ``base`` and damage it a few times, mostly with ``words`` that mean something."""
    data = draw(base)
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(data)))
        length = draw(st.integers(0, 6))
        kind = draw(st.integers(0, 4))
        word = draw(st.one_of(st.sampled_from(words), st.binary(min_size=1, max_size=3)))
        if kind == 0:
            data = data[:at] + word + data[at:]
        elif kind == 1:
            data = data[:at] + word + data[at + length :]
        elif kind == 2:
            data = data[:at] + data[at + length :]
        elif kind == 3:
            data = data[:at] + data[at : at + 4 * length] * 2 + data[at + 4 * length :]
        else:
            data = data[:at] if draw(st.booleans()) else data[at:]
    return data
