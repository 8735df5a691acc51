"""How many requests a second N I/O processes and M prepare workers can do: a model, and its fit; pure.

A request passes two stages, each a pool of processes with a core of its own:

    cost of a stage  =  base  +  per_peer × (processes of the other stage)  +  per_kib × (KiB of the body)
    rate             =  min(N / cost of I/O, M / cost of preparation)
    on fewer cores   =  min(that, cores / (cost of I/O + cost of preparation))

``per_peer`` is there because each I/O process looks at one completion ring for each prepare worker, and each
worker at one submission ring for each I/O process. Measured on a core that all share, it also holds what the
sharing costs (switches, colder caches), which processes with cores of their own do not pay: the truth lies
between `Model` and `Model.with_free_peers`. What the model leaves out: memory bandwidth and shared
caches, the clock that falls when all cores are busy, the kernel's own locks, and the queueing that makes
latency grow before the rate stops growing (hence the share of ``PLANNED``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

PLANNED: Final = 0.7  # share of the limit to plan for: beyond it waiting doubles (M/M/1: 1 / (1 - 0.7) = 3.3)


@dataclass(frozen=True, slots=True)
class Sample:
    """CPU microseconds of a request by stage, as measured with so many processes.

    ``rate``: requests/s for each core's worth of CPU time that the whole tree used, so of one full core.
    ``per_s``: requests/s as they were.
    """

    io_processes: int
    prepare_workers: int
    kib: float
    io_us: float
    prepare_us: float
    rate: float = 0.0
    per_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Stage:
    """Costs in CPU microseconds."""

    base: float
    per_peer: float
    per_kib: float

    def cost_us(self, peers: int, kib: float) -> float:
        return self.base + self.per_peer * peers + self.per_kib * kib

    def with_free_peers(self) -> Stage:
        return Stage(self.base + self.per_peer, 0.0, self.per_kib)


@dataclass(frozen=True, slots=True)
class Model:
    """Both stages."""

    io: Stage
    prepare: Stage

    def rate(self, io_processes: int, prepare_workers: int, kib: float, cores: int | None = None) -> float:
        """Requests a second at the limit. ``cores``: fewer than there are processes; None: one each."""
        io_us = self.io.cost_us(prepare_workers, kib)
        prepare_us = self.prepare.cost_us(io_processes, kib)
        limit = min(io_processes / io_us, prepare_workers / prepare_us)
        if cores is not None and cores < io_processes + prepare_workers:
            limit = min(limit, cores / (io_us + prepare_us))
        return limit * 1e6

    def with_free_peers(self) -> Model:
        """The same, where a peer beyond the first costs nothing: all `per_peer` was one core being shared."""
        return Model(self.io.with_free_peers(), self.prepare.with_free_peers())

    def best_split(self, cores: int, kib: float) -> tuple[int, int]:
        """(I/O processes, prepare workers) that together take ``cores`` and do most."""
        splits = [(io, cores - io) for io in range(1, cores)]
        return max(splits, key=lambda split: self.rate(split[0], split[1], kib))


def fit(samples: Sequence[Sample]) -> Model:
    """Least squares for each stage. A term that the samples cannot tell apart (no variation) is nought."""
    io = _fit_stage([(one.prepare_workers, one.kib, one.io_us) for one in samples])
    prepare = _fit_stage([(one.io_processes, one.kib, one.prepare_us) for one in samples])
    return Model(io, prepare)


def errors_left_out(samples: Sequence[Sample]) -> list[tuple[Sample, float]]:
    """(sample, predicted ÷ measured rate on one core), each by a fit that has not seen the sample."""
    found = []
    for at, one in enumerate(samples):
        others = [*samples[:at], *samples[at + 1 :]]
        if one.rate > 0 and len(others) >= 3:
            predicted = fit(others).rate(one.io_processes, one.prepare_workers, one.kib, cores=1)
            found.append((one, predicted / one.rate))
    return found


def _fit_stage(rows: Sequence[tuple[int, float, float]]) -> Stage:
    """Costs are not below nought: a slope that noise made negative is dropped, and the rest fitted again."""
    columns = [name for at, name in enumerate(("per_peer", "per_kib")) if len({row[at] for row in rows}) > 1]
    while True:
        picked = [[1.0, *(row[("per_peer", "per_kib").index(name)] for name in columns)] for row in rows]
        solved = solve_least_squares(picked, [row[2] for row in rows])
        slopes = dict(zip(columns, solved[1:], strict=True))
        negative = [name for name, slope in slopes.items() if slope < 0]
        if not negative and solved[0] < 0:  # a slope that noise made too steep; the peers' is the shakier one
            negative = columns[:1]
        if not negative:
            return Stage(solved[0], slopes.get("per_peer", 0.0), slopes.get("per_kib", 0.0))
        columns = [name for name in columns if name not in negative]


def solve_least_squares(rows: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    """x of least ‖rows·x − values‖ by normal equations; fine for three columns. Raises ZeroDivisionError
    when columns depend on one another."""
    width = len(rows[0])
    table = [
        [sum(row[i] * row[j] for row in rows) for j in range(width)]
        + [sum(row[i] * value for row, value in zip(rows, values, strict=True))]
        for i in range(width)
    ]
    for at in range(width):
        pivot = max(range(at, width), key=lambda i: abs(table[i][at]))
        table[at], table[pivot] = table[pivot], table[at]
        for i in range(width):
            if i != at:
                factor = table[i][at] / table[at][at]
                table[i] = [left - factor * right for left, right in zip(table[i], table[at], strict=True)]
    return [table[i][width] / table[i][i] for i in range(width)]
