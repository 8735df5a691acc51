from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshd.api.block_keys import block_keys
from meshd.api.endpoints import ENDPOINTS, EndpointRegistry
from meshd.api.facts import read_facts
from meshd.api.prefix_key import key_position, pack_token_ids, prefix_key
from meshd.api.view import NEEDS_RANK_FREE, NEEDS_TOKENS, RoutingView
from meshd.errors import MeshError
from meshd.memory import Segment
from meshd.metrics.cells import BufferedCounter
from meshd.metrics.cells import Counter as MetricCounter
from meshd.routing.conditions import Conditions
from meshd.routing.conditions import segment_bytes as conditions_bytes
from meshd.routing.load import LoadTable, segment_bytes
from meshd.routing.placement import Placement, Placer, SessionUnassigned, Topology
from meshd.routing.policies.table import PolicyParts, policy_table
from meshd.routing.prefix_index import MIN_BYTES, PrefixIndex
from meshd.routing.prefix_index import segment_bytes as index_bytes
from meshd.routing.registry import RegistryBoard
from meshd.routing.sessions import SessionTable
from meshd.routing.sessions import segment_bytes as sessions_bytes
from meshd.routing.upstream import Upstream

MakeUpstream = Callable[..., Upstream]

ROWS = EndpointRegistry()
CHAT = ROWS.find("POST", "/v1/chat/completions").endpoint
RESPONSES = ROWS.find("POST", "/v1/responses").endpoint
MESSAGES = ROWS.find("POST", "/v1/messages").endpoint
COUNT_TOKENS = ROWS.find("POST", "/v1/messages/count_tokens").endpoint
EMBEDDINGS = ROWS.find("POST", "/v1/embeddings").endpoint
M1 = RoutingView("m1")
ROWS = 3


class CountedMetrics:
    def __init__(self) -> None:
        self.events: Counter[tuple[str, ...]] = Counter()
        self._selections: dict[tuple[str, str], MetricCounter] = {}
        self._changed: list[BufferedCounter] = []

    def selections(self, model: str, policy: str) -> BufferedCounter:
        if (model, policy) not in self._selections:
            self._selections[model, policy] = MetricCounter(memoryview(bytearray(8)).cast("Q"), 0)
        return BufferedCounter(self._selections[model, policy], self._changed)

    def selected(self) -> dict[tuple[str, str], int]:
        """Placements by model and policy."""
        for counter in self._changed:
            counter.flush()
        return {key: counter._word[0] for key, counter in self._selections.items() if counter._word[0]}

    def decided(self, policy: str, reason: str) -> None:
        self.events["branch", reason] += 1

    def fallback(self, policy: str, reason: str) -> None:
        self.events["fallback", policy, reason] += 1


class Node:
    """A board, load cells and as many placers as a test asks for."""

    def parts(self, row: int) -> PolicyParts:
        index = PrefixIndex(self._index, row, ROWS, MIN_BYTES)
        return PolicyParts(Random(row), row, index, SessionTable(self._sessions), 1.25, 0.3, 64, 1.5)

    def __init__(self) -> None:
        self._index = Segment.create("prefix_index", index_bytes(MIN_BYTES, ROWS))
        self._sessions = Segment.create("sessions", sessions_bytes())
        self._registry = Segment.create("registry", 1 << 20)
        self.board = RegistryBoard(self._registry)
        self._conditions = Segment.create("conditions", conditions_bytes(ROWS))
        self.now_s = 1000.0
        self.cells = Segment.create("load", segment_bytes(ROWS))
        self.metrics = CountedMetrics()

    def placer(self, policy: str = "round_robin", row: int = 0, topology: Topology = "regular") -> Placer:
        table = policy_table(self.parts(row))
        board = RegistryBoard(self._registry)  # its own, as in a process of its own
        conditions = self.conditions(row)
        loads = LoadTable(self.cells, row, ROWS)
        return Placer(board, loads, table, policy, self.metrics, topology, conditions=conditions)

    def conditions(self, row: int) -> Conditions:
        """What the process of ``row`` reports."""
        return Conditions(self._conditions, row, ROWS, owner=row + 1, clock=lambda: self.now_s)

    def load(self, number: int) -> int:
        return LoadTable(self.cells, None, ROWS).load(number)


