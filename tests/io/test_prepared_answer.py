from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from meshd.admission.gate import Gate, GateLimits, segment_size
from meshd.api.answer import Answer
from meshd.api.endpoints import ENDPOINTS, Endpoint
from meshd.director import BodyRoom
from meshd.errors import MeshError
from meshd.io.http1 import Field
from meshd.io.prepared_answer import PIECE_BYTES, PreparedAnswer
from meshd.memory import Segment
from meshd.prepare.job import Job
from meshd.slab import SLAB_KIND, BodySlab

TOKENIZE = next(endpoint for endpoint in ENDPOINTS if endpoint.name == "tokenize")
BODY = b'{"prompt":"Hi"}'


class Director:
    """Runs each job at once: the answer is ``length`` bytes, written if the view area holds them."""

    def __init__(self, length: int = 100, bound_bytes: int = 64 << 20) -> None:
        limits = GateLimits(0, 0, 0, bound_bytes)
        segment = Segment.create("gate", segment_size(1))
        self.gate = Gate(segment, 0, 1, 100, limits, lambda: 0)
        self.memory = self.gate.memory
        self.slab = BodySlab(Segment.create(SLAB_KIND, 256 << 20), 8192)
        self.lengths: Callable[[int], int] = lambda run: length
        self.views: list[int] = []
        self.reserved: list[int] = []
        self.refusal: MeshError | None = None
        self.cancelled: list[Job] = []

    @property
    def body_memory_bytes(self) -> int:
        return self.memory.bound_bytes

    def try_reserve(self, body_bytes: int | None) -> BodyRoom | None:
        assert body_bytes is not None
        slot = self.slab.reserve(body_bytes)
        if slot is None or not self.memory.reserve(body_bytes):
            return None
        return BodyRoom(self.gate, slot, body_bytes)

    def job(self, endpoint: Endpoint, room: BodyRoom, body_length: int) -> Job:
        assert endpoint is TOKENIZE
        return Job(endpoint.number, 0, room.slot, body_length)

    async def prepare(self, job: Job) -> Any:
        if self.refusal is not None:
            return self.refusal
        assert job.slot.body[: job.body_length] == BODY, "each run has the body"
        self.views.append(job.slot.view_capacity)
        self.reserved.append(self.memory.reserved_bytes)
        length = self.lengths(len(self.views))
        if length > job.slot.view_capacity - 100:
            return Answer("m1", 0, 0, length + 100)
        job.slot.view[100 : 100 + length] = bytes(number % 251 for number in range(length))
        return Answer("m1", 100, length, length + 100)

    def cancel(self, job: Job) -> None:
        self.cancelled.append(job)


class Client:
    def __init__(self) -> None:
        self.is_write_paused = False


class Out:
    """What was written, and how much of it before the client took any."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.announced = -1

    def success(
        self, status: int, body: bytes, fields: tuple[Field, ...], body_bytes: int | None = None
    ) -> None:
        assert body_bytes is not None and (status, fields, self.announced) == (200, (), -1)
        self.announced = body_bytes
        self.pieces.append(body)

    def more(self, data: bytes) -> None:
        self.pieces.append(data)


def make(director: Director, limit: int = 1 << 20) -> PreparedAnswer:
    room = director.try_reserve(len(BODY))
    assert room is not None
    room.body[: len(BODY)] = BODY
    return PreparedAnswer(director, TOKENIZE, room, len(BODY), limit)


def sent(director: Director) -> Out:
    prepared, out = make(director), Out()

    async def run() -> None:
        await prepared.send(await prepared.prepare(), Client(), out)

    asyncio.run(run())
    prepared.release()
    assert director.memory.reserved_bytes == director.slab.in_use_bytes == 0
    return out


@pytest.mark.parametrize("length", [1, PIECE_BYTES, PIECE_BYTES + 1, 3 * PIECE_BYTES, 5_000_000])
def test_an_answer_of_any_length_is_sent_whole_and_all_memory_goes_back(length):
    director = Director(length)
    out = sent(director)
    assert out.announced == length
    assert b"".join(out.pieces) == bytes(number % 251 for number in range(length))
    assert max(map(len, out.pieces)) <= PIECE_BYTES


def test_a_short_answer_is_one_job_in_the_ordinary_view_area():
    director = Director(100)
    sent(director)
    assert director.views == [8192]
    assert director.reserved == [len(BODY)], "nothing more is reserved"


def test_an_answer_beyond_every_guess_runs_once_more_with_the_room_that_it_needs():
    director = Director(1_000_000)
    sent(director)
    assert len(director.views) == 2 and director.views[1] >= 1_000_100
    assert director.reserved == [len(BODY), len(BODY) + 1_000_100], "one body, and the view alone"


def test_what_was_reserved_beyond_the_answer_goes_back_before_it_is_sent():
    director = Director()
    prepared = make(director)
    assert prepared._room.widen_view(1 << 20)
    answer = asyncio.run(prepared.prepare())
    assert director.memory.reserved_bytes == len(BODY) + answer.view_bytes
    prepared.release()
    assert director.memory.reserved_bytes == 0


def test_an_answer_larger_than_all_memory_is_refused_for_good():
    director = Director(1_000_000, bound_bytes=500_000)
    prepared = make(director)
    with pytest.raises(MeshError) as caught:
        asyncio.run(prepared.prepare())
    assert caught.value.code == "tokenizer_input_too_large"
    prepared.release()
    assert director.memory.reserved_bytes == director.slab.in_use_bytes == 0


def test_an_answer_without_memory_now_may_be_asked_for_again():
    director = Director(1_000_000, bound_bytes=2_000_000)
    prepared = make(director)
    assert director.memory.reserve(1_500_000), "another request holds it"
    with pytest.raises(MeshError) as caught:
        asyncio.run(prepared.prepare())
    assert caught.value.code == "buffer_budget_exhausted"
    prepared.release()
    assert director.memory.reserved_bytes == 1_500_000 and director.slab.in_use_bytes == 0


def test_an_answer_that_grows_between_two_runs_fails():
    director = Director()
    director.lengths = lambda run: run * 1_000_000
    prepared = make(director)
    with pytest.raises(MeshError) as caught:
        asyncio.run(prepared.prepare())
    assert caught.value.code == "prepare_failed"
    prepared.release()
    assert director.memory.reserved_bytes == director.slab.in_use_bytes == 0


def test_a_refused_request_sends_nothing():
    director = Director()
    director.refusal = MeshError("tokenizer_not_found", "none")
    prepared = make(director)
    with pytest.raises(MeshError, match="none"):
        asyncio.run(prepared.prepare())
    assert not prepared.has_begun
    prepared.release()


def test_nothing_is_written_while_the_client_takes_nothing():
    director, out, client = Director(4 * PIECE_BYTES), Out(), Client()
    prepared = make(director)

    async def run() -> None:
        answer = await prepared.prepare()
        client.is_write_paused = True
        sending = asyncio.ensure_future(prepared.send(answer, client, out))
        for written in (1, 2):
            for _ in range(5):
                await asyncio.sleep(0)
            assert len(out.pieces) == written and prepared.has_begun
            prepared.resume()
        client.is_write_paused = False
        prepared.resume()
        await sending

    asyncio.run(run())
    assert len(out.pieces) == 4 and director.memory.reserved_bytes > 4 * PIECE_BYTES
    prepared.release()


def test_cancelling_forgets_the_job():
    director = Director()
    prepared = make(director)
    prepared.cancel()
    assert director.cancelled == []
    asyncio.run(prepared.prepare())
    prepared.cancel()
    assert len(director.cancelled) == 1
