"""What a job runner makes of the answers and failures of a builder."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from meshd.api.endpoints import ENDPOINTS
from meshd.api.view import RoutingView
from meshd.errors import MeshError
from meshd.prepare.codec import HEAD_BYTES, decode_result
from meshd.prepare.layout import (
    OUTCOME_REFUSED,
    OUTCOME_SKIPPED,
    OUTCOME_VIEW,
    job_word,
    outcome_of,
    view_length_of,
)
from meshd.prepare.run_job import JobRunner
from meshd.prepare.stopwatch import Stopped, Stopwatch
from meshd.prepare.tokenize import TokenizerAnswers
from tests.fakes.stages import CountedStages

CHAT = next(endpoint for endpoint in ENDPOINTS if endpoint.path == "/v1/chat/completions")
AT = 64  # where the view area lies in the slab


class FakeBuilder:
    """Answers with a view or raises."""

    def __init__(self, answer: RoutingView | BaseException) -> None:
        self.answer = answer
        self.watch = Stopwatch(iter(range(5, 1000, 5)).__next__)
        self.watch.start()
        self.answers = TokenizerAnswers(None, 0, self.watch)

    def build(
        self, endpoint: Any, needs: int, body: memoryview, should_stop: Callable[[], bool]
    ) -> RoutingView:
        assert endpoint is CHAT and needs == 3
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer


def run(answer: RoutingView | BaseException, view_bytes: int = 1000) -> tuple[int, Any, dict[str, float]]:
    """The outcome, the result, and the times that were counted."""
    slab = memoryview(bytearray(AT + view_bytes))
    stages = CountedStages()
    runner = JobRunner(FakeBuilder(answer), stages=stages.counts)
    word = runner.run(job_word(CHAT.number, 3, 0), memoryview(b"{}"), slab, AT, view_bytes, lambda: False)
    outcome, length = outcome_of(word), view_length_of(word)
    return outcome, decode_result(slab[AT : AT + length]) if length else None, stages.seconds()


def test_a_view_a_refusal_and_a_stop_are_told_apart() -> None:
    outcome, view, times = run(RoutingView("m"))
    assert (outcome, view.model, times) == (OUTCOME_VIEW, "m", {"json_parse": 5e-9})
    outcome, refusal, times = run(MeshError("invalid_request", "messages is missing"))
    assert outcome == OUTCOME_REFUSED
    assert (refusal.code, refusal.message) == ("invalid_request", "messages is missing")
    assert times == {"json_parse": 5e-9}, "the time until it refused counts too"
    assert run(Stopped()) == (OUTCOME_SKIPPED, None, {})


def test_a_view_that_does_not_fit_is_a_refusal_that_does() -> None:
    outcome, refusal, _ = run(RoutingView("m" * 1000), HEAD_BYTES + 60)
    assert (outcome, refusal.code) == (OUTCOME_REFUSED, "invalid_request")


def test_an_exception_is_the_workers_to_catch() -> None:
    with pytest.raises(ZeroDivisionError):
        run(ZeroDivisionError())
