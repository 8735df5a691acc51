"""Which CPUs front end, backends and load generator get: disjoint sets, as far as the machine has them.

Of each physical core only one thread is used where there are enough cores, because a busy SMT sibling takes
up to half of a core's speed. Three cores make three sets; with two, backend and load generator share one.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench import BenchError

SIBLINGS: Final = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"


@dataclass(frozen=True, slots=True)
class Cpus:
    """The CPUs of the front end, of the backends (one process on each), and of the load generator."""

    front: tuple[int, ...]
    backend: tuple[int, ...]
    load: tuple[int, ...]

    @property
    def are_backend_and_load_apart(self) -> bool:
        return not set(self.backend) & set(self.load)

    @property
    def is_front_alone(self) -> bool:
        return not set(self.front) & {*self.backend, *self.load}


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """``0-3,8`` as a tuple; raises ValueError."""
    found: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return tuple(dict.fromkeys(found))


def one_thread_a_core(available: Sequence[int], siblings: Iterable[Sequence[int]]) -> list[int]:
    """The first available CPU of every core, ascending. ``siblings``: the threads of each core."""
    allowed, seen, found = set(available), set(), []
    groups = {cpu: tuple(group) for group in siblings for cpu in group}
    for cpu in sorted(allowed):
        group = groups.get(cpu, (cpu,))
        if group not in seen:
            seen.add(group)
            found.append(cpu)
    return found


def share_out(available: Sequence[int], cores: Sequence[int], front: int) -> Cpus:
    """Give ``front`` CPUs to the front end; of the rest, a third to backends, at least one.

    ``cores``: one CPU of each core; they are used alone if they suffice. Raises `BenchError` when there are
    fewer than ``front`` + 1 CPUs. A load generator needs about twice what a backend does.
    """
    chosen = list(cores) if len(cores) >= front + 2 else list(available)
    if len(chosen) <= front:
        raise BenchError(
            f"{front + 1} CPUs are needed: {front} for the front end, one for backend and load generator; "
            f"there are {len(chosen)}"
        )
    # the first CPU gets most interrupts on many machines, but with two CPUs one cannot be choosy
    rest = chosen[front:]
    if len(rest) == 1:
        return Cpus(tuple(chosen[:front]), tuple(rest), tuple(rest))
    wanted = min(len(rest), 3 * front)  # more would only heat the machine
    backends = max(1, wanted // 3)
    return Cpus(tuple(chosen[:front]), tuple(rest[:backends]), tuple(rest[backends : max(wanted, 2)]))


def parse_cpus(text: str, available: Sequence[int]) -> Cpus:
    """``FRONT/BACKEND/LOAD`` or ``FRONT/REST`` of CPU lists, or the short ``A,B`` for ``A/B``."""
    parts = text.split("/") if "/" in text else text.split(",")
    try:
        sets = [parse_cpu_list(part) for part in parts]
    except ValueError:
        sets = []
    if len(sets) not in (2, 3) or not {cpu for each in sets for cpu in each} <= set(available):
        raise BenchError(f"--cpus wants FRONT/BACKEND/LOAD or FRONT/REST of the CPUs {list(available)}")
    cpus = Cpus(sets[0], sets[1], sets[-1])
    if not cpus.is_front_alone:
        raise BenchError("--cpus wants different CPUs for the front end and for the rest")
    return cpus


def choose_cpus(wanted: str = "", front: int = 1) -> Cpus:
    """The wanted sets, or else a choice among the CPUs that this process may use."""
    available = sorted(os.sched_getaffinity(0))
    if wanted:
        return parse_cpus(wanted, available)
    return share_out(available, one_thread_a_core(available, map(_siblings, available)), front)


def two_front_cores(cpus: Cpus) -> Cpus:
    """CPUs for a front end with one core for I/O and one for preparation.

    Where there are too few, preparation gets the CPU of backend and load generator as well.
    """
    if len(cpus.front) >= 2:
        return Cpus(cpus.front[:2], cpus.backend, cpus.load)
    used = {*cpus.front, *cpus.backend, *cpus.load}
    spare = sorted(os.sched_getaffinity(0) - used)
    second = spare[0] if spare else cpus.load[-1]
    return Cpus((cpus.front[0], second), cpus.backend, cpus.load)


def _siblings(cpu: int) -> tuple[int, ...]:
    try:
        return parse_cpu_list(Path(SIBLINGS.format(cpu)).read_text())
    except FileNotFoundError:
        return (cpu,)
