"""The answer to a request that a prepare worker answers whole: tokenize and detokenize.

The worker writes the finished JSON into the view area of the body's slot, and this process sends it from
there without looking at it. It can be megabytes: the view area is made long enough first, and the memory is
held, and counted, until the client has taken the last piece.

How long an answer will be is known only to the job. What is reserved holds ids of seven digits for every
byte of the text, so one job is the rule. Where that is not enough (a token may stand for a hundred
characters, or the memory was not there) the job says what it needs, and runs once more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TYPE_CHECKING, Final, Protocol

from meshd.api.answer import Answer
from meshd.api.endpoints import Endpoint
from meshd.errors import MeshError
from meshd.io.http1 import Field

if TYPE_CHECKING:
    from meshd.director import BodyRoom
    from meshd.prepare.job import Job, Result

PIECE_BYTES: Final = 131072
_BYTES_A_BYTE: Final = 8
_LEAST_BYTES: Final = 4096  # beside them: the names of members, and a model's name


class Jobs(Protocol):
    """Where jobs are run and memory comes from; ``Director`` is one."""

    @property
    def body_memory_bytes(self) -> int: ...
    def try_reserve(self, body_bytes: int | None) -> BodyRoom | None: ...
    def job(self, endpoint: Endpoint, room: BodyRoom, body_length: int) -> Job: ...
    def prepare(self, job: Job) -> Awaitable[Result]: ...
    def cancel(self, job: Job) -> None: ...


class Client(Protocol):
    """The client's connection."""

    is_write_paused: bool


class Out(Protocol):
    """Writes the answer; ``LocalAnswer`` is one."""

    def success(
        self, status: int, body: bytes, fields: tuple[Field, ...], body_bytes: int | None = None
    ) -> None: ...
    def more(self, data: bytes) -> None: ...


class PreparedAnswer:
    """One answer, from the body that is whole to its last byte. It owns ``room`` until ``release``.

    ``max_text_bytes``: what a request may tokenize.
    """

    __slots__ = (
        "_body_bytes",
        "_director",
        "_endpoint",
        "_job",
        "_max_text_bytes",
        "_resumed",
        "_room",
        "has_begun",
    )

    def __init__(
        self, director: Jobs, endpoint: Endpoint, room: BodyRoom, body_bytes: int, max_text_bytes: int
    ) -> None:
        self._director = director
        self._endpoint = endpoint
        self._room = room
        self._body_bytes = body_bytes
        self._max_text_bytes = max_text_bytes
        self._job: Job | None = None
        self._resumed: asyncio.Future[None] | None = None
        self.has_begun = False  # its head has gone out

    @property
    def job(self) -> Job | None:
        """The job that wrote the answer."""
        return self._job

    async def prepare(self) -> Answer:
        """Have the answer written; raises MeshError for a request that is refused, or without memory."""
        likely_bytes = _LEAST_BYTES + _BYTES_A_BYTE * min(self._body_bytes, self._max_text_bytes)
        if likely_bytes > self._room.slot.view_capacity:
            self._room.widen_view(likely_bytes)
        answer = await self._run()
        if not answer.is_written:
            self._move(answer.view_bytes)
            answer = await self._run()
            if not answer.is_written:
                raise MeshError("prepare_failed", "The answer has changed its length.")
        self._room.settle_view(answer.view_bytes)
        return answer

    async def send(self, answer: Answer, client: Client, out: Out) -> None:
        """Send head and answer, no faster than the client takes them."""
        view = self._room.slot.view[answer.start : answer.start + answer.length]
        self.has_begun = True
        out.success(200, bytes(view[:PIECE_BYTES]), (), answer.length)
        for start in range(PIECE_BYTES, answer.length, PIECE_BYTES):
            if client.is_write_paused:
                self._resumed = asyncio.get_running_loop().create_future()
                await self._resumed
            else:
                await asyncio.sleep(0)  # others have their turn
            out.more(bytes(view[start : start + PIECE_BYTES]))

    def resume(self) -> None:
        """The client has taken what was written."""
        if self._resumed is not None and not self._resumed.done():
            self._resumed.set_result(None)

    def cancel(self) -> None:
        if self._job is not None:
            self._director.cancel(self._job)

    def release(self) -> None:
        """Give the memory back, once; after a job that is when no prepare worker can touch it any more."""
        self._room.release(self._job)

    async def _run(self) -> Answer:
        director = self._director
        job = self._job = director.job(self._endpoint, self._room, self._body_bytes)
        result = await director.prepare(job)
        if isinstance(result, MeshError):
            raise result
        assert isinstance(result, Answer)
        return result

    def _move(self, view_bytes: int) -> None:
        """Take another room with a longer view: descriptors of the first job may still name this one."""
        director, length = self._director, self._body_bytes
        if view_bytes + length > director.body_memory_bytes:
            raise MeshError("tokenizer_input_too_large", "The answer would be larger than the memory for it.")
        room = director.try_reserve(length)
        if room is None or not room.widen_view(view_bytes):
            if room is not None:
                room.release(None)
            raise MeshError("buffer_budget_exhausted", "No memory is free for the answer now.")
        room.body[:length] = self._room.body[:length]
        self._room.release(self._job)
        self._room, self._job = room, None

    def __repr__(self) -> str:
        return f"PreparedAnswer({self._endpoint.name}, {self._body_bytes} bytes, begun={self.has_begun})"
