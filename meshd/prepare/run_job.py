"""One job to its result in the view area."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from meshd.api.endpoints import Endpoint, endpoint_by_number
from meshd.api.view import RoutingView
from meshd.errors import MeshError
from meshd.prepare.codec import ViewTooLarge, ViewWriter, encode_answer, encode_refusal
from meshd.prepare.layout import (
    OUTCOME_REFUSED,
    OUTCOME_SKIPPED,
    OUTCOME_VIEW,
    endpoint_number_of,
    needs_of,
    result_word,
)
from meshd.prepare.memory_bound import JobMemory
from meshd.prepare.stage_counts import StageCounts
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

    ``memory``: bounds what a job may allocate; ``None`` for no bound. ``stages``: told what each job spent
    that came to a view, an answer or a refusal.
    """

    def __init__(
        self, builder: Builder, memory: JobMemory | None = None, stages: StageCounts | None = None
    ) -> None:
        self._build = builder.build  # one look-up less for each job
        self._answers = builder.answers
        self._watch = builder.watch
        self._writer = ViewWriter()
        self._memory = memory
        self._stages = stages

    def run(
        self,
        job_word: int,
        body: memoryview,
        slab: memoryview,
        view_offset: int,
        view_capacity: int,
        should_stop: Callable[[], bool],
    ) -> int:
        """Return the result word of the completion; ``job_word``: of the descriptor (layout.py).

        The result is written into ``slab``, within ``view_capacity`` bytes from ``view_offset`` on.
        """
        if self._memory is not None:
            self._memory.prepare_for(len(body))
        try:
            endpoint = endpoint_by_number(endpoint_number_of(job_word))
            if endpoint.picks_by == "local":
                model, answer = self._answers.answer(endpoint, body, should_stop)
                area = slab[view_offset : view_offset + view_capacity]
                length = encode_answer(model, answer, area)
            else:
                view = self._build(endpoint, needs_of(job_word), body, should_stop)
                length = self._writer.write(view, slab, view_offset, view_capacity)
            word = result_word(OUTCOME_VIEW, length)
        except MeshError as error:
            area = slab[view_offset : view_offset + view_capacity]
            word = result_word(OUTCOME_REFUSED, encode_refusal(error.code, error.message, area))
        except ViewTooLarge:
            area = slab[view_offset : view_offset + view_capacity]
            message = "The model name is too long."
            word = result_word(OUTCOME_REFUSED, encode_refusal("invalid_request", message, area))
        except Stopped:  # nothing was written
            return result_word(OUTCOME_SKIPPED, 0)
        times = self._watch.stop()
        if self._stages is not None:
            self._stages.count(times)
        return word
