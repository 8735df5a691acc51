"""The scaling model, its fit, its checks, and its advice."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from statistics import median

import pytest

from bench import BenchError
from bench.cpu_sets import Cpus
from bench.rounds import Round
from bench.scaling import sample_from
from bench.scaling_model import Model, Sample, Stage, checks_apart, checks_shared, fit
from bench.scaling_text import advice, checked

TRUE = Model(
    io=Stage(((1.0, 100.0), (16.0, 130.0), (64.0, 300.0)), by_io=0.25, by_prepare=0.1, apart=1.1),
    prepare=Stage(((1.0, 30.0), (16.0, 60.0), (64.0, 150.0)), by_io=0.1, by_prepare=0.3, apart=1.2),
    rest_us=8.0,
)
COUNTS = ((1, 1), (1, 2), (2, 1), (2, 2), (4, 2))
ONE_CORE = Cpus((0,), (1,), (1,))
SHARED_SECOND = Cpus((0, 1), (1,), (1,))


def a_sample(pass_number: int, io: int, prepare: int, kib: float, factor: float = 1.0) -> Sample:
    io_us = TRUE.io.crowded(io, prepare, kib) * factor
    prepare_us = TRUE.prepare.crowded(io, prepare, kib) * factor
    return Sample(pass_number, io, prepare, kib, io_us, prepare_us, rest_us=8.0)


def samples(noise: float = 0.0, drift: float = 0.0) -> list[Sample]:
    """Three passes. ``noise``: of each round. ``drift``: by how much each pass is dearer than the last."""
    random = Random(7)
    return [
        a_sample(at, io, prepare, kib, (1 + drift * at) * (1 + noise * random.uniform(-1, 1)))
        for at in range(3)
        for io, prepare in COUNTS
        for kib in (1.0, 16.0, 64.0)
    ]


def apart(per_s: float, load_us: float = 0.0) -> Sample:
    one = Sample(0, 1, 1, 1.0, 100.0 * 1.1, 30.0 * 1.2, load_us=load_us, per_s=per_s, is_apart=True)
    return one


def test_fit_finds_the_model_that_made_the_samples() -> None:
    found = fit([*samples(), apart(9000.0)])
    for mine, true in ((found.io, TRUE.io), (found.prepare, TRUE.prepare)):
        assert dict(mine.base_us) == pytest.approx(dict(true.base_us))
        assert (mine.by_io, mine.by_prepare) == pytest.approx((true.by_io, true.by_prepare))
        assert mine.apart == pytest.approx(true.apart)
    assert found.rest_us == 8.0


def test_drift_between_passes_does_not_reach_the_exponents() -> None:
    found = fit(samples(drift=0.5))
    assert (found.io.by_io, found.io.by_prepare) == pytest.approx((0.25, 0.1))


def test_predictions_from_noisy_samples_stay_within_the_noise() -> None:
    found = checks_shared(samples(noise=0.15))
    assert len(found) == 12
    errors = [abs(one.error) for one in found]
    assert median(errors) < 0.15
    assert max(errors) < 0.3  # one round over another, each off by up to 0.15


def test_predictions_of_exact_samples_are_exact_through_any_drift() -> None:
    # the rest of the tree does not drift here, hence not quite
    assert all(abs(one.error) < 0.03 for one in checks_shared(samples(drift=0.5)))


def test_a_prediction_has_not_seen_the_counts_it_is_about() -> None:
    wrong = [
        replace(one, io_us=one.io_us * 10, prepare_us=one.prepare_us * 10) if one.counts == (4, 2) else one
        for one in samples()
    ]
    errors = {(one.io_processes, one.prepare_workers): one.error for one in checks_shared(wrong)}
    assert errors[4, 2] > 5


def test_a_size_between_is_interpolated_and_one_beyond_goes_on() -> None:
    assert TRUE.io.at(1.0) == TRUE.io.at(0.1) == 100.0
    assert TRUE.io.at(8.5) == pytest.approx(115.0)
    assert TRUE.io.at(40.0) == pytest.approx(215.0)
    assert TRUE.io.at(112.0) == pytest.approx(470.0)
    assert Stage(((1.0, 5.0),)).at(64.0) == 5.0


def test_an_exponent_below_nought_is_nought() -> None:
    falling = [
        Sample(0, io, prepare, 1.0, 100.0 / io, 30.0 * prepare**0.5)
        for io, prepare in ((1, 1), (2, 1), (1, 2), (2, 2))
    ]
    found = fit(falling)
    assert (found.io.by_io, found.io.by_prepare) == (0.0, 0.0)
    assert found.prepare.by_prepare == pytest.approx(0.5)


def test_an_exponent_is_found_where_only_one_count_varied() -> None:
    found = fit([one for one in samples() if one.prepare_workers == 1])
    assert found.io.by_io == pytest.approx(0.25)
    assert found.io.by_prepare == 0.0


def test_without_one_of_each_there_is_no_model() -> None:
    with pytest.raises(BenchError, match="one I/O process and one prepare worker"):
        fit([one for one in samples() if one.counts != (1, 1)])


def test_a_cost_that_the_clock_did_not_see_is_said_not_used() -> None:
    with pytest.raises(BenchError, match="longer --seconds"):
        fit([replace(one, prepare_us=0.0) for one in samples()])


def test_the_slower_stage_limits_the_rate() -> None:
    model = Model(Stage(((1.0, 100.0),)), Stage(((1.0, 50.0),)))
    assert model.rate(1, 1, 1.0) == pytest.approx(10_000)
    assert model.rate(4, 1, 1.0) == pytest.approx(20_000)
    assert model.shared_cost_us(1, 1, 1.0) == pytest.approx(150.0)


def test_crowding_bounds_the_rate_from_below_and_one_of_each_is_no_crowd() -> None:
    assert TRUE.crowded_rate(8, 4, 1.0) < TRUE.rate(8, 4, 1.0)
    assert TRUE.crowded_rate(1, 1, 1.0) == pytest.approx(TRUE.rate(1, 1, 1.0))


def test_best_split_follows_the_costs_of_the_stages() -> None:
    assert Model(Stage(((1.0, 200.0),)), Stage(((1.0, 50.0),))).best_split(10, 1.0) == (8, 2)
    assert Model(Stage(((1.0, 50.0),)), Stage(((1.0, 50.0),))).best_split(2, 1.0) == (1, 1)


def test_with_a_core_each_the_slower_stage_is_predicted_from_one_core() -> None:
    (found,) = checks_apart([*samples(), apart(9500.0)])
    assert (found.predicted, found.measured) == (pytest.approx(10_000.0), 9500.0)


def test_load_on_the_second_core_counts_to_that_stage() -> None:
    (found,) = checks_apart([*samples(), apart(5000.0, load_us=170.0)])
    assert found.predicted == pytest.approx(1e6 / (30.0 + 170.0))


def test_advice_shows_the_sums_and_uses_the_cores_that_are_left() -> None:
    text = advice({"round_robin": TRUE}, 112, sizes=[1024])
    line = next(line for line in text.splitlines() if line.startswith("| round_robin"))
    cells = [cell.strip().replace(",", "") for cell in line.split("|")[1:-1]]
    io_us, prepare_us, io, prepare, by_io, by_prepare, planned = map(float, cells[2:9])
    assert io + prepare == 110
    assert (io_us, prepare_us) == (110.0, 36.0)
    assert (by_io, by_prepare) == pytest.approx((io / io_us * 1e6, prepare / prepare_us * 1e6), rel=1e-3)
    assert planned == pytest.approx(0.7 * min(by_io, by_prepare), rel=1e-3)
    assert "--io-processes" in text and "--prepare-workers" in text


def test_checks_are_told_with_their_errors_and_a_busy_machine_with_its_share() -> None:
    quiet = checked("round_robin", TRUE, [*samples(), apart(5000.0, load_us=170.0)])
    assert "(+0%)" in quiet and "load generator and backend had to use the second core" in quiet
    assert "errors on one core: median 0%" in quiet and "not a quiet machine" not in quiet
    busy = checked("round_robin", TRUE, [replace(one, strangers=0.6) for one in samples()])
    assert "In 45 of 45 rounds" in busy and "up to 60%" in busy


def a_round(**changes: float) -> Round:
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
        load_core=0.4,
        backend_core=0.2,
        upstream_share=0.5,
        bottleneck="front end",
        faults=(),
        notes=(),
    )
    return replace(done, **changes)  # type: ignore[arg-type]


def test_cpu_of_a_round_is_split_by_the_names_of_processes() -> None:
    found = sample_from(a_round(), 0, (2, 1), 1024, ONE_CORE)
    assert (found.io_us, found.prepare_us, found.rest_us, found.kib) == (100.0, 20.0, 5.0, 1.0)
    assert (found.load_us, found.strangers) == (0.0, 0.5)


def test_the_load_on_a_core_of_the_front_end_is_no_stranger() -> None:
    found = sample_from(a_round(strangers=0.25), 0, (1, 1), 1024, SHARED_SECOND, is_apart=True)
    assert found.load_us == pytest.approx(100.0)
    assert found.strangers == pytest.approx(0.05)