@pytest.fixture
def node() -> Node:
    return Node()


def _code(placer: Placer, view: RoutingView = M1, endpoint: object = CHAT) -> MeshError:
    with pytest.raises(MeshError) as caught:
        placer.place(endpoint, view)  # type: ignore[arg-type]
    return caught.value


def test_load_is_counted_at_selection_and_given_back_once(node: Node, make_upstream: MakeUpstream) -> None:
    node.board.publish([make_upstream(5)])
    placer = node.placer()
    placement = placer.place(CHAT, M1)
    assert (placement.upstream.number, placement.policy, placement.reason) == (
        5,
        "round_robin",
        "policy:round_robin",
    )
    assert node.load(5) == 1
    placer.release(placement)
    assert node.load(5) == 0
    with pytest.raises(RuntimeError, match="released twice"):
        placer.release(placement)
    assert node.load(5) == 0
    assert node.metrics.selected() == {("m1", "round_robin"): 1} and not node.metrics.events


def test_empty_registry_is_no_workers_with_advice(node: Node) -> None:
    for view in (M1, RoutingView("")):
        error = _code(node.placer(), view)
        assert (error.code, error.status, error.retry_after_s) == ("no_workers", 503, 5)


def test_unknown_model_is_not_found_unless_an_upstream_serves_any(
    node: Node, make_upstream: MakeUpstream
) -> None:
    node.board.publish([make_upstream(0, is_healthy=False)])
    placer = node.placer()
    error = _code(placer, RoutingView("nobody's"))
    assert (error.code, error.status) == ("model_not_found", 404)
    node.board.publish([make_upstream(0), make_upstream(1, models=("unknown",))])
    assert placer.place(CHAT, RoutingView("nobody's")).upstream.number == 1


def test_messages_quote_the_model_cut_and_without_control_characters(
    node: Node, make_upstream: MakeUpstream
) -> None:
    node.board.publish([make_upstream(0)])
    message = _code(node.placer(), RoutingView("a\nb\x1b" + "é" * 300)).message
    assert "a?b?" in message and "\n" not in message
    assert message.count("é") == 126  # 256 bytes in all
    assert "10.0.0.1" not in message


def test_api_that_no_upstream_of_the_model_lists_is_unsupported_even_when_unhealthy(
    node: Node, make_upstream: MakeUpstream
) -> None:
    labels = {"mesh.apis": "/v1/messages"}
    node.board.publish([make_upstream(0, labels=labels, is_healthy=False), make_upstream(1, models=("m2",))])
    placer = node.placer()
    assert _code(placer).code == "unsupported_api"
    assert _code(placer, M1, COUNT_TOKENS).code == "no_available_workers"


def test_only_able_upstreams_are_candidates(node: Node, make_upstream: MakeUpstream) -> None:
    node.board.publish(
        [make_upstream(0, labels={"mesh.apis": "/generate"}), make_upstream(1), make_upstream(2)]
    )
    placer = node.placer()
    assert {placer.place(CHAT, M1).upstream.number for _ in range(6)} == {1, 2}


@pytest.mark.parametrize("change", [{"is_healthy": False}, {"state": "draining"}, {"state": "starting"}])
def test_unavailable_upstreams_get_nothing(
    change: dict[str, object], node: Node, make_upstream: MakeUpstream
) -> None:
    node.board.publish([make_upstream(0, **change), make_upstream(1)])
    placer = node.placer()
    assert {placer.place(CHAT, M1).upstream.number for _ in range(4)} == {1}
    node.board.publish([make_upstream(0, **change)])
    error = _code(placer)
    assert (error.code, error.retry_after_s) == ("no_available_workers", 5)


