"""Which CPUs each process runs on.

Pure planning over a :class:`CpuTopology` value; only :func:`read_topology` looks at the machine. The rules:

- CPUs are ordered by NUMA node, then core, SMT siblings side by side. Each node is cut in two: the first half
  for I/O, the rest for preparation. A cut that would divide a core moves up, because the controller, the
  supervisor and the leaders live on the I/O CPUs as well; a side is never left empty for that.
- Every I/O process and prepare worker gets one CPU of its list, free cores before second siblings, nodes in
  turn; a prepare group stays within one node because its workers share one copy of a tokenizer.
- Given lists win. What is not given is what they leave over.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Final

from meshd.config.checks import expand_cpu_list
from meshd.errors import StartupError

SYSFS: Final = Path("/sys/devices/system")


@dataclass(frozen=True)
class CpuTopology:
    """For each CPU its core (any number the same for SMT siblings) and its NUMA node."""

    core_of: Mapping[int, int]
    node_of: Mapping[int, int]

    def order(self, cpus: Iterable[int]) -> tuple[int, ...]:
        """Sort by node, then core (by its lowest CPU), then CPU. Unknown CPUs count as cores of node 0."""
        return tuple(sorted(cpus, key=lambda cpu: (self.node(cpu), self.core(cpu), cpu)))

    def core(self, cpu: int) -> int:
        return self.core_of.get(cpu, cpu)

    def node(self, cpu: int) -> int:
        return self.node_of.get(cpu, 0)


@dataclass(frozen=True)
class CpuPlan:
    """``io_pins[i]`` is the CPU of I/O process i, ``prepare_pins[w]`` that of prepare worker w."""

    io_cpus: tuple[int, ...]
    prepare_cpus: tuple[int, ...]
    io_pins: tuple[int, ...]
    prepare_pins: tuple[int, ...]
    groups: tuple[tuple[int, ...], ...]
    warnings: tuple[str, ...] = ()

    @property
    def cpus(self) -> tuple[int, ...]:
        """All CPUs of the node."""
        return tuple(sorted({*self.io_cpus, *self.prepare_cpus}))


def plan_cpus(
    available: Collection[int],
    topology: CpuTopology,
    io_processes: int = 0,
    prepare_workers: int = 0,
    io_cpus: str = "",
    prepare_cpus: str = "",
    group_size: int = 4,
) -> CpuPlan:
    """Decide counts and places; 0 and "" mean "derive". Raises StartupError (exit 2) for impossible lists."""
    io_list = _given("--io-cpus", io_cpus, available)
    prepare_list = _given("--prepare-cpus", prepare_cpus, available)
    both = sorted(set(io_list) & set(prepare_list))
    if both:
        raise StartupError(f"--io-cpus and --prepare-cpus overlap in {format_cpu_list(both)}", 2)
    io_side, prepare_side = _sides(available, topology, io_list, prepare_list)
    half = len(available) // 2
    processes = io_processes or _count(io_list, half, io_side)
    workers = prepare_workers or _count(prepare_list, len(available) - half, prepare_side)
    groups = fill_groups(workers, group_size)
    return CpuPlan(
        io_cpus=io_side,
        prepare_cpus=prepare_side,
        io_pins=_cycle(_spread(io_side, topology), processes),
        prepare_pins=_pin_groups(prepare_side, topology, groups),
        groups=groups,
        warnings=_warnings(io_side, prepare_side, processes, workers),
    )


def _given(flag: str, text: str, available: Collection[int]) -> tuple[int, ...]:
    if not text:
        return ()
    try:
        cpus = expand_cpu_list(text)
    except ValueError as error:
        raise StartupError(f"{flag}: {error}", 2) from error
    missing = sorted(set(cpus) - set(available))
    if missing:
        raise StartupError(
            f"{flag}: CPU {format_cpu_list(missing)} is not available;"
            f" this process may use {format_cpu_list(available)}",
            2,
        )
    return cpus


def _count(given: tuple[int, ...], share: int, side: tuple[int, ...]) -> int:
    """As many processes as a given list has CPUs; else the share of the machine, if that side has room."""
    return len(given) if given else max(1, min(share, len(side)) if side else share)


def _sides(
    available: Collection[int],
    topology: CpuTopology,
    io_list: tuple[int, ...],
    prepare_list: tuple[int, ...],
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    ordered = topology.order(available)
    if io_list or prepare_list:
        rest = tuple(cpu for cpu in ordered if cpu not in io_list and cpu not in prepare_list) or ordered
        return topology.order(io_list) or rest, topology.order(prepare_list) or rest
    io_side: list[int] = []
    prepare_side: list[int] = []
    for node in sorted({topology.node(cpu) for cpu in ordered}):
        of_node = [cpu for cpu in ordered if topology.node(cpu) == node]
        cut = _cut(of_node, topology)
        io_side += of_node[:cut]
        prepare_side += of_node[cut:]
    if len(ordered) > 1 and not io_side:  # single CPUs on several nodes: no node can be cut, but the row can
        middle = _cut(ordered, topology)
        return ordered[:middle], ordered[middle:]
    return tuple(io_side) or ordered, tuple(prepare_side)


def _cut(cpus: Sequence[int], topology: CpuTopology) -> int:
    """Where to cut one node's CPUs: the middle, moved up to the end of a core unless nothing would remain."""
    middle = len(cpus) // 2
    cut = middle
    while 0 < cut < len(cpus) and topology.core(cpus[cut - 1]) == topology.core(cpus[cut]):
        cut += 1
    return middle if cut == len(cpus) else cut


