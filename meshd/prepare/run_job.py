"""One job to its result in the view area."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from meshd.api.endpoints import Endpoint, endpoint_by_number
from meshd.api.view import RoutingView
from meshd.errors import MeshError
from meshd.prepare.codec import ViewTooLarge, encode_answer, encode_refusal, encode_view
from meshd.prepare.layout import (
    OUTCOME_REFUSED,
    OUTCOME_SKIPPED,
    OUTCOME_VIEW,
    endpoint_number_of,
    needs_of,
)
from meshd.prepare.memory_bound import JobMemory
from meshd.prepare.stopwatch import Stopped, Stopwatch
from meshd.prepare.tokenize import TokenizerAnswers


class Builder(Protocol):
    """What is used of a ``ViewBuilder``."""

    @property
    def watch(self) -> Stopwatch: ...
    @property
    def answers(self) -> TokenizerAnswers: ...
    def build(
        self, endpoint: Endpoint, needs: int, body: memoryview, should_stop: Callable[[], bool]
    ) -> RoutingView: ...


class JobRunner:
    """Runs the jobs of one prepare worker.

    ``memory``: bounds what a job may allocate; ``None`` for no bound.
    """

    def __init__(self, builder: Builder, memory: JobMemory | None = None) -> None:
        self._builder = builder
        self._watch = builder.watch
        self._memory = memory

    def run(
        self, job_word: int, body: memoryview, view: memoryview, should_stop: Callable[[], bool]
    ) -> tuple[int, int]:
        """Return the outcome and the length of what was written into ``view``.

        ``job_word``: of the descriptor (layout.py).
        """
        if self._memory is not None:
            self._memory.prepare_for(len(body))
        try:
            endpoint = endpoint_by_number(endpoint_number_of(job_word))
            if endpoint.picks_by == "local":
                model, answer = self._builder.answers.answer(endpoint, body, should_stop)
                return OUTCOME_VIEW, encode_answer(model, answer, self._watch.stop(), view)
            result = self._builder.build(endpoint, needs_of(job_word), body, should_stop)
            return OUTCOME_VIEW, encode_view(result, view)
        except MeshError as error:
            return OUTCOME_REFUSED, encode_refusal(error.code, error.message, view, self._watch.stop())
        except ViewTooLarge:
            return OUTCOME_REFUSED, encode_refusal("invalid_request", "The model name is too long.", view)
        except Stopped:  # nothing was written
            return OUTCOME_SKIPPED, 0