def test_tried_upstreams_are_left_out_while_another_remains(node: Node, make_upstream: MakeUpstream) -> None:
    node.board.publish([make_upstream(n) for n in range(3)])
    for policy in (
        "random",
        "round_robin",
        "power_of_two",
        "least_load",
        "prefix_hash",
        "cache_aware",
        "consistent_hash",
        "dp_sticky",
    ):
        placer = node.placer(policy)
        view = RoutingView("m1", token_ids=b"abcd", key_position=1)
        for tried in ([0], [0, 2], {1}):
            assert placer.place(CHAT, view, tried).upstream.number not in tried
        assert placer.place(CHAT, view, {0, 1, 2}).upstream.number in (0, 1, 2)


def test_stored_state_needs_one_origin_or_shared_state(node: Node, make_upstream: MakeUpstream) -> None:
    view = RoutingView("m1", has_state=True)
    shared = {"mesh.responses_state": "shared"}
    cases: list[tuple[list[Upstream], bool]] = [
        ([make_upstream(0)], True),
        ([make_upstream(0), make_upstream(1)], False),
        ([make_upstream(0), make_upstream(1, is_healthy=False)], False),
        ([make_upstream(0), make_upstream(1, models=("m2",))], True),
        ([make_upstream(0), make_upstream(1, labels={"mesh.apis": "/generate"})], True),
        ([make_upstream(rank, base_url="http://h:1", dp_rank=rank) for rank in range(2)], True),
        ([make_upstream(0, labels=shared), make_upstream(1, labels=shared)], True),
        ([make_upstream(0, labels=shared), make_upstream(1)], False),
        (
            [make_upstream(0, labels=shared), make_upstream(1, labels={"mesh.responses_state": "Shared"})],
            False,
        ),
    ]
    placer = node.placer()
    for upstreams, is_placed in cases:
        node.board.publish(upstreams)
        if is_placed:
            placer.place(RESPONSES, view)
        else:
            error = _code(placer, view, RESPONSES)
            assert (error.code, error.status) == ("stateful_routing_unsupported", 501)
        placer.place(RESPONSES, M1)


@pytest.mark.parametrize(
    "body",
    [
        {"previous_response_id": "r"},
        {"conversation": "c"},
        {"input": [{"type": "item_reference", "id": "i"}]},
        {"input": [{"id": "i"}]},
        {"input": [{"id": "i", "type": None}]},
    ],
)
def test_each_form_of_state_is_refused_on_two_origins_and_served_by_one_of_four_ranks_or_shared(
    body: dict[str, object], node: Node, make_upstream: MakeUpstream
) -> None:
    view = read_facts(RESPONSES, {"model": "m1", **body})
    placer = node.placer()
    node.board.publish([make_upstream(0), make_upstream(1, is_healthy=False)])
    assert _code(placer, view, RESPONSES).code == "stateful_routing_unsupported"
    node.board.publish([make_upstream(n, base_url="http://h:1", dp_rank=n) for n in range(4)])
    assert placer.place(RESPONSES, view).upstream.base_url == "http://h:1"
    node.board.publish([make_upstream(n, labels={"mesh.responses_state": "shared"}) for n in range(2)])
    placer.place(RESPONSES, view)


def test_an_item_with_an_id_and_another_type_is_no_state(node: Node, make_upstream: MakeUpstream) -> None:
    node.board.publish([make_upstream(0), make_upstream(1)])
    items = [{"id": "x", "type": "message", "role": "user", "content": "Hi"}, {"id": "x", "role": "user"}]
    node.placer().place(RESPONSES, read_facts(RESPONSES, {"model": "m1", "input": items, "background": True}))


def test_stateful_request_to_unavailable_upstreams_of_one_origin_is_a_503(
    node: Node, make_upstream: MakeUpstream
) -> None:
    node.board.publish([make_upstream(0, is_healthy=False)])
    assert _code(node.placer(), RoutingView("m1", has_state=True), RESPONSES).code == "no_available_workers"


