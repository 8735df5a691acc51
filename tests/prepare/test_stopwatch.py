"""The times of a job's stages, by a clock that the test moves."""

from __future__ import annotations

from meshd.prepare.stopwatch import ENCODE, TEMPLATE, VIEW, StageTimes, Stopwatch


class Clock:
    def __init__(self) -> None:
        self.now = 1000

    def __call__(self) -> int:
        return self.now


def test_each_stage_gets_the_time_until_the_next_and_a_stage_may_come_again():
    clock = Clock()
    watch = Stopwatch(clock)
    watch.start()
    for stage, spent in ((TEMPLATE, 5), (ENCODE, 7), (TEMPLATE, 11), (VIEW, 13)):
        clock.now += spent
        watch.enter(stage)
    clock.now += 17
    assert watch.stop() == StageTimes(json_parse=5, template=7 + 13, encode=11, view=17)


def test_a_job_begins_without_the_times_of_the_one_before():
    clock = Clock()
    watch = Stopwatch(clock)
    watch.start()
    clock.now += 100
    assert watch.stop() == StageTimes(json_parse=100)
    watch.start()
    clock.now += 3
    assert watch.stop() == StageTimes(json_parse=3)
