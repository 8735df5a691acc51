"""The attempt loop over real upstreams on the loopback; a director plays placements and keeps the books."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest
import uvloop

from meshd.api.endpoints import EndpointRegistry
from meshd.api.view import RoutingView
from meshd.errors import MeshError
from meshd.io import attempts as attempts_module
from meshd.io.account import Record
from meshd.io.attempts import Attempts, report_answer
from meshd.io.http1 import parse_request_head
from meshd.io.pool import UpstreamPool
from meshd.io.upstream import UpstreamFailure
from meshd.routing.availability import NoneAvailable
from meshd.routing.placement import Placement
from meshd.routing.retry_rules import RetryRules
from meshd.routing.upstream import Upstream
from tests.fakes.asked import attached

CHAT = "/v1/chat/completions"
BODY = b'{"model":"m1","messages":[]}'
BUSY = math.inf

pytestmark = pytest.mark.skipif(
    not attempts_module.__file__.endswith(".py"), reason="compiled code takes no stand-in for Services"
)


def reply(status: int, body: bytes = b"{}", fields: bytes = b"") -> bytes:
    return b"HTTP/1.1 %d X\r\n%bcontent-length: %d\r\n\r\n%b" % (status, fields, len(body), body)


class Server:
    """Answers its requests one after the other with ``replies``, the last of them for ever; b"" cuts."""

    def __init__(self) -> None:
        self.replies: list[bytes] = []
        self.requests: list[bytes] = []
        self.connections = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                self.requests.append(head + await reader.readexactly(len(BODY)))
                answer = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
                if not answer:
                    break
                writer.write(answer)
        writer.close()


class Scene:
    """Is ``io``, its director, its budget and the holder in one.

    ``plan``: numbers to place on; a float stands for nobody, and for the wait to the end of a cool-down.
    ``events``: what director and metrics were told, in order.
    """

    def __init__(self, servers: list[Server], urls: list[str], rules: RetryRules) -> None:
        self.servers = servers
        self.upstreams = [
            Upstream(n, f"id-{n}", url, is_healthy=True, state="active") for n, url in enumerate(urls)
        ]
        self.events: list[Any] = []
        self.plan: list[int | float] = []
        self.budget_left = 100
        self.ready_s = 0.0
        self.leg: Any = None
        self.placement: Placement | None = None
        self.record = Record(0.0)
        self.pool = UpstreamPool(asyncio.get_running_loop(), idle_timeout_s=4.0, connect_timeout_s=5.0)
        self.clock = asyncio.get_running_loop().time
        self.settings = SimpleNamespace(upstream_connect_timeout_secs=5.0)
        self.request_timeout_s = 60.0
        self.first_byte_timeout_s = 0.0
        self.retry_rules = rules
        self.director = self.budget = self
        self.needs_session = False
        self.tracing = None
        note = self.note
        self.metrics = SimpleNamespace(
            attempt_failed=note("failed"),
            upstream_response=note("status"),
            backpressure=lambda url, kind: self.events.append(kind),
            retried=lambda label: None,
            retries_exhausted=note("exhausted"),
            leg_ended=lambda url, outcome: None,
            backed_off=lambda retry, delay_s: self.events.append(("back-off", retry)),
            budget_exhausted=SimpleNamespace(inc=lambda: self.events.append("no budget")),
            outcome_drops=SimpleNamespace(inc=lambda: None),
            reuse_retries=SimpleNamespace(inc=lambda: None),
        )
        self.record.prepared_at = self.clock()

    def note(self, name: str) -> Callable[[Any], None]:
        return lambda value: self.events.append((name, value))

    # director

    def place(self, endpoint: object, view: object, tried: tuple[int, ...]) -> Placement:
        step = self.plan.pop(0)
        if isinstance(step, float):
            raise NoneAvailable(step, math.inf)
        assert self.placement is None, "the load of the failed attempt is still held"
        self.events.append(("place", step, tried))
        return Placement(self.upstreams[step], "p", "policy:p")

    def hold(self, upstream: Upstream, policy: str, reason: str) -> Placement:
        self.events.append(("hold", upstream.number))
        return Placement(upstream, policy, reason)

    def release(self, placement: Placement) -> None:
        self.events.append(("release", placement.upstream.number))

    def report(self, placement: Placement, outcome: str, began_s: float, ended_s: float) -> bool:
        self.events.append((outcome, placement.upstream.number))
        return True

    def note_busy(self, upstream: Upstream, advice: bytes | None, now_s: float) -> str:
        return "cooldown" if advice else "deranked"

    def ready_in_s(self, endpoint: object, view: object) -> float:
        return self.ready_s

    def retry_delay_s(self, retry: int) -> float:
        return self.retry_rules.delay_s(retry, lambda: 0.5)

    def note_first(self, now_s: float) -> None:
        self.events.append("first")

    def try_retry(self, now_s: float) -> bool:
        self.budget_left -= 1
        return self.budget_left >= 0

    # what the exchange does

    async def run(self, path: str = CHAT, method: str = "POST", **view: Any) -> tuple[int, bytes]:
        """Make the attempts and read the answer to its end, as its relay would."""
        head = parse_request_head(
            f"{method} {path} HTTP/1.1\r\nhost: h\r\ncontent-length: {len(BODY)}\r\n\r\n".encode(), 65536, 256
        )
        endpoint = EndpointRegistry(["/score"]).find(method, path).endpoint
        self.record.bytes_in = len(BODY)
        room: Any = SimpleNamespace(content=lambda length: BODY[:length])
        io: Any = self
        self.attempts = Attempts(io, self, head, endpoint, RoutingView("m1", **view), room)
        response = await self.attempts.run()
        assert self.placement is not None and self.attempts.authority == self.placement.upstream.url[7:]
        sink = Sink()
        attached(self.leg.connection, sink)
        await sink.ended.wait()
        report_answer(io, self, response.status, sink, self.attempts.began_at)
        return response.status, sink.body

    def of(self, *kinds: Any) -> list[Any]:
        return [event for event in self.events if (event[0] if isinstance(event, tuple) else event) in kinds]


class Sink:
    failure: UpstreamFailure | None = None
    ended_at = 0.0

    def __init__(self) -> None:
        self.body = b""
        self.ended = asyncio.Event()

    def pass_chunks(self, data: bytes, decoder: object) -> bool:
        return False

    def body_data(self, data: bytes) -> None:
        self.body += data

    def body_end(self) -> None:
        self.ended.set()

    def body_failed(self, failure: UpstreamFailure) -> None:
        self.failure = failure
        self.ended.set()


@contextlib.asynccontextmanager
async def scene(*answers: list[bytes], **rules: Any) -> AsyncIterator[Scene]:
    async with contextlib.AsyncExitStack() as stack:
        servers, urls = [], []
        for replies in answers:
            server = Server()
            server.replies = replies
            listener = await asyncio.start_server(server.serve, "127.0.0.1", 0)
            stack.callback(listener.close)
            servers.append(server)
            urls.append(f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}")
        it = Scene(servers, urls, RetryRules(**{"initial_s": 0.001, "max_s": 0.3, **rules}))
        yield it
        it.pool.close_all()


def play(story: Callable[[], Coroutine[Any, Any, None]]) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(story())


def test_first_attempt_that_succeeds_is_all_there_is() -> None:
    async def story() -> None:
        async with scene([reply(200)]) as it:
            it.plan = [0]
            assert await it.run() == (200, b"{}")
            assert it.events == [("place", 0, ()), "first", ("status", 200), ("success", 0)]
            assert it.record.attempts == 1

    play(story)


def test_load_is_given_back_before_the_next_placement_which_knows_what_was_tried() -> None:
    async def story() -> None:
        async with scene([reply(503)], [reply(502)], [reply(200)]) as it:
            it.plan = [0, 1, 2]
            assert (await it.run())[0] == 200
            assert it.of("place", "release", "success", "failure", "deranked", "back-off") == [
                ("place", 0, ()),
                "deranked",
                ("back-off", 1),
                ("release", 0),
                ("place", 1, (0,)),
                ("failure", 1),
                ("back-off", 2),
                ("release", 1),
                ("place", 2, (0, 1)),
                ("success", 2),
            ]
            assert it.of("first") == ["first"] and it.record.attempts == 3
            assert not [c for c in it.pool.busy() if c is not it.leg.connection]

    play(story)


def test_connection_of_a_retried_answer_is_reused_if_its_body_was_there_whole() -> None:
    async def story() -> None:
        long = reply(503, b"x" * 200_000)
        async with scene([reply(503, b"x" * 60_000), reply(503), reply(200)], [long]) as it:
            it.plan = [0, 1, 0, 0]
            assert (await it.run())[0] == 200
            assert it.servers[0].connections == 1
            assert [c for c in it.pool.busy() if c is not it.leg.connection] == []

    play(story)


def test_last_answer_is_relayed_when_attempts_are_used_up() -> None:
    async def story() -> None:
        async with scene(
            [reply(503, b"one")], [reply(503, b"two", b"retry-after: 0\r\n")], max_attempts=2
        ) as it:
            it.plan = [0, 1]
            assert await it.run() == (503, b"two")
            assert it.of("exhausted") == [("exhausted", "chat")]

    play(story)


def test_answer_is_relayed_at_once_without_budget_or_time_or_anybody_soon() -> None:
    async def story() -> None:
        async with scene([reply(429, b"mine")]) as it:
            it.plan, it.budget_left = [0], 0
            assert await it.run() == (429, b"mine")
            assert it.of("no budget", "back-off", "release") == ["no budget"]
        async with scene([reply(429, b"mine")], initial_s=10, max_s=20) as it:
            it.plan, it.request_timeout_s = [0], 5.0
            assert await it.run() == (429, b"mine")
            assert it.of("back-off") == [] and it.budget_left == 100
        async with scene([reply(429, b"mine")]) as it:
            it.plan, it.ready_s = [0], 0.31  # above the longest back-off
            assert await it.run() == (429, b"mine")

    play(story)


def test_kept_answer_is_taken_back_when_nobody_can_be_asked_any_more() -> None:
    async def story() -> None:
        async with scene([reply(503, b"kept" * 10_000)], max_attempts=3) as it:
            it.plan = [0, BUSY, BUSY]
            assert await it.run() == (503, b"kept" * 10_000)
            assert it.of("release", "hold") == [("release", 0), ("hold", 0)]
            assert it.placement is not None and it.placement.reason == "policy:p"
            assert it.budget_left == 99  # placements that find nobody take none

    play(story)


def test_kept_answer_that_broke_meanwhile_is_not_relayed() -> None:
    async def story() -> None:
        cut = b"HTTP/1.1 503 X\r\ncontent-length: 100\r\n\r\nshort"
        async with scene([cut, b""], initial_s=0.05) as it:
            it.plan = [0, BUSY, 0.4]  # longer than would be waited

            async def cut_it() -> None:
                while it.leg is None or it.leg.connection is None or it.leg.response is None:
                    await asyncio.sleep(0)
                it.leg.connection.fail("upstream_connection_failed", "cut")

            cutter = asyncio.create_task(cut_it())
            with pytest.raises(MeshError) as caught:
                await it.run()
            await cutter
            assert caught.value.code == "upstream_connection_failed"

    play(story)


def test_cool_down_is_waited_for_and_is_no_attempt() -> None:
    async def story() -> None:
        async with scene([reply(200)], max_attempts=1) as it:
            it.plan = [0.01, 0.02, 0]
            began_at = it.clock()
            assert (await it.run())[0] == 200
            assert it.clock() - began_at >= 0.028  # the timers of uvloop are whole milliseconds
            assert it.of("back-off") == [] and it.record.waited_s > 0.02
        async with scene([reply(200)]) as it:
            it.plan = [0.31]
            with pytest.raises(NoneAvailable):
                await it.run()
            it.plan, it.request_timeout_s = [0.2], 0.1
            with pytest.raises(NoneAvailable):
                await it.run()

    play(story)


def test_placement_that_finds_nobody_is_tried_again_without_budget() -> None:
    async def story() -> None:
        async with scene([reply(200)]) as it:
            it.plan, it.budget_left = [BUSY, BUSY, BUSY, BUSY, 0], 0
            assert (await it.run())[0] == 200
            assert it.of("first", "back-off") == [*(("back-off", n) for n in range(1, 5)), "first"]
            it.plan = [BUSY] * 5
            with pytest.raises(NoneAvailable):
                await it.run()
            assert it.plan == []

    play(story)


def test_request_that_was_sent_whole_and_got_no_head_goes_to_one_more() -> None:
    async def story() -> None:
        async with scene([b""], [b""], [reply(200)]) as it:
            it.plan = [0, 1, 2]
            with pytest.raises(MeshError) as caught:
                await it.run()
            assert caught.value.code == "upstream_connection_failed" and it.plan == [2]
            assert it.of("failure") == [("failure", 0), ("failure", 1)]

    play(story)


@pytest.mark.parametrize("case", ["creates state", "passthrough"])
def test_request_that_must_not_be_repeated_is_sent_once(case: str) -> None:
    async def story() -> None:
        path = "/v1/responses" if case == "creates state" else "/score"
        for answer in (b"", reply(503)):
            async with scene([answer], [reply(200)]) as it:
                it.plan = [0, 1]
                with contextlib.suppress(MeshError):
                    assert (await it.run(path, creates_state=case == "creates state"))[0] == 503
                assert it.plan == [1]
        async with scene([reply(200)], [reply(200)]) as it:
            it.upstreams[0] = Upstream(0, "gone", "http://127.0.0.1:1")  # nobody listens there
            it.plan = [0, 1]
            assert (await it.run(path, creates_state=case == "creates state"))[0] == 200

    play(story)


def test_safe_passthrough_request_is_repeated() -> None:
    async def story() -> None:
        async with scene([reply(503)], [reply(200)]) as it:
            it.plan = [0, 1]
            assert (await it.run("/score", "GET"))[0] == 200

    play(story)


def test_connect_ends_with_the_request_timer() -> None:
    async def story() -> None:
        async with scene([reply(200)]) as it:

            async def never(address: object) -> None:
                await asyncio.Event().wait()

            it.pool.connect = never  # type: ignore[method-assign, assignment]
            it.plan, it.request_timeout_s = [0], 0.05
            with pytest.raises(MeshError) as caught:
                await it.run()
            assert (caught.value.code, caught.value.status) == ("upstream_timeout", 504)

    play(story)


def test_upstream_removed_by_force_while_it_is_connected_to_gets_no_request() -> None:
    async def story() -> None:
        async with scene([reply(200)], [reply(200)]) as it:
            connect = it.pool.connect

            async def slowly(address: Any) -> Any:
                connection = await connect(address)
                if len(it.of("place")) == 1:
                    it.leg.cut_off("removed")
                return connection

            it.pool.connect = slowly  # type: ignore[method-assign]
            it.plan = [0, 1]
            assert (await it.run())[0] == 200
            assert [len(server.requests) for server in it.servers] == [0, 1]

    play(story)


def test_cancel_during_the_back_off_leaves_the_kept_answer_to_the_holder_alone() -> None:
    async def story() -> None:
        async with scene([reply(503, b"x" * 200_000)], initial_s=5, max_s=9) as it:
            it.plan = [0]
            running = asyncio.create_task(it.run())
            while not it.of("release"):
                await asyncio.sleep(0)
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            assert it.placement is None
            it.leg.release()
            assert it.pool.busy() == []

    play(story)