def test_topology_pd_refuses_what_prefill_and_decode_do_not_offer_before_anything_else(
    node: Node, make_upstream: MakeUpstream
) -> None:
    placer = node.placer(topology="pd")
    passthrough = EndpointRegistry(["/x"]).find("GET", "/x").endpoint
    for endpoint in (MESSAGES, RESPONSES, COUNT_TOKENS, EMBEDDINGS, passthrough):
        error = _code(placer, M1, endpoint)
        assert (error.code, error.status) == ("unsupported_api_topology", 501)
    assert _code(placer).code == "no_workers"


def test_passthrough_goes_to_an_upstream_that_lists_its_path_the_least_loaded_first(
    node: Node, make_upstream: MakeUpstream
) -> None:
    registry = EndpointRegistry(["/v1/*"])
    score, rerank = (registry.find("POST", path).endpoint for path in ("/v1/score", "/v1/rerank"))
    node.board.publish(
        [make_upstream(0, labels={"mesh.apis": "/v1/score"}), make_upstream(1), make_upstream(2)]
    )
    placer = node.placer("prefix_hash")
    assert [placer.place(rerank, RoutingView("")).upstream.number for _ in range(3)] == [1, 2, 1]
    assert [placer.place(score, RoutingView("")).upstream.number for _ in range(2)] == [0, 0]
    node.board.publish([make_upstream(0, labels={"mesh.apis": "/v1/score"})])
    assert _code(placer, RoutingView(""), rerank).code == "unsupported_api"
    assert placer.place(score, RoutingView("")).policy == "least_load"


def test_rank_free_bodies_are_needed_only_where_a_rank_serves_the_endpoint(
    node: Node, make_upstream: MakeUpstream
) -> None:
    placer = node.placer("prefix_hash")
    node.board.publish([make_upstream(0)])
    assert {placer.needs_of(endpoint) & NEEDS_RANK_FREE for endpoint in ENDPOINTS} == {0}
    node.board.publish([make_upstream(0), make_upstream(1, base_url="http://h:1", dp_rank=0)])
    assert [e.name for e in ENDPOINTS if placer.needs_of(e) & NEEDS_RANK_FREE] == [
        "chat",
        "completions",
        "generate",
    ]
    labels = {"mesh.apis": "/v1/messages, /v1/responses"}
    node.board.publish([make_upstream(1, base_url="http://h:1", dp_rank=0, labels=labels)])
    assert {e.name for e in ENDPOINTS if placer.needs_of(e) & NEEDS_RANK_FREE} == {
        "chat",
        "completions",
        "generate",
        "messages",
        "count_tokens",
        "responses",
    }


def test_an_endpoint_that_picks_by_least_load_needs_no_tokens(
    node: Node, make_upstream: MakeUpstream
) -> None:
    placer = node.placer("prefix_hash")
    assert (placer.needs_of(CHAT), placer.needs_of(COUNT_TOKENS)) == (NEEDS_TOKENS, 0)


def test_origin_that_is_held_counts_as_load_until_it_is_released(
    node: Node, make_upstream: MakeUpstream
) -> None:
    endpoint = EndpointRegistry().find("GET", "/v1/responses/r").endpoint
    node.board.publish([make_upstream(n, base_url="http://h:1", dp_rank=n) for n in range(4)])
    placer = node.placer()
    (origin,) = placer.origins(endpoint)
    held = placer.hold(origin)
    assert [node.load(n) for n in range(4)] == [1, 0, 0, 0]
    placer.release(held)
    assert [node.load(n) for n in range(4)] == [0, 0, 0, 0]
    assert not node.metrics.events


def test_interleaved_models_are_each_spread_evenly(node: Node, make_upstream: MakeUpstream) -> None:
    node.board.publish([make_upstream(n, models=("m1", "m2")) for n in range(2)])
    placer = node.placer()
    spread = Counter(
        (m, placer.place(CHAT, RoutingView(m)).upstream.number) for _ in range(6) for m in ("m1", "m2")
    )
    assert set(spread.values()) == {3} and len(spread) == 4


