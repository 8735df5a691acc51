"""How many requests a second N I/O processes and M prepare workers can do: a model, and its fit; pure.

A request passes two stages, each a pool of processes. On a core each the slower stage sets the rate; on one
core that all share the sum of the costs does:

    cost of I/O          =  base(KiB) × apart
    cost of preparation  =  base(KiB) × apart
    rate, a core each    =  min(N / cost of I/O, M / cost of preparation)

    cost on one core     =  base(KiB) × N^io × M^prepare         exponents of its own for each stage
    rate on one core     =  1 / (cost of I/O + cost of preparation + the rest of the tree)

``base`` is what one I/O process and one prepare worker need on one core; between the measured sizes it is
interpolated (a line through all would be wrong: small bodies cost nearly the same, large ones fall out of the
core's cache). The exponents tell what it costs that processes of both kinds push one another off a core:
switches, cold caches, fewer sockets and jobs at each wake-up. ``apart`` is what changes when the two stages
get a core each: no switches, but bodies must move from cache to cache. All are fitted as medians of ratios
between rounds that alternated, so what drifts on a machine falls out.

What it leaves out: memory bandwidth and shared caches, the clock that falls when all cores are busy, the
kernel's locks, the look of each process at one ring for every process of the other stage, and the queueing
that makes latency grow before the rate stops growing (hence `PLANNED`). The exponents are measured where
processes share a core, so with a core each the truth should lie near `Model.rate`, and `Model.crowded_rate`,
which charges the exponents in full, is a bound from below.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import exp, log
from statistics import median
from typing import Final

from bench import BenchError

PLANNED: Final = 0.7  # share of the limit to plan for: beyond it waiting doubles (M/M/1: 1 / (1 - 0.7) = 3.3)
ALONE: Final = (1, 1)


@dataclass(frozen=True, slots=True)
class Sample:
    """CPU microseconds of a request by stage, in one round with so many processes.

    ``pass_number``: rounds of one pass followed one another closely. ``is_apart``: I/O and preparation had
    different cores. ``rest_us``: of the other processes of the tree. ``load_us``: of load generator and
    backend. ``core``: share that the tree had of its core (of its cores). ``strangers``: that others took.
    """

    pass_number: int
    io_processes: int
    prepare_workers: int
    kib: float
    io_us: float
    prepare_us: float
    rest_us: float = 0.0
    load_us: float = 0.0
    per_s: float = 0.0
    core: float = 1.0
    strangers: float = 0.0
    is_apart: bool = False

    @property
    def counts(self) -> tuple[int, int]:
        return self.io_processes, self.prepare_workers


@dataclass(frozen=True, slots=True)
class Stage:
    """``base_us``: (KiB, CPU microseconds) by size, ascending. ``by_io``, ``by_prepare``: the exponents."""

    base_us: tuple[tuple[float, float], ...]
    by_io: float = 0.0
    by_prepare: float = 0.0
    apart: float = 1.0

    def at(self, kib: float) -> float:
        """Alone on a core. Beyond the measured sizes the last slope goes on; below, the first value holds."""
        before = self.base_us[0]
        if kib <= before[0] or len(self.base_us) == 1:
            return before[1]
        for after in self.base_us[1:]:
            slope = (after[1] - before[1]) / (after[0] - before[0])
            if kib <= after[0] or after is self.base_us[-1]:
                return max(before[1] + slope * (kib - before[0]), 0.0)
            before = after
        return before[1]

    def crowded(self, io_processes: int, prepare_workers: int, kib: float) -> float:
        """With so many on one core."""
        factor: float = io_processes**self.by_io * prepare_workers**self.by_prepare
        return self.at(kib) * factor


@dataclass(frozen=True, slots=True)
class Model:
    """Both stages, and what the rest of the tree costs a request."""

    io: Stage
    prepare: Stage
    rest_us: float = 0.0

    def rate(self, io_processes: int, prepare_workers: int, kib: float) -> float:
        """Requests a second at the limit, a core for each process."""
        io_us, prepare_us = self.io.at(kib) * self.io.apart, self.prepare.at(kib) * self.prepare.apart
        return min(io_processes / io_us, prepare_workers / prepare_us) * 1e6

    def crowded_rate(self, io_processes: int, prepare_workers: int, kib: float) -> float:
        """The same, if every process cost the others what it costs them on a shared core."""
        costs = [
            stage.crowded(io_processes, prepare_workers, kib) * stage.apart
            for stage in (self.io, self.prepare)
        ]
        return min(io_processes / costs[0], prepare_workers / costs[1]) * 1e6

    def shared_cost_us(self, io_processes: int, prepare_workers: int, kib: float) -> float:
        """CPU time of one request of the whole tree, all on one core."""
        counts = io_processes, prepare_workers
        return self.io.crowded(*counts, kib) + self.prepare.crowded(*counts, kib) + self.rest_us

    def best_split(self, cores: int, kib: float) -> tuple[int, int]:
        """(I/O processes, prepare workers) that together take ``cores`` and do most."""
        splits = [(io, cores - io) for io in range(1, cores)]
        return max(splits, key=lambda split: self.rate(split[0], split[1], kib))


@dataclass(frozen=True, slots=True)
class Check:
    """A prediction beside what was measured; the fit behind it has not seen the counts it is about."""

    io_processes: int
    prepare_workers: int
    kib: float
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        """+0.2: predicted a fifth too much."""
        return self.predicted / self.measured - 1


def fit(samples: Sequence[Sample]) -> Model:
    """The model. Raises `BenchError` without samples of one I/O process and one prepare worker."""
    shared = [one for one in samples if not one.is_apart]
    if not any(one.counts == ALONE for one in shared):
        raise BenchError("no valid round of one I/O process and one prepare worker: nothing to compare with")
    return Model(
        _stage(samples, lambda one: one.io_us),
        _stage(samples, lambda one: one.prepare_us),
        median(one.rest_us for one in shared),
    )


def checks_shared(samples: Sequence[Sample]) -> list[Check]:
    """Requests a second of one full core for each pair of counts (but 1 + 1), left out of its own fit."""
    shared = [one for one in samples if not one.is_apart]
    found = []
    for counts in sorted({one.counts for one in shared} - {ALONE}):
        model = fit([one for one in shared if one.counts != counts])
        for kib in sorted({one.kib for one in shared if one.counts == counts}):
            costs = []
            for one in (one for one in shared if one.counts == counts and one.kib == kib):
                drift = _drift(shared, one, model)
                costs.append((one.io_us + one.prepare_us + one.rest_us) / drift)
            measured, predicted = median(costs), model.shared_cost_us(*counts, kib)
            found.append(Check(*counts, kib, 1e6 / measured, 1e6 / predicted))
    return found


def checks_apart(samples: Sequence[Sample]) -> list[Check]:
    """One I/O process and one prepare worker with a core each: the law of the slower stage, tried.

    Predicted from rounds on one shared core alone, so with an ``apart`` of 1. Where load generator and
    backend had to use the second core as well, their cost counts to that stage: ``load_us`` is then not
    nought.
    """
    shared = [one for one in samples if not one.is_apart]
    model = fit(shared)
    found = []
    for kib in sorted({one.kib for one in samples if one.is_apart}):
        here = [one for one in samples if one.is_apart and one.kib == kib]
        # what strangers took of the cores cannot be used; what the tree had, and its load, can
        io_us, other_us = model.io.at(kib), model.prepare.at(kib) + median(one.load_us for one in here)
        free = max(0.0, 1 - median(one.strangers for one in here))
        found.append(Check(1, 1, kib, median(one.per_s for one in here), 1e6 * free / max(io_us, other_us)))
    return found


def _stage(samples: Sequence[Sample], cost: Callable[[Sample], float]) -> Stage:
    shared = [one for one in samples if not one.is_apart]
    alone = [one for one in shared if one.counts == ALONE]
    base = [
        (kib, median(cost(one) for one in alone if one.kib == kib))
        for kib in sorted({one.kib for one in alone})
    ]
    if not all(us > 0 for _, us in base):
        raise BenchError(
            "too few requests for the clock's ticks: give longer --seconds, or a quieter machine"
        )
    ratios = _ratios(samples, cost)
    by_io, by_prepare = _exponents({key: ratio for key, ratio in ratios.items() if not key[2]})
    apart = median(found) if (found := [ratio for key, ratio in ratios.items() if key[2]]) else 1.0
    return Stage(tuple(base), by_io, by_prepare, apart)


def _ratios(
    samples: Sequence[Sample], cost: Callable[[Sample], float]
) -> dict[tuple[int, int, bool, float], float]:
    """(N, M, is apart, KiB) → cost ÷ that of one of each in the same pass; the median over passes."""
    alone = {
        (one.pass_number, one.kib): cost(one) for one in samples if one.counts == ALONE and not one.is_apart
    }
    found: dict[tuple[int, int, bool, float], list[float]] = {}
    for one in samples:
        known = alone.get((one.pass_number, one.kib), 0.0)
        if known > 0 and cost(one) > 0 and (one.is_apart or one.counts != ALONE):
            found.setdefault((*one.counts, one.is_apart, one.kib), []).append(cost(one) / known)
    return {key: median(values) for key, values in found.items()}


def _exponents(ratios: Mapping[tuple[int, int, bool, float], float]) -> tuple[float, float]:
    """Least squares of log ratio = a·log N + b·log M; what comes out below nought is nought."""
    rows = [(log(io), log(prepare), log(ratio)) for (io, prepare, _, _), ratio in ratios.items()]
    ii, pp, ip = (sum(row[i] * row[j] for row in rows) for i, j in ((0, 0), (1, 1), (0, 1)))
    iv, pv = (sum(row[i] * row[2] for row in rows) for i in (0, 1))
    determinant = ii * pp - ip * ip
    if determinant > 1e-9:
        a, b = (iv * pp - pv * ip) / determinant, (pv * ii - iv * ip) / determinant
        if a >= 0 and b >= 0:
            return a, b
        if a < 0:
            return 0.0, max(0.0, pv / pp)
        return max(0.0, iv / ii), 0.0
    return (max(0.0, iv / ii) if ii else 0.0), (max(0.0, pv / pp) if pp and not ii else 0.0)


def _drift(shared: Sequence[Sample], one: Sample, model: Model) -> float:
    """How much dearer everything was in the sample's pass than in the median pass."""
    alone = [
        other.io_us + other.prepare_us
        for other in shared
        if other.counts == ALONE and other.kib == one.kib and other.pass_number == one.pass_number
    ]
    usual = model.io.at(one.kib) + model.prepare.at(one.kib)
    return exp(sum(log(each / usual) for each in alone) / len(alone)) if alone else 1.0
