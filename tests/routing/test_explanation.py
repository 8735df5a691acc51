"""An explanation names the upstream that the same request is then placed on, and leaves no trace."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import pytest

from meshd.api.block_keys import block_keys
from meshd.api.endpoints import EndpointRegistry
from meshd.api.prefix_key import key_position, pack_token_ids, prefix_key
from meshd.api.view import RoutingView
from meshd.errors import MeshError
from meshd.memory import Segment
from meshd.metrics.cells import BufferedCounter, Counter
from meshd.routing import conditions as condition_segment
from meshd.routing import load as load_segment
from meshd.routing import prefix_index as index_segment
from meshd.routing import sessions as session_segment
from meshd.routing.condition_cells import LINE_WORDS, STATE
from meshd.routing.conditions import HALF_OPEN, OPEN, Conditions
from meshd.routing.explanation import explanation
from meshd.routing.load import LoadTable
from meshd.routing.placement import Placer, SessionUnassigned
from meshd.routing.policies.table import PolicyParts, policy_table
from meshd.routing.prefix_index import MIN_BYTES, PrefixIndex
from meshd.routing.registry import RegistryBoard
from meshd.routing.sessions import SessionId, SessionLedger
from meshd.routing.upstream import Upstream

MakeUpstream = Callable[..., Upstream]
CHAT = EndpointRegistry().find("POST", "/v1/chat/completions").endpoint
CERTAIN = ("round_robin", "least_load", "cache_aware", "prefix_hash", "consistent_hash", "dp_sticky")
ROWS = 3


class Counted:
    def __init__(self) -> None:
        self.events: list[str] = []

        self.placed = memoryview(bytearray(8)).cast("Q")
        self._changed: list[BufferedCounter] = []

    def selections(self, model: str, policy: str) -> BufferedCounter:
        return BufferedCounter(Counter(self.placed, 0), self._changed)

    def written(self) -> bytes:
        """All that was counted so far."""
        for counter in self._changed:
            counter.flush()
        return repr((self.events, self.placed[0])).encode()

    def decided(self, policy: str, reason: str) -> None:
        self.events.append(reason)

    def fallback(self, policy: str, reason: str) -> None:
        self.events.append(reason)


class Node:
    def __init__(self, policy: str, upstreams: list[Upstream]) -> None:
        self.now_s = 1000.0
        self.board = RegistryBoard(Segment.create("registry", 1 << 20))
        self.board.publish(upstreams)
        self._loads = Segment.create("load", load_segment.segment_bytes(ROWS))
        self._index = Segment.create("prefix_index", index_segment.segment_bytes(MIN_BYTES, ROWS))
        self._sessions = Segment.create("sessions", session_segment.segment_bytes())
        cells = self._cells = Segment.create("conditions", condition_segment.segment_bytes(ROWS))
        self.conditions, self.others = (
            Conditions(cells, row, ROWS, owner=row + 1, clock=lambda: self.now_s) for row in (0, 1)
        )
        self.ledger = SessionLedger(self._sessions, lambda: int(self.now_s * 1e9))
        self.metrics = Counted()
        self.loads = LoadTable(self._loads, 0, ROWS)
        index = PrefixIndex(self._index, 0, ROWS, MIN_BYTES)
        parts = PolicyParts(Random(1), 1, index, self.ledger, 1.25, 0.3, 64, 1.5)
        self.placer = Placer(
            self.board, self.loads, policy_table(parts), policy, self.metrics, conditions=self.conditions
        )

    def explain(self, view: RoutingView, max_wait_s: float = 0.0) -> dict[str, Any]:
        """Explain, as often as a new session asks for its assignment first."""
        while True:
            try:
                rehearsal = self.placer.rehearse(CHAT, view, max_wait_s)
                found = explanation(rehearsal, CHAT, view, self.conditions)
                return json.loads(json.dumps(found))
            except SessionUnassigned as unassigned:
                view.assigned = self._ask(view, unassigned.numbers, self.ledger.choose)

    def place(self, view: RoutingView) -> tuple[str, str]:
        while True:
            try:
                placement = self.placer.place(CHAT, view)
                return placement.upstream.url, placement.reason
            except SessionUnassigned as unassigned:
                view.assigned = self._ask(view, unassigned.numbers, self.ledger.assign)

    def _ask(self, view: RoutingView, numbers: Any, choose: Any) -> int:
        return choose(SessionId.of(view.session_key), numbers, self.loads.load)

    def set_breaker(self, number: int, state: int) -> None:
        self.conditions.cells.breaker_words[number * LINE_WORDS + STATE] = state
        self.conditions.cells.watched[0] += 1

    def trace(self) -> tuple[bytes, ...]:
        """All that a placement could have changed."""
        segments = (self._loads, self._index, self._sessions, self._cells)
        return (*(segment.bytes.tobytes() for segment in segments), self.metrics.written())


def requests(count: int, seed: int = 7) -> Iterator[Callable[[], RoutingView]]:
    """Makers of views of the same request: some share a beginning, a session, or have neither."""
    rng = Random(seed)
    for number in range(count):
        text = b"system prompt " * 40 * (number % 3) + b"question %d" % rng.randrange(count // 2)
        ids = pack_token_ids([len(text), text[-1], number % 5] if number % 7 else [])
        session = b"s-%d" % rng.randrange(6) if number % 4 else b""

        def make(text: bytes = text, ids: bytes = ids, session: bytes = session) -> RoutingView:
            key = prefix_key(ids)
            return RoutingView(
                "m1",
                token_ids=ids,
                prefix_key=key,
                key_position=key_position(key),
                text_bytes=len(text),
                block_keys=block_keys("m1", text),
                session_key=session,
            )

        yield make


@pytest.mark.parametrize("policy", CERTAIN)
def test_explanation_names_the_upstream_that_the_request_is_then_sent_to(
    policy: str, make_upstream: MakeUpstream
) -> None:
    node = Node(policy, [make_upstream(number) for number in range(5)])
    rng, explained, nobody = Random(3), 0, 0
    for make in requests(150):
        try:
            told = node.explain(make())
        except MeshError as error:
            with pytest.raises(MeshError) as caught:
                node.place(make())
            assert caught.value.code == error.code == "policy_returned_none"
            nobody += 1
            continue
        assert (told["chosen"], told["reason"]) == node.place(make())
        assert told["policy"] == policy and [row["score"] for row in told["candidates"]] == [None] * 5
        explained += 1
        if rng.random() < 0.1:
            node.conditions.derank(rng.randrange(5), node.now_s + 0.5)
            node.now_s += 1.0
    assert explained + nobody == 150 and (nobody > 0) == (policy == "prefix_hash")


@pytest.mark.parametrize("policy", [*CERTAIN, "random", "power_of_two"])
def test_explanation_leaves_no_trace(policy: str, make_upstream: MakeUpstream) -> None:
    node = Node(policy, [make_upstream(number) for number in range(5)])
    for make in requests(20):
        if make().token_ids:
            node.place(make())
    node.set_breaker(2, HALF_OPEN)
    before = node.trace()
    for make in requests(60, seed=8):
        if make().token_ids:
            first, second = node.explain(make()), node.explain(make())
            assert first == second or policy not in CERTAIN
    assert node.trace() == before


def test_each_candidate_is_told_with_its_load_and_its_share_of_the_prefix(
    make_upstream: MakeUpstream,
) -> None:
    node = Node("cache_aware", [make_upstream(number) for number in range(3)])
    text = b"x" * 400

    def view(text: bytes) -> RoutingView:
        return RoutingView("m1", text_bytes=len(text), block_keys=block_keys("m1", text))

    first, _ = node.place(view(text))
    told = node.explain(view(text[:256] + b"y" * 144))
    assert (told["chosen"], told["reason"], told["policy"]) == (first, "cache_hit", "cache_aware")
    rows = {row["worker"]: (row["load"], row["matched"]) for row in told["candidates"]}
    assert rows.pop(first) == (1, 0.64)
    assert list(rows.values()) == [(0, 0.0)] * 2


def test_every_other_upstream_is_told_with_the_first_reason_that_applies(make_upstream: MakeUpstream) -> None:
    apis = {"mesh.apis": "/v1/embeddings"}
    node = Node(
        "least_load",
        [
            make_upstream(0, models=("other",), is_healthy=False),
            make_upstream(1, labels=apis, is_healthy=False),
            make_upstream(2, is_healthy=False),
            make_upstream(3, state="starting"),
            make_upstream(4, state="draining"),
            make_upstream(5, state="draining"),
            make_upstream(6),
            make_upstream(7),
            make_upstream(8),
            make_upstream(9),
        ],
    )
    node.set_breaker(5, OPEN)
    node.set_breaker(6, OPEN)
    node.set_breaker(9, HALF_OPEN)
    node.conditions.cool_down(7, node.now_s + 5)
    node.conditions.derank(8, node.now_s + 5)
    told = node.explain(RoutingView("m1"))
    assert [row["worker"] for row in told["candidates"]] == ["http://10.0.0.10:8000"]
    assert [row["matched"] for row in told["candidates"]] == [None]
    assert [(row["worker"], row["reason"]) for row in told["excluded"]] == [
        (f"http://10.0.0.{number + 1}:8000", reason)
        for number, reason in enumerate(
            [
                "wrong_model",
                "api_unsupported",
                "unhealthy",
                "unhealthy",
                "draining",
                "circuit_open",
                "circuit_open",
                "cooling_down",
                "de_ranked",
            ]
        )
    ]
    assert node.others.try_trial(9), "the explanation has begun no trial"
    told = node.explain(RoutingView("m1"))
    assert told["chosen"] == "http://10.0.0.9:8000", "de-ranked, but the only one left"
    assert told["excluded"][-1] == {"worker": "http://10.0.0.10:8000", "reason": "circuit_open"}


def test_request_that_would_wait_is_told_so_and_one_that_would_not_gets_its_error(
    make_upstream: MakeUpstream,
) -> None:
    node = Node("round_robin", [make_upstream(0)])
    node.conditions.cool_down(0, node.now_s + 20)
    told = node.explain(RoutingView("m1"), max_wait_s=30)
    assert (told["chosen"], told["reason"], told["candidates"]) == (None, "cooling_down", [])
    assert told["excluded"] == [{"worker": "http://10.0.0.1:8000", "reason": "cooling_down"}]
    with pytest.raises(MeshError) as caught:
        node.explain(RoutingView("m1"), max_wait_s=10)
    assert caught.value.code == "no_available_workers"
    with pytest.raises(MeshError) as caught:
        node.explain(RoutingView("m2"), max_wait_s=30)
    assert caught.value.code == "model_not_found"