def test_turns_go_on_through_new_generations(node: Node, make_upstream: MakeUpstream) -> None:
    placer = node.placer()
    numbers = []
    for _ in range(4):
        node.board.publish([make_upstream(0), make_upstream(1)])
        numbers.append(placer.place(CHAT, M1).upstream.number)
    assert numbers == [0, 1, 0, 1]


def test_next_placement_after_a_publication_uses_the_new_generation(
    node: Node, make_upstream: MakeUpstream
) -> None:
    node.board.publish([make_upstream(0)])
    placer = node.placer()
    old = placer.place(CHAT, M1)
    node.board.publish([make_upstream(1)])
    assert placer.place(CHAT, M1).upstream.number == 1
    placer.release(old)
    assert (node.load(0), node.load(1)) == (0, 1)


def test_endpoint_that_picks_by_least_load_ignores_the_policy(
    node: Node, make_upstream: MakeUpstream
) -> None:
    node.board.publish([make_upstream(0), make_upstream(1)])
    placer = node.placer("prefix_hash")
    placements = [placer.place(COUNT_TOKENS, M1) for _ in range(4)]
    assert [placement.upstream.number for placement in placements] == [0, 1, 0, 1]
    assert {placement.policy for placement in placements} == {"least_load"}


def test_label_policy_of_the_first_upstream_is_the_policy_of_its_model(
    node: Node, make_upstream: MakeUpstream
) -> None:
    node.board.publish(
        [
            make_upstream(0, models=("m1", "m2"), labels={"policy": "no such policy"}),
            make_upstream(1, labels={"policy": "least_load"}),
            make_upstream(2, labels={"policy": "random"}),
        ]
    )
    placer = node.placer()
    assert placer.place(CHAT, M1).policy == "least_load"
    assert placer.place(CHAT, RoutingView("m2")).policy == "round_robin"
    assert placer.place(CHAT, RoutingView("")).policy == "round_robin"


def test_needs_are_those_of_the_policies_in_force(node: Node, make_upstream: MakeUpstream) -> None:
    placer = node.placer("round_robin")
    assert placer.needs == 0
    node.board.publish([make_upstream(0, labels={"policy": "prefix_hash"})])
    assert placer.needs == NEEDS_TOKENS
    assert node.placer("prefix_hash", row=1).needs == NEEDS_TOKENS


def test_prefix_hash_counts_its_branches_and_what_it_could_not_use(
    node: Node, make_upstream: MakeUpstream
) -> None:
    node.board.publish([make_upstream(n) for n in range(3)])
    placer = node.placer("prefix_hash")
    view = RoutingView("m1", token_ids=b"\x05\0\0\0", key_position=0x59FFD8386B3E7F78)
    placement = placer.place(CHAT, view)
    assert (placement.upstream.number, placement.reason) == (2, "ring_hit")
    error = _code(placer)
    assert (error.code, error.retry_after_s) == ("policy_returned_none", 1)
    node.board.publish([make_upstream(0, is_healthy=False), make_upstream(1, is_healthy=False)])
    assert _code(placer, view).code == "no_available_workers"
    assert node.metrics.events == {
        ("branch", "ring_hit"): 1,
        ("branch", "no_tokens"): 1,
        ("fallback", "prefix_hash", "no_tokens"): 1,
        ("branch", "no_healthy_workers"): 1,
    }


def test_single_candidate_is_picked_without_asking_the_policy(
    node: Node, make_upstream: MakeUpstream
) -> None:
    node.board.publish([make_upstream(0)])
    placement = node.placer("prefix_hash").place(CHAT, M1)
    assert placement.reason == "policy:prefix_hash"
    assert not any(key[0] == "branch" for key in node.metrics.events)


def _view(text: bytes = b"", token_ids: tuple[int, ...] = (), session_key: bytes = b"") -> RoutingView:
    """A view as a prepare job makes it, with all that any policy reads."""
    ids = pack_token_ids(token_ids)
    key = prefix_key(ids)
    return RoutingView(
        "m1",
        token_ids=ids,
        prefix_key=key,
        key_position=key_position(key),
        text_bytes=len(text),
        block_keys=block_keys("m1", text),
        session_key=session_key,
    )


