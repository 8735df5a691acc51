"""The scaling model, its fit, and its advice."""

from __future__ import annotations

from random import Random

import pytest

from bench.rounds import Round
from bench.scaling import advice, checked, sample_from
from bench.scaling_model import Model, Sample, Stage, errors_left_out, fit, solve_least_squares

TRUE = Model(io=Stage(100.0, 2.0, 3.0), prepare=Stage(20.0, 1.0, 5.0))
GRID = [(io, prepare, kib) for io, prepare in ((1, 1), (1, 2), (2, 1), (2, 4)) for kib in (1.0, 16.0, 64.0)]


def samples(noise: float = 0.0) -> list[Sample]:
    random = Random(7)
    found = []
    for io, prepare, kib in GRID:
        io_us = TRUE.io.cost_us(prepare, kib) * (1 + noise * random.uniform(-1, 1))
        prepare_us = TRUE.prepare.cost_us(io, kib) * (1 + noise * random.uniform(-1, 1))
        found.append(Sample(io, prepare, kib, io_us, prepare_us, rate=1e6 / (io_us + prepare_us)))
    return found


def test_fit_finds_the_costs_that_made_the_samples() -> None:
    found = fit(samples())
    for mine, true in ((found.io, TRUE.io), (found.prepare, TRUE.prepare)):
        assert (mine.base, mine.per_peer, mine.per_kib) == pytest.approx(
            (true.base, true.per_peer, true.per_kib)
        )


def test_fit_of_noisy_samples_predicts_within_the_noise() -> None:
    assert all(0.8 < ratio < 1.25 for _, ratio in errors_left_out(samples(noise=0.1)))
    assert len(errors_left_out(samples())) == len(GRID)


def test_prediction_of_a_sample_does_not_come_from_the_sample() -> None:
    wrong = [*samples()[:-1], Sample(2, 4, 64.0, 3000.0, 3400.0, rate=1e6 / 6400)]
    assert errors_left_out(wrong)[-1][1] > 5


def test_a_term_that_did_not_vary_is_nought() -> None:
    found = fit([one for one in samples() if (one.io_processes, one.prepare_workers) == (1, 1)])
    assert found.io.per_peer == found.prepare.per_peer == 0.0
    assert found.io.cost_us(1, 16.0) == pytest.approx(TRUE.io.cost_us(1, 16.0))


def test_a_cost_is_never_below_nought() -> None:
    falling = [Sample(1, peers, 1.0, 100.0 - 10 * peers, 20.0) for peers in (1, 2, 3)]
    assert fit(falling).io == Stage(pytest.approx(80.0), 0.0, 0.0)


def test_a_slope_too_steep_for_its_base_is_dropped() -> None:
    steep = [Sample(1, peers, kib, 10.0 * peers**3 + kib, 20.0) for peers in (1, 2, 3) for kib in (1.0, 2.0)]
    found = fit(steep).io
    assert found.base >= 0 and found.per_peer == 0.0 and found.per_kib == pytest.approx(1.0)


def test_the_slower_stage_limits_the_rate() -> None:
    model = Model(Stage(100.0, 0.0, 0.0), Stage(50.0, 0.0, 0.0))
    assert model.rate(1, 1, 1.0) == pytest.approx(10_000)
    assert model.rate(4, 1, 1.0) == pytest.approx(20_000)
    assert model.rate(4, 1, 1.0, cores=1) == pytest.approx(1e6 / 150)


def test_best_split_follows_the_costs_of_the_stages() -> None:
    assert Model(Stage(200.0, 0.0, 0.0), Stage(50.0, 0.0, 0.0)).best_split(10, 1.0) == (8, 2)
    assert Model(Stage(50.0, 0.0, 0.0), Stage(50.0, 0.0, 0.0)).best_split(2, 1.0) == (1, 1)


def test_free_peers_cost_what_the_first_one_does() -> None:
    free = TRUE.with_free_peers()
    assert free.io.cost_us(50, 1.0) == TRUE.io.cost_us(1, 1.0) < TRUE.io.cost_us(50, 1.0)


def test_least_squares_solves_an_exact_system() -> None:
    assert solve_least_squares([[1, 0], [1, 1], [1, 2]], [5, 7, 9]) == pytest.approx([5, 2])


def test_advice_names_flags_and_uses_the_cores_that_are_left() -> None:
    text = advice({"round_robin": TRUE}, 112, sizes=[1024])
    line = next(line for line in text.splitlines() if line.startswith("| round_robin"))
    counts = [int(cell) for cell in line.split("|")[3:5]]
    assert sum(counts) == 110
    assert "--io-processes" in text and "--prepare-workers" in text


def test_check_shows_measured_beside_predicted() -> None:
    assert checked("round_robin", TRUE, samples()).count("100% of it predicted") == len(GRID)


def test_cpu_of_a_round_is_split_by_the_names_of_processes() -> None:
    used = {"meshd:io0": 60.0, "meshd:io1": 40.0, "meshd:prep0": 20.0, "meshd:ctl": 5.0}
    done = Round(
        front_end="meshd",
        workload="w",
        done=1,
        per_s=4000.0,
        cpu_us=125.0,
        cpu_us_by_process=used,
        mean_us=1.0,
        p50_us=1.0,
        p99_us=1.0,
        max_us=1.0,
        core=0.5,
        strangers=0.5,
        load_core=0.5,
        backend_core=0.5,
        upstream_share=0.5,
        bottleneck="front end",
        faults=(),
        notes=(),
    )
    found = sample_from(done, 2, 1, 1024)
    assert (found.io_us, found.prepare_us, found.kib, found.rate) == (100.0, 20.0, 1.0, 8000.0)