def fill_groups(workers: int, group_size: int) -> tuple[tuple[int, ...], ...]:
    """Spread workers over ceil(workers / group_size) groups whose sizes differ by at most one."""
    count = math.ceil(workers / group_size)
    bounds = [workers * number // count for number in range(count + 1)]
    return tuple(tuple(range(bounds[n], bounds[n + 1])) for n in range(count))


def _spread(cpus: Sequence[int], topology: CpuTopology) -> tuple[int, ...]:
    """Order by preference: first siblings of all cores before second ones, NUMA nodes in turn."""
    seen: dict[int, int] = {}
    lanes: dict[tuple[int, int], list[int]] = {}
    for cpu in cpus:
        core = topology.core(cpu)
        seen[core] = sibling = seen.get(core, -1) + 1
        lanes.setdefault((sibling, topology.node(cpu)), []).append(cpu)
    siblings = sorted({sibling for sibling, _ in lanes})
    ordered: list[int] = []
    for rank in siblings:
        of_rank = [lane for (sibling, _), lane in sorted(lanes.items()) if sibling == rank]
        ordered += [cpu for turn in zip_longest(*of_rank) for cpu in turn if cpu is not None]
    return tuple(ordered)


def _pin_groups(
    cpus: Sequence[int], topology: CpuTopology, groups: tuple[tuple[int, ...], ...]
) -> tuple[int, ...]:
    """Give each group the node with the fewest workers for its CPUs, and each worker that node's next CPU."""
    by_node: dict[int, list[int]] = {}
    for cpu in _spread(cpus, topology):
        by_node.setdefault(topology.node(cpu), []).append(cpu)
    taken = dict.fromkeys(by_node, 0)
    pins: list[int] = []
    for group in groups:
        node = min(by_node, key=lambda n: ((taken[n] + len(group)) / len(by_node[n]), n))
        for _ in group:
            pins.append(by_node[node][taken[node] % len(by_node[node])])
            taken[node] += 1
    return tuple(pins)


def _cycle(cpus: Sequence[int], count: int) -> tuple[int, ...]:
    return tuple(cpus[number % len(cpus)] for number in range(count))


def _warnings(
    io_side: tuple[int, ...], prepare_side: tuple[int, ...], processes: int, workers: int
) -> tuple[str, ...]:
    warnings = []
    shared = sorted(set(io_side) & set(prepare_side))
    if shared:
        warnings.append(f"I/O and preparation share CPU {format_cpu_list(shared)}: too few CPUs to part them")
    if processes > len(io_side):
        warnings.append(f"{processes} I/O processes share {len(io_side)} CPUs")
    if workers > len(prepare_side):
        warnings.append(f"{workers} prepare workers share {len(prepare_side)} CPUs")
    return tuple(warnings)


def cap_by_quota(
    affinity: Collection[int], quota: float | None, topology: CpuTopology, rotation: int = 0
) -> tuple[int, ...]:
    """Return the available CPUs: the affinity, cut to ceil(quota) of them, core by core.

    Nothing says which CPUs a quota means. ``rotation`` starts the choice at another core, so that several
    instances with a quota on one host do not all crowd onto its first cores.
    """
    ordered = topology.order(affinity)
    budget = len(ordered) if quota is None else max(1, math.ceil(quota))
    if budget >= len(ordered):
        return ordered
    cores: dict[int, list[int]] = {}
    for cpu in ordered:
        cores.setdefault(topology.core(cpu), []).append(cpu)
    runs = list(cores.values())
    start = rotation % len(runs)
    rotated = [cpu for run in runs[start:] + runs[:start] for cpu in run]
    return topology.order(rotated[:budget])


def format_cpu_list(cpus: Iterable[int]) -> str:
    """Write CPUs as ``0-7,16``."""
    parts: list[str] = []
    run: list[int] = []
    for cpu in [*sorted(set(cpus)), None]:
        if run and (cpu is None or cpu != run[-1] + 1):
            parts.append(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}")
            run = []
        if cpu is not None:
            run.append(cpu)
    return ",".join(parts)


def read_topology(cpus: Iterable[int], sysfs: Path = SYSFS) -> CpuTopology:
    """Read cores and nodes from sysfs. What is missing there (some sandboxes) counts as cores of one node."""
    core_of: dict[int, int] = {}
    node_of: dict[int, int] = {}
    for cpu in cpus:
        siblings = _read(sysfs / f"cpu/cpu{cpu}/topology/thread_siblings_list")
        core_of[cpu] = expand_cpu_list(siblings)[0] if siblings else cpu
    for directory in sysfs.glob("node/node[0-9]*"):
        listed = _read(directory / "cpulist")
        for cpu in expand_cpu_list(listed) if listed else ():
            node_of[cpu] = int(directory.name.removeprefix("node"))
    return CpuTopology(core_of, node_of)


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""
