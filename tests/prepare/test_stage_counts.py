"""Stage times on their way into the metrics."""

from __future__ import annotations

import pytest

from meshd.prepare.stopwatch import STAGES, StageTimes
from tests.fakes.stages import CountedStages


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_is_counted_under_its_name_and_others_are_not(stage: str) -> None:
    stages = CountedStages()
    stages.counts.count(StageTimes(**{stage: 2_000_000}))
    stages.counts.count(StageTimes(**{stage: 3_000_000}))
    assert stages.seconds() == {stage: pytest.approx(0.005)}
