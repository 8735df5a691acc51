"""A resource operation over real upstreams on the loopback, each of which plays given bytes."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest
import uvloop

from meshd.api.endpoints import EndpointRegistry
from meshd.errors import MeshError
from meshd.io import fan_out
from meshd.io.fan_out import MAX_ASKED, FanOut, ResourceRequest, Winner
from meshd.io.http1 import parse_request_head
from meshd.io.pool import UpstreamPool
from meshd.routing.placement import FAN_OUT, Placement
from meshd.routing.upstream import Upstream


def reply(status: int, body: bytes = b"{}") -> bytes:
    return b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n%b" % (status, len(body), body)


OK, NOT_FOUND, DENIED, BROKEN = reply(200), reply(404), reply(403), reply(500)
CUT = b""
SILENCE = None


class Origin:
    """One upstream: ``answer`` to each request, ``SILENCE``, or ``CUT``; only once ``may_answer`` is set."""

    def __init__(self, answer: bytes | None) -> None:
        self.answer = answer
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.requests: list[bytes] = []
        self.arrived = asyncio.Event()
        self.ended = asyncio.Event()
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                self.requests.append(await reader.readuntil(b"\r\n\r\n"))
                self.arrived.set()
                if self.answer == CUT:
                    break
                if self.answer is SILENCE:
                    await reader.read(1)
                    break
                await self.may_answer.wait()
                writer.write(self.answer)
        self.ended.set()
        writer.close()


class Scene:
    """Origins, a pool, and what was counted."""

    def __init__(self, first_byte_timeout_secs: float = 0.0) -> None:
        self.origins: list[Origin] = []
        self.counts: Counter[str] = Counter()
        self.held: Counter[str] = Counter()
        self.most_held = 0
        self.reports: list[tuple[int, Any]] = []
        self.legs: Counter[str] = Counter()
        self.kinds: list[str] = []
        self.pool = UpstreamPool(asyncio.get_running_loop(), idle_timeout_s=4.0, connect_timeout_s=5.0)
        self.io: Any = SimpleNamespace(
            pool=self.pool,
            tracing=None,
            clock=asyncio.get_running_loop().time,
            first_byte_timeout_s=first_byte_timeout_secs,
            settings=SimpleNamespace(upstream_connect_timeout_secs=5.0),
            metrics=SimpleNamespace(
                upstream_response=lambda status: self.counts.update([f"status {status}"]),
                attempt_failed=lambda kind: self.counts.update([f"failed {kind}"]),
                leg_ended=lambda url, outcome: self.legs.update([outcome]),
                backpressure=lambda url, kind: self.kinds.append(kind),
                reuse_retries=SimpleNamespace(inc=lambda: self.counts.update(["reuse retry"])),
            ),
        )

    def hold(self, upstream: Upstream) -> Placement:
        self.held[upstream.base_url] += 1
        self.most_held = max(self.most_held, self.held.total())
        return Placement(upstream, FAN_OUT, FAN_OUT)

    def release(self, placement: Placement) -> None:
        self.held[placement.upstream.base_url] -= 1
        assert self.held[placement.upstream.base_url] >= 0

    def report(self, placement: Placement, outcome: str, began_s: float, ended_s: float) -> bool:
        assert self.held[placement.upstream.base_url] and began_s <= ended_s
        self.reports.append((placement.upstream.number, outcome))
        return True

    def note_busy(self, upstream: Upstream, advice: bytes | None, now_s: float) -> str:
        self.reports.append((upstream.number, advice))
        return "cooldown" if advice else "deranked"

    def upstreams(self, *keys: str | None) -> list[Upstream]:
        padded = [*keys, *[None] * (len(self.origins) - len(keys))]
        return [
            Upstream(number=n, id=str(n), base_url=origin.url, api_key=key)
            for n, (origin, key) in enumerate(zip(self.origins, padded, strict=True))
        ]

    async def run(
        self,
        method: str = "GET",
        target: str = "/v1/responses/resp%5F1",
        fields: str = "",
        keys: tuple[str | None, ...] = (),
        seconds: float = 60.0,
    ) -> Winner:
        return await self.asking(method, target, fields, seconds).run(self.upstreams(*keys))

    def asking(
        self,
        method: str = "GET",
        target: str = "/v1/responses/resp%5F1",
        fields: str = "",
        seconds: float = 60.0,
    ) -> FanOut:
        head = parse_request_head(
            f"{method} {target} HTTP/1.1\r\nhost: h\r\n{fields}\r\n".encode(), 65536, 256
        )
        endpoint, resource_id = EndpointRegistry().find(method, head.path)
        request = ResourceRequest(head, endpoint, resource_id, "resp-id")
        return FanOut(self.io, self, request, self.io.clock() + seconds)

    def end(self, winner: Winner) -> None:
        """Do what the exchange does after the relay."""
        winner.leg.release()
        self.release(winner.placement)

    async def settle(self) -> None:
        """Let exchanges that lost end."""
        for _ in range(3):
            await asyncio.sleep(0)

    @property
    def is_clean(self) -> bool:
        return self.held.total() == 0 and not self.pool.busy()


@contextlib.asynccontextmanager
async def scene(*answers: bytes | None, **options: float) -> AsyncIterator[Scene]:
    it = Scene(**options)
    async with contextlib.AsyncExitStack() as stack:
        for answer in answers:
            origin = Origin(answer)
            server = await asyncio.start_server(origin.serve, "127.0.0.1", 0)
            stack.callback(server.close)
            origin.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            it.origins.append(origin)
        yield it
        it.pool.close_all()


pytestmark = pytest.mark.skipif(
    not fan_out.__file__.endswith(".py"), reason="compiled code takes no stand-in for Services; see tests/e2e"
)


def play(story: Callable[[], Coroutine[Any, Any, None]]) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(story())


def test_only_2xx_wins_over_404_and_500_and_each_origin_is_asked_once_with_the_query() -> None:
    async def story() -> None:
        async with scene(NOT_FOUND, BROKEN, OK) as it:
            it.origins[2].may_answer.clear()
            running = asyncio.create_task(it.run(target="/v1/responses/resp%5F1?include=a&limit=2"))
            await asyncio.gather(*(origin.arrived.wait() for origin in it.origins))
            it.origins[2].may_answer.set()
            winner = await running
            assert (winner.response.status, winner.authority) == (200, it.origins[2].url[7:])
            assert winner.placement.upstream.base_url == it.origins[2].url
            for origin in it.origins:
                (request,) = origin.requests
                assert request.startswith(b"GET /v1/responses/resp_1?include=a&limit=2 HTTP/1.1\r\n")
                assert b"content-length" not in request and b"x-request-id: resp-id\r\n" in request
            assert it.held == Counter({it.origins[2].url: 1})
            it.end(winner)
            assert it.is_clean

    play(story)


def test_what_origins_answer_is_reported_to_breakers_and_back_pressure() -> None:
    async def story() -> None:
        async with scene(BROKEN, CUT, reply(503), NOT_FOUND) as it:
            it.end(await it.run())
            assert sorted(it.reports) == [(0, "failure"), (1, "failure"), (2, None)]
            assert it.kinds == ["deranked"]
            assert it.legs == {"failure": 1, "neutral": 2}  # that of the winner is counted by the exchange

    play(story)


def test_first_2xx_ends_the_exchanges_that_still_run() -> None:
    async def story() -> None:
        async with scene(SILENCE, OK, SILENCE) as it:
            it.origins[1].may_answer.clear()
            running = asyncio.create_task(it.run())
            await asyncio.gather(*(origin.arrived.wait() for origin in it.origins))
            it.origins[1].may_answer.set()
            winner = await running
            await asyncio.gather(it.origins[0].ended.wait(), it.origins[2].ended.wait())
            it.end(winner)
            assert it.is_clean
            assert it.counts == {"status 200": 1}

    play(story)


@pytest.mark.parametrize(
    ("answers", "best"),
    [
        ((NOT_FOUND, DENIED, BROKEN), 2),
        ((BROKEN, reply(503)), 0),
        ((reply(503), BROKEN), 0),
        ((NOT_FOUND, DENIED, reply(302)), 1),
        ((NOT_FOUND, NOT_FOUND), 0),
        ((CUT, NOT_FOUND), 1),
        ((NOT_FOUND,), 0),
    ],
)
@pytest.mark.parametrize("is_reversed", [False, True])
def test_best_answer_without_a_2xx(answers: tuple[bytes, ...], best: int, is_reversed: bool) -> None:
    async def story() -> None:
        async with scene(*answers) as it:
            for origin in it.origins:
                origin.may_answer.clear()
            running = asyncio.create_task(it.run("DELETE", "/v1/responses/r"))
            order = it.origins[::-1] if is_reversed else it.origins
            for origin in order:
                await origin.arrived.wait()
                origin.may_answer.set()
                await it.settle()
            winner = await running
            assert winner.placement.upstream.base_url == it.origins[best].url
            it.end(winner)
            assert it.is_clean

    play(story)


def test_answers_arriving_while_a_better_one_is_kept_do_not_replace_it() -> None:
    async def story() -> None:
        async with scene(BROKEN, NOT_FOUND) as it:
            it.origins[1].may_answer.clear()
            running = asyncio.create_task(it.run())
            while it.counts["status 500"] == 0:
                await asyncio.sleep(0)
            assert not running.done()
            it.origins[1].may_answer.set()
            winner = await running
            assert winner.response.status == 500
            it.end(winner)
            assert it.is_clean

    play(story)


def test_when_no_origin_answers_it_is_no_worker_response_without_an_address() -> None:
    async def story() -> None:
        async with scene(CUT, CUT) as it:
            with socket.socket() as unheard:
                unheard.bind(("127.0.0.1", 0))  # and does not listen
                it.origins[1].url = f"http://127.0.0.1:{unheard.getsockname()[1]}"
                with pytest.raises(MeshError) as caught:
                    await it.run("DELETE", "/v1/responses/r")
            assert (caught.value.code, caught.value.status) == ("no_worker_response", 502)
            assert "127" not in caught.value.message and it.origins[0].url in caught.value.cause
            assert it.counts == {"failed reset": 1, "failed connect": 1}
            assert it.is_clean

    play(story)


@pytest.mark.parametrize("count", [1, 2])
def test_silent_origins_are_bounded_by_the_first_byte_timer(count: int) -> None:
    async def story() -> None:
        async with scene(*[SILENCE] * count, first_byte_timeout_secs=0.05) as it:
            with pytest.raises(MeshError, match="No server answered"):
                await it.run()
            assert it.counts == {"failed timeout": count}
            assert it.is_clean

    play(story)


def test_the_request_timer_bounds_a_single_silent_origin() -> None:
    async def story() -> None:
        async with scene(SILENCE) as it:
            with pytest.raises(MeshError, match="No server answered"):
                await it.run(seconds=0.05)
            assert it.is_clean

    play(story)


def test_silent_origin_does_not_hide_the_answer_of_another_beyond_its_time() -> None:
    async def story() -> None:
        async with scene(SILENCE, NOT_FOUND, first_byte_timeout_secs=0.05) as it:
            winner = await it.run()
            assert winner.response.status == 404
            it.end(winner)

    play(story)


def test_at_most_32_origins_are_asked_at_a_time_in_their_order() -> None:
    async def story() -> None:
        async with scene(*[NOT_FOUND] * (MAX_ASKED + 8)) as it:
            for origin in it.origins:
                origin.may_answer.clear()
            running = asyncio.create_task(it.run())
            await asyncio.gather(*(origin.arrived.wait() for origin in it.origins[:MAX_ASKED]))
            assert not any(origin.requests for origin in it.origins[MAX_ASKED:])
            assert it.held.total() == MAX_ASKED
            for origin in it.origins:
                origin.may_answer.set()
            winner = await running
            assert [len(origin.requests) for origin in it.origins] == [1] * len(it.origins)
            assert it.most_held <= MAX_ASKED + 1  # the kept answer's own load goes on
            it.end(winner)
            assert it.is_clean

    play(story)


@pytest.mark.parametrize("is_answer_kept", [False, True])
def test_client_that_leaves_ends_every_exchange(is_answer_kept: bool) -> None:
    async def story() -> None:
        async with scene(SILENCE, NOT_FOUND, SILENCE) as it:
            running = asyncio.create_task(it.run())
            await asyncio.gather(*(origin.arrived.wait() for origin in it.origins))
            while it.counts["status 404"] == 0:
                await asyncio.sleep(0)
            if is_answer_kept:
                await it.settle()
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            await asyncio.gather(it.origins[0].ended.wait(), it.origins[2].ended.wait())
            assert it.is_clean

    play(story)


def test_cancellation_in_every_turn_of_the_loop_leaves_nothing_behind() -> None:
    async def story() -> None:
        for turns in range(40):
            async with scene(NOT_FOUND, OK, CUT) as it:
                running = asyncio.create_task(it.run())
                for _ in range(turns):
                    await asyncio.sleep(0)
                running.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    it.end(await running)
                await it.settle()
                assert it.is_clean, turns

    play(story)


def test_upstream_removed_by_force_is_not_waited_for() -> None:
    async def story() -> None:
        async with scene(SILENCE, NOT_FOUND) as it:
            asking = it.asking()
            running = asyncio.create_task(asking.run(it.upstreams()))
            await it.origins[0].arrived.wait()
            asking.cut_off(("0",), "removed")
            winner = await asyncio.wait_for(running, 10)
            assert winner.response.status == 404
            it.end(winner)
            await it.origins[0].ended.wait()
            assert it.is_clean

    play(story)


def test_force_does_not_touch_the_connection_of_an_exchange_that_has_ended() -> None:
    async def story() -> None:
        async with scene(NOT_FOUND, NOT_FOUND) as it:
            asking = it.asking()
            it.end(await asking.run(it.upstreams()))
            taken = [it.pool.try_idle(it.pool.target(upstream)[0]) for upstream in it.upstreams()]
            asking.cut_off(("0", "1"), "removed")
            assert [connection is not None and connection.is_closed for connection in taken] == [False] * 2

    play(story)


def test_origin_with_a_key_gets_it_and_one_without_gets_the_clients() -> None:
    async def story() -> None:
        async with scene(NOT_FOUND, NOT_FOUND) as it:
            fields = "authorization: Bearer client\r\nx-api-key: client\r\nconnection: keep-alive\r\n"
            it.end(await it.run(fields=fields, keys=("own", None)))
            first, second = (origin.requests[0] for origin in it.origins)
            assert b"authorization: Bearer own\r\n" in first and b"client" not in first
            assert b"authorization: Bearer client\r\nx-api-key: client\r\n" in second

    play(story)


def test_cancel_is_a_post_without_a_body_and_drops_the_clients() -> None:
    async def story() -> None:
        async with scene(OK) as it:
            fields = "content-type: application/json\r\ncontent-length: 7\r\n"
            it.end(await it.run("POST", "/v1/responses/r/cancel", fields))
            (request,) = it.origins[0].requests
            assert request.startswith(b"POST /v1/responses/r/cancel HTTP/1.1\r\n")
            assert b"content-length: 0\r\n" in request and b"content-length: 7" not in request

    play(story)


def test_reused_connection_that_dies_before_any_byte_is_replaced_once() -> None:
    async def story() -> None:
        async with scene(OK) as it:
            it.end(await it.run())
            it.origins[0].answer = CUT
            again = asyncio.create_task(it.run())
            while it.counts["reuse retry"] == 0:
                await asyncio.sleep(0)
            it.origins[0].answer = OK
            it.end(await again)
            assert len(it.origins[0].requests) == 3

    play(story)


def test_connections_of_whole_answers_that_lost_are_used_again() -> None:
    async def story() -> None:
        async with scene(BROKEN, NOT_FOUND) as it:
            for _ in range(3):
                it.end(await it.run())
            assert not it.origins[0].ended.is_set() and not it.origins[1].ended.is_set()

    play(story)