def test_single_candidate_is_recorded_as_holder_of_the_prefix(
    node: Node, make_upstream: MakeUpstream
) -> None:
    node.board.publish([make_upstream(0)])
    placer, view = node.placer("cache_aware"), _view(b"a" * 1000)
    assert placer.place(CHAT, view).reason == "policy:cache_aware"
    node.board.publish([make_upstream(1), make_upstream(2), make_upstream(0)])
    placement = node.placer("cache_aware", row=1).place(CHAT, view)
    assert (placement.upstream.number, placement.reason) == (0, "cache_hit")


def test_single_candidate_is_given_new_sessions_by_the_controller(
    node: Node, make_upstream: MakeUpstream
) -> None:
    node.board.publish([make_upstream(0)])
    view = _view(session_key=b"s-1")
    with pytest.raises(SessionUnassigned) as caught:
        node.placer("dp_sticky").place(CHAT, view)
    assert caught.value.numbers == (0,)
    view.assigned = 0
    assert node.placer("dp_sticky").place(CHAT, view).reason == "new_session"


@pytest.mark.parametrize(
    ("policy", "reason"),
    [
        ("cache_aware", "no_text"),
        ("prefix_hash", "no_tokens"),
        ("consistent_hash", "no_session_key"),
        ("dp_sticky", "no_session_key"),
    ],
)
def test_policy_that_could_not_use_its_input_is_counted(
    node: Node, make_upstream: MakeUpstream, policy: str, reason: str
) -> None:
    """routing.md behaviour 28; with its input the same policy counts nothing."""
    node.board.publish([make_upstream(0), make_upstream(1)])
    placer, full = node.placer(policy), _view(b"abc", (1, 2), b"s-1")
    full.assigned = 1
    placer.place(CHAT, full)
    assert not [key for key in node.metrics.events if key[0] == "fallback"]
    for _ in range(3):
        try:
            placer.place(CHAT, _view())
        except MeshError as error:
            assert (policy, error.code) == ("prefix_hash", "policy_returned_none")
    counted = {key: n for key, n in node.metrics.events.items() if key[0] == "fallback"}
    assert counted == {("fallback", policy, reason): 3}


@pytest.mark.parametrize("policy", ["random", "round_robin", "power_of_two", "least_load"])
def test_policy_without_an_input_never_falls_back(
    node: Node, make_upstream: MakeUpstream, policy: str
) -> None:
    node.board.publish([make_upstream(0), make_upstream(1)])
    node.placer(policy).place(CHAT, _view())
    assert not [key for key in node.metrics.events if key[0] == "fallback"]


@pytest.mark.parametrize("policy", ["cache_aware", "prefix_hash"])
def test_thousand_distinct_prompts_spread_within_1_15_of_the_mean(
    node: Node, make_upstream: MakeUpstream, policy: str
) -> None:
    """Three processes, eight upstreams, 16 requests in flight on each."""
    node.board.publish([make_upstream(number) for number in range(8)])
    placers = [node.placer(policy, row) for row in range(3)]
    random = Random(11)
    running: deque[tuple[Placer, Placement]] = deque()
    counts: Counter[int] = Counter()
    for number in range(1000):
        placer = placers[random.randrange(3)]
        ids = tuple(random.randrange(50_000) for _ in range(40))
        placement = placer.place(CHAT, _view(b"prompt %d %d" % (number, random.getrandbits(64)), ids))
        counts[placement.upstream.number] += 1
        running.append((placer, placement))
        if len(running) > 16 * 8:
            owner, oldest = running.popleft()
            owner.release(oldest)
    assert len(counts) == 8 and max(counts.values()) <= 1.15 * 1000 / 8, counts


