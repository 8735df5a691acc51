from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from meshd.api.answer import Answer
from meshd.api.endpoints import ENDPOINTS
from meshd.director import BodyRoom
from meshd.errors import MeshError
from meshd.io.prepared_answer import PIECE_BYTES, PreparedAnswer
from meshd.memory import Segment
from meshd.prepare.job import Job
from meshd.slab import SLAB_KIND, BodySlab

TOKENIZE = next(endpoint for endpoint in ENDPOINTS if endpoint.name == "tokenize")
BODY = b'{"prompt":"Hi"}'


class Memory:
    """The budget of body memory."""

    def __init__(self, bound_bytes: int) -> None:
        self.bound_bytes = bound_bytes
        self.reserved = 0
        self.most = 0

    def grow(self, more: int) -> bool:
        if self.reserved + more > self.bound_bytes:
            return False
        self.reserved += more
        self.most = max(self.most, self.reserved)
        return True

    def release(self, amount: int) -> None:
        self.reserved -= amount
        assert self.reserved >= 0


class Director:
    """Runs each job at once: the answer is ``length`` bytes, written if the view area holds them."""

    def __init__(self, length: int = 100, bound_bytes: int = 64 << 20) -> None:
        self.memory = Memory(bound_bytes)
        self.slab = BodySlab(Segment.create(SLAB_KIND, 256 << 20), 8192)
        self.lengths: Callable[[int], int] = lambda run: length
        self.views: list[int] = []
        self.refusal: MeshError | None = None
        self.cancelled: list[Job] = []

    @property
    def body_memory_bytes(self) -> int:
        return self.memory.bound_bytes

    def try_reserve(self, body_bytes: int) -> BodyRoom | None:
        slot = self.slab.reserve(body_bytes)
        if slot is None or not self.memory.grow(body_bytes):
            return None
        return BodyRoom(SimpleNamespace(memory=self.memory), slot, body_bytes)  # type: ignore[arg-type]

    def job(self, endpoint: Any, room: BodyRoom, body_length: int) -> Job:
        assert endpoint is TOKENIZE
        return Job(endpoint.number, 0, room.slot, body_length, lambda result: None)

    async def prepare(self, job: Job) -> Any:
        if self.refusal is not None:
            return self.refusal
        assert job.slot.body[: job.body_length] == BODY, "each run has the body"
        self.views.append(job.slot.view_capacity)
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

    def success(self, status: int, body: bytes, fields: tuple[()], body_bytes: int) -> None:
        assert (status, fields, self.announced) == (200, (), -1)
        self.announced = body_bytes
        self.pieces.append(body)

    def more(self, data: bytes) -> None:
        self.pieces.append(data)


def make(director: Director, limit: int = 1 << 20) -> PreparedAnswer:
    room = director.try_reserve(len(BODY))
    assert room is not None
    room.body[: len(BODY)] = BODY
    settings = SimpleNamespace(prepare_max_tokenize_bytes=limit)
    io: Any = SimpleNamespace(director=director, settings=settings)
    return PreparedAnswer(io, TOKENIZE, room, len(BODY))


def sent(director: Director) -> Out:
    prepared, out = make(director), Out()

    async def run() -> None:
        prepared._io.loop = asyncio.get_running_loop()
        client: Any = Client()
        await prepared.send(await prepared.prepare(), client, out)  # type: ignore[arg-type]

    asyncio.run(run())
    prepared.release()
    assert director.memory.reserved == director.slab.in_use_bytes == 0
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
    assert director.memory.most == len(BODY), "nothing more is reserved"


def test_an_answer_beyond_every_guess_runs_once_more_with_the_room_that_it_needs():
    director = Director(1_000_000)
    sent(director)
    assert len(director.views) == 2 and director.views[1] >= 1_000_100


def test_what_was_reserved_beyond_the_answer_goes_back_before_it_is_sent():
    director = Director()
    prepared = make(director, limit=1 << 20)
    prepared._body_bytes = len(BODY)
    assert prepared._room.widen_view(1 << 20)
    answer = asyncio.run(prepared.prepare())
    assert director.memory.reserved == len(BODY) + answer.view_bytes
    prepared.release()
    assert director.memory.reserved == 0


def test_an_answer_larger_than_all_memory_is_refused_for_good():
    director = Director(1_000_000, bound_bytes=500_000)
    prepared = make(director)
    with pytest.raises(MeshError) as caught:
        asyncio.run(prepared.prepare())
    assert caught.value.code == "tokenizer_input_too_large"
    prepared.release()
    assert director.memory.reserved == director.slab.in_use_bytes == 0


def test_an_answer_without_memory_now_may_be_asked_for_again():
    director = Director(1_000_000, bound_bytes=2_000_000)
    prepared = make(director)
    assert director.memory.grow(1_500_000), "another request holds it"
    with pytest.raises(MeshError) as caught:
        asyncio.run(prepared.prepare())
    assert caught.value.code == "buffer_budget_exhausted"
    prepared.release()
    assert director.memory.reserved == 1_500_000 and director.slab.in_use_bytes == 0


def test_an_answer_that_grows_between_two_runs_fails():
    director = Director()
    director.lengths = lambda run: run * 1_000_000
    prepared = make(director)
    with pytest.raises(MeshError) as caught:
        asyncio.run(prepared.prepare())
    assert caught.value.code == "prepare_failed"
    prepared.release()
    assert director.memory.reserved == director.slab.in_use_bytes == 0


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
        prepared._io.loop = asyncio.get_running_loop()
        answer = await prepared.prepare()
        client.is_write_paused = True
        sending = asyncio.ensure_future(prepared.send(answer, client, out))  # type: ignore[arg-type]
        for written in (1, 2):
            for _ in range(5):
                await asyncio.sleep(0)
            assert len(out.pieces) == written and prepared.has_begun
            prepared.resume()
        client.is_write_paused = False
        prepared.resume()
        await sending

    asyncio.run(run())
    assert len(out.pieces) == 4 and director.memory.reserved > 4 * PIECE_BYTES
    prepared.release()


def test_cancelling_forgets_the_job():
    director = Director()
    prepared = make(director)
    prepared.cancel()
    assert director.cancelled == []
    asyncio.run(prepared.prepare())
    prepared.cancel()
    assert len(director.cancelled) == 1