@pytest.mark.parametrize("policy", ["cache_aware", "prefix_hash"])
def test_turns_of_a_conversation_in_any_process_go_to_one_upstream(
    node: Node, make_upstream: MakeUpstream, policy: str
) -> None:
    """400 turns in 40 conversations, one after the other: at least 99 % stay."""
    node.board.publish([make_upstream(number) for number in range(8)])
    placers = [node.placer(policy, row) for row in range(3)]
    random = Random(12)
    texts = [random.randbytes(800) for _ in range(40)]
    homes: dict[int, int] = {}
    stayed = 0
    for turn in range(11):
        for number, text in enumerate(texts):
            placer = placers[random.randrange(3)]
            placement = placer.place(CHAT, _view(text, tuple(text[:256])))
            placer.release(placement)
            stayed += turn > 0 and homes[number] == placement.upstream.number
            homes[number] = placement.upstream.number
            texts[number] = text + random.randbytes(300)
    assert stayed >= 396


def test_prefix_hash_agrees_between_processes_and_sees_their_loads(
    node: Node, make_upstream: MakeUpstream
) -> None:
    node.board.publish([make_upstream(n) for n in range(3)])
    one, other = node.placer("prefix_hash", row=0), node.placer("prefix_hash", row=1)
    view = RoutingView("m1", token_ids=b"\x05\0\0\0", key_position=0x59FFD8386B3E7F78)
    first = one.place(CHAT, view)
    one.release(first)
    assert other.place(CHAT, view).upstream == first.upstream
    assert node.load(first.upstream.number) == 1
    beside = one.place(CHAT, view)  # limit (1 + 1) / 3 × 1.25 = 0.83, below the owner's 1
    assert (beside.upstream.number, beside.reason) == (0, "load_balance_walk")


def test_model_label_is_bounded(node: Node, make_upstream: MakeUpstream) -> None:
    node.board.publish([make_upstream(0, models=()), make_upstream(1)])
    placer = node.placer()
    for model in ("m1", "", "invented"):
        placer.place(CHAT, RoutingView(model))
    assert {model for model, _ in node.metrics.selected()} == {"m1", "unknown", "other"}


def test_invented_model_names_do_not_grow_memory(node: Node, make_upstream: MakeUpstream) -> None:
    node.board.publish([make_upstream(0, models=()), make_upstream(1, models=())])
    placer = node.placer()
    for count in range(10_000):
        placer.release(placer.place(CHAT, RoutingView(f"model-{count}")))
    assert len(placer._routes) <= 4096 and len(placer._policies._kept) <= 4096


def test_unknown_default_policy_is_refused(node: Node) -> None:
    with pytest.raises(ValueError, match="no policy 'nope'"):
        node.placer("nope")


@settings(max_examples=30, deadline=None)
@given(
    policy=st.sampled_from(
        [
            "random",
            "round_robin",
            "power_of_two",
            "least_load",
            "prefix_hash",
            "cache_aware",
            "consistent_hash",
        ]
    ),
    steps=st.lists(st.integers(0, 5), max_size=40),
    seed=st.integers(0, 99),
)
def test_every_load_is_zero_after_all_placements_ended(policy: str, steps: list[int], seed: int) -> None:
    node, rng = Node(), Random(seed)
    placers = [node.placer(policy, row=row) for row in range(ROWS)]
    held: list[tuple[Placer, Placement]] = []
    for step in steps:
        if step == 0:
            fleet = rng.sample(range(6), rng.randrange(4))
            node.board.publish(
                [
                    Upstream(
                        number=n,
                        id="x",
                        base_url=f"http://h{n}",
                        is_healthy=rng.random() < 0.8,
                        state="active",
                    )
                    for n in fleet
                ]
            )
        elif step <= 2 and held:
            placer, placement = held.pop(rng.randrange(len(held)))
            placer.release(placement)
        else:
            placer = rng.choice(placers)
            try:
                held.append(
                    (placer, placer.place(CHAT, RoutingView("m", token_ids=b"1234", key_position=step)))
                )
            except MeshError as error:
                assert error.code in ("no_workers", "no_available_workers")
        assert [node.load(n) for n in range(6)] == [
            sum(p.upstream.number == n for _, p in held) for n in range(6)
        ]
    for placer, placement in held:
        placer.release(placement)
    assert [node.load(n) for n in range(6)] == [0] * 6
