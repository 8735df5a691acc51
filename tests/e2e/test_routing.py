"""Policies over HTTP on two I/O processes: what one of them learns, the other one knows.

The policy of a test is a label that it puts on the first upstream; the three upstreams serve two models.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import signal
import socket
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle, pairwise
from typing import Any

import pytest

from meshd.routing.policies.consistent_hash import session_position
from meshd.routing.ring_hash import HashRing
from tests.e2e.conftest import DEMO_TOKENIZER
from tests.fakes.node import Backend, Node, running, wait_until
from tests.fakes.workers import add, call, front_doors, workers

FLAGS = (
    "--io-processes", "2", "--prepare-workers", "2", "--route-headers", "--disable-health-check",
    "--tokenizer-path", DEMO_TOKENIZER, "--first-byte-timeout-secs", "5", "--retry-initial-backoff-ms", "1",
    "--retry-max-backoff-ms", "5", "--disable-circuit-breaker", "--retry-budget-min", "100000",
)  # fmt: skip
CERTAIN = ("round_robin", "least_load", "cache_aware", "prefix_hash", "consistent_hash", "dp_sticky")
WORDS = ("river", "lake", "delta", "stream", "bridge", "harbour", "tide", "current", "source", "mouth")
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def servers() -> Iterator[list[Backend]]:
    made = [Backend("--model", "m1", "--model", "m2") for _ in range(3)]
    yield made
    for server in made:
        server.stop()


@pytest.fixture(scope="module")
def shared_node(servers: list[Backend]) -> Iterator[Node]:
    with running(*FLAGS, backends=servers) as node:
        wait_until(lambda: node.request("GET", "/readiness")[0] == 200, "not ready")
        yield node


@pytest.fixture
def node(shared_node: Node, servers: list[Backend]) -> Iterator[Node]:
    """The node with its three upstreams and without labels; each test has prompts of its own."""
    for server in servers:
        if server.url not in workers(shared_node):
            add(shared_node, server.url)
    set_policy(shared_node, None)
    yield shared_node
    wait_until(lambda: not shared_node.held(), f"left behind: {shared_node.held()}")


def set_policy(node: Node, policy: str | None) -> None:
    """Put the policy of both models in force; None: the default."""
    for number, info in enumerate(workers(node).values()):
        label = policy if number == 0 else None
        assert call(node, "PUT", f"/workers/{info['id']}", {"labels": {"policy": label}})[0] == 202


def prose(rng: random.Random, words: int) -> str:
    return " ".join(rng.choices(WORDS, k=words))


def chat(*texts: str, model: str = "m1", **members: Any) -> dict[str, Any]:
    """A conversation: its turns by user and assistant."""
    roles = cycle(("user", "assistant"))
    messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
    return {"model": model, "messages": messages, "max_tokens": 2, **members}


Answer = tuple[int, dict[str, str], bytes]


def send(
    door: http.client.HTTPConnection, body: Any, path: str = CHAT, headers: dict[str, str] | None = None
) -> None:
    fields = {"content-type": "application/json", **(headers or {})}
    door.request("POST", path, json.dumps(body), fields)


def receive(door: http.client.HTTPConnection) -> Answer:
    answer = door.getresponse()
    return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()


def placed(answer: Answer) -> tuple[str, str]:
    """The upstream that an answer came from, and the reason of the policy."""
    status, headers, data = answer
    assert status == 200, data
    return headers["x-mesh-upstream"], headers["x-mesh-route-reason"].rpartition(",")[2]


def ask(
    door: http.client.HTTPConnection, body: Any, path: str = CHAT, headers: dict[str, str] | None = None
) -> tuple[str, str]:
    send(door, body, path, headers)
    return placed(receive(door))


def test_prefix_that_one_process_sent_is_known_to_the_other_at_once(node: Node) -> None:
    """routing.md behaviour 5: for each prefix the second request comes to another I/O process."""
    rng = random.Random(1)
    with front_doors(node) as doors:
        for number in range(12):
            system = f"{number} {prose(rng, 80)}"
            home, reason = ask(doors[number % 2], chat(system + "first question"))
            assert reason == "cache_miss"
            assert ask(doors[1 - number % 2], chat(system + "another one")) == (home, "cache_hit")


@pytest.mark.parametrize("policy", ["cache_aware", "prefix_hash"])
def test_conversations_whose_turns_come_on_new_connections_keep_their_upstream(
    node: Node, policy: str
) -> None:
    """At least 99 % of 400 turns; each opens with more than the tokens that prefix_hash reads."""
    set_policy(node, policy)
    rng = random.Random(2)
    conversations = [[f"{number} {prose(rng, 300)}"] for number in range(40)]
    homes: list[list[str]] = [[] for _ in conversations]
    for _ in range(11):
        for texts, seen in zip(conversations, homes, strict=True):
            seen.append(placed(node.request("POST", CHAT, chat(*texts)))[0])
            texts += [prose(rng, 30), prose(rng, 30)]
    turns = [first == second for seen in homes for first, second in pairwise(seen)]
    assert len(turns) == 400 and sum(turns) >= 396
    assert len({seen[0] for seen in homes}) == 3, "conversations use all upstreams"


@pytest.mark.parametrize("policy", ["round_robin", "cache_aware", "prefix_hash"])
def test_each_request_runs_one_job_whatever_its_policy_needs(node: Node, policy: str) -> None:
    set_policy(node, policy)
    names = ("mesh_prepare_jobs_total", "mesh_prepare_run_seconds_count")
    before = [node.metric(name) for name in names]
    for number in range(4):
        assert node.request("POST", CHAT, chat(f"{policy} {number} one two three"))[0] == 200
    wait_until(
        lambda: [node.metric(name) for name in names] == [count + 4 for count in before],
        "not one job for each request",
    )


def test_thousand_distinct_prompts_spread_evenly_over_the_upstreams(node: Node) -> None:
    """The most loaded upstream gets at most 1.15 of the mean, on both I/O processes together."""
    rng = random.Random(3)
    counts: Counter[str] = Counter()
    with front_doors(node) as doors:
        for number in range(0, 1000, 2):
            for which, door in doors.items():
                send(door, chat(f"{number + which} {prose(rng, 40)}"))
            counts.update(placed(receive(door))[0] for door in doors.values())
    assert counts.total() == 1000 and len(counts) == 3
    assert max(counts.values()) <= 1.15 * 1000 / 3, counts


def held_load(node: Node) -> dict[str, float]:
    return {
        dict(labels)["worker"]: value
        for (name, labels), value in node.metrics().items()
        if name == "mesh_worker_requests_active"
    }


def test_hot_prefix_at_four_times_a_fair_share_spreads(node: Node) -> None:
    """routing.md behaviour 6: 160 held requests of one prompt do not all hang on one of three upstreams."""
    body = json.dumps(chat(prose(random.Random(4), 300))).encode()
    head = (
        f"POST {CHAT} HTTP/1.1\r\nhost: m\r\ncontent-type: application/json\r\n"
        f"x-backend-fault: delay-head-ms=60000\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    clients: list[socket.socket] = []
    try:
        for _ in range(160):
            client = node.connect()
            clients.append(client)
            client.sendall(head.encode() + body)
        wait_until(lambda: sum(held_load(node).values()) == 160, "not all requests are held")
        loads = sorted(held_load(node).values())
    finally:
        for client in clients:
            client.close()
    assert loads[-1] - loads[0] <= 66, f"{loads}: the threshold is 64"


def test_models_take_turns_of_their_own_and_labels_give_them_policies(node: Node) -> None:
    """routing.md behaviour 15, and section 2: interleaved requests for two models, each spread evenly."""
    set_policy(node, "round_robin")
    counts: dict[str, Counter[str]] = {"m1": Counter(), "m2": Counter()}
    with front_doors(node) as doors:
        for number in range(30):
            for model in ("m1", "m2", "m1")[: 2 + number % 2]:
                home, reason = ask(doors[0], chat(f"{number}", model=model))
                counts[model][home] += 1
                assert reason == "policy:round_robin"
    for seen in counts.values():
        assert len(seen) == 3 and max(seen.values()) - min(seen.values()) <= 1
    other = Backend("--model", "m3")
    try:
        worker = add(node, other.url, labels={"policy": "consistent_hashing"})
        for model, policy in (("m3", "consistent_hash"), ("m1", "round_robin")):
            _, headers, _ = node.request("POST", CHAT, chat("a", model=model))
            assert headers["x-mesh-policy-version"].rpartition("-")[0] == policy
        assert call(node, "PUT", f"/workers/{worker}", {"labels": {"policy": "fastest"}})[0] == 202
        _, headers, _ = node.request("POST", CHAT, chat("a", model="m3"))
        assert headers["x-mesh-policy-version"].startswith("cache_aware-")
        wait_until(
            lambda: any(line.get("event") == "unknown_policy" for line in node.lines), "nothing is said of it"
        )
    finally:
        call(node, "DELETE", f"/workers/{worker}?force=true")
        wait_until(lambda: other.url not in workers(node), "it stays")
        other.stop()


def test_session_that_comes_to_both_processes_at_once_gets_one_upstream(node: Node) -> None:
    """routing.md behaviour 16; sessions spread evenly, and stay."""
    set_policy(node, "dp_sticky")
    homes: dict[str, str] = {}
    with front_doors(node) as doors:
        for number in range(30):
            session = {"x-session-id": f"both-{number}"}
            for door in doors.values():
                send(door, chat("a"), headers=session)
            found = [placed(receive(door)) for door in doors.values()]
            assert len({home for home, _ in found}) == 1, found
            assert {reason for _, reason in found} <= {"new_session", "sticky"}
            homes[session["x-session-id"]] = found[0][0]
        assert sorted(Counter(homes.values()).values()) == [10, 10, 10]
        for session_id, home in homes.items():
            for door in doors.values():
                assert ask(door, chat("b"), headers={"x-session-id": session_id}) == (home, "sticky")


def test_without_the_controller_known_sessions_stay_and_new_ones_go_where_they_hash(
    node: Node, servers: list[Backend]
) -> None:
    """routing.md behaviour 27. The supervisor stands still too: else it would replace a silent controller."""
    set_policy(node, "dp_sticky")
    ring = HashRing([server.url for server in servers])
    urls = {server.url for server in servers}
    with front_doors(node) as doors:
        known = {f"known-{n}": ask(doors[0], chat("a"), headers={"x-session-id": f"known-{n}"})[0]
                 for n in range(9)}  # fmt: skip
        (pid,) = node.pids("controller")
        row = next(row for row in node.board().rows() if row.pid == pid)
        os.kill(node.process.pid, signal.SIGSTOP)
        os.kill(pid, signal.SIGSTOP)
        try:
            for name, home in known.items():
                assert ask(doors[1], chat("a"), headers={"x-session-id": name}) == (home, "sticky")
            for number in range(6):
                session = f"new-{number}"
                owner = ring.owner(session_position(session.encode()), urls)
                found = ask(doors[number % 2], chat("a"), headers={"x-session-id": session})
                assert found == (owner, "policy:dp_sticky")
        finally:
            silent_since = row.heartbeat_ns
            os.kill(pid, signal.SIGCONT)
            wait_until(lambda: row.heartbeat_ns > silent_since, "the controller does not go on")
            os.kill(node.process.pid, signal.SIGCONT)
        found = ask(doors[0], chat("a"), headers={"x-session-id": "later"})
        assert found[1] == "new_session", "the controller assigns again"


def test_removed_upstream_leaves_the_index_and_its_prefix_moves(node: Node) -> None:
    """routing.md behaviour 10."""
    body = chat(prose(random.Random(5), 100))
    home, _ = placed(node.request("POST", CHAT, body))
    assert placed(node.request("POST", CHAT, body)) == (home, "cache_hit")
    assert call(node, "DELETE", f"/workers/{workers(node)[home]['id']}")[0] == 202
    moved, reason = placed(node.request("POST", CHAT, body))
    assert moved != home and reason == "cache_miss"
    assert placed(node.request("POST", CHAT, body)) == (moved, "cache_hit")
    wait_until(lambda: home not in workers(node), "it stays")
    add(node, home)
    status, told = call(node, "POST", "/route/explain", {"path": CHAT, "body": body})
    matched = {row["worker"]: row["matched"] for row in told["candidates"]}
    assert status == 200 and matched[home] == 0.0 and matched[moved] > 0.9
    assert told["chosen"] == moved


UNCHANGED = (
    "mesh_prefix_index_entries", "mesh_prefix_index_evictions_total", "mesh_sessions_active",
    "mesh_worker_selection_total", "mesh_router_requests_total", "mesh_worker_requests_active",
    "mesh_cache_aware_decisions_total", "mesh_prefix_hash_policy_branch_total",
    "mesh_policy_fallbacks_total", "mesh_http_rate_limit_total",
)  # fmt: skip
Request = tuple[str, dict[str, str], dict[str, Any]]


def requests_to_explain() -> Iterator[Request]:
    """Path, headers and body of requests, some with a known beginning, some with a session."""
    rng = random.Random(6)
    for number in range(15):
        text = f"{number % 4} {prose(random.Random(number % 4), 60)} {prose(rng, 5)}"
        path, body = (
            (CHAT, chat(text)),
            ("/v1/completions", {"model": "m2", "prompt": text, "max_tokens": 2}),
            ("/generate", {"text": text}),
            ("/v1/messages", chat(text)),
            ("/v1/responses", {"model": "m1", "input": text, "store": False}),
        )[number % 5]
        yield path, {"x-session-id": f"explained-{number % 7}"} if number % 3 else {}, body


def told(door: http.client.HTTPConnection, request: Request) -> tuple[str, str]:
    """The upstream and the reason that an explanation names."""
    path, headers, body = request
    send(door, {"path": path, "headers": headers, "body": body}, "/route/explain")
    status, _, data = receive(door)
    assert status == 200, data
    found = json.loads(data)
    assert {row["worker"] for row in found["candidates"]} >= {found["chosen"]}
    return found["chosen"], found["reason"]


@pytest.mark.parametrize("policy", CERTAIN)
def test_explanation_names_the_upstream_that_the_request_is_then_sent_to(node: Node, policy: str) -> None:
    """admin.md behaviour 22, for chat, completions, generate, messages and responses."""
    set_policy(node, policy)
    with front_doors(node) as doors:
        for number, request in enumerate(requests_to_explain()):
            path, headers, body = request
            door = doors[number % 2]
            wait_until(lambda: not node.held(), "the one before still counts as load")
            expected = [told(door, request) for _ in range(2)]
            assert [ask(door, body, path, headers)] * 2 == expected


@pytest.mark.parametrize("policy", CERTAIN)
def test_explanation_changes_nothing(node: Node, policy: str) -> None:
    """admin.md behaviour 22: no load, index, session or counter of requests."""
    set_policy(node, policy)

    def state() -> dict[Any, float]:
        return {key: value for key, value in node.metrics().items() if key[0] in UNCHANGED}

    with front_doors(node) as doors:
        ask(doors[0], chat(prose(random.Random(9), 60)), headers={"x-session-id": "explained-1"})
        wait_until(lambda: not node.held(), "the request has not ended")
        node.settle()
        before = state()
        first = [told(doors[0], request) for request in requests_to_explain()]
        assert [told(doors[0], request) for request in requests_to_explain()] == first
        node.settle()
        assert state() == before


def test_explanation_answers_the_error_that_the_request_would_get(node: Node) -> None:
    for body, status, code in (
        (chat("a", model="m9"), 404, "model_not_found"),
        ({"model": "m1", "messages": []}, 400, "invalid_request"),
        (
            {"model": "m1", "messages": [{"role": "user", "content": "a"}], "stream": 1},
            400,
            "invalid_request",
        ),
    ):
        found = node.request("POST", "/route/explain", {"path": CHAT, "body": body})
        direct = node.request("POST", CHAT, body)
        assert found[0] == direct[0] == status and found[1]["x-mesh-error-code"] == code, found
        assert found[2] == direct[2]
    assert node.request("GET", "/route/explain")[0] == 405
    big = json.dumps({"path": CHAT, "body": chat("a" * (1 << 20))}).encode()
    assert node.request("POST", "/route/explain", big)[0] == 413


FALLBACKS = (
    ("cache_aware", "no_text", chat("")),
    ("prefix_hash", "no_tokens", {"model": "m1", "prompt": ""}),
    ("consistent_hash", "no_session_key", chat("a")),
    ("dp_sticky", "no_session_key", chat("a")),
)


@pytest.mark.parametrize(("policy", "reason", "body"), FALLBACKS)
def test_policy_that_could_not_use_its_input_is_counted(
    node: Node, policy: str, reason: str, body: dict[str, Any]
) -> None:
    """routing.md behaviour 28."""
    set_policy(node, policy)
    before = node.metric("mesh_policy_fallbacks_total", policy=policy, reason=reason)
    path = CHAT if "messages" in body else "/v1/completions"
    for _ in range(3):
        status, headers, _ = node.request("POST", path, body)
        assert (status, headers.get("x-mesh-error-code")) in ((200, None), (503, "policy_returned_none"))
    wait_until(
        lambda: node.metric("mesh_policy_fallbacks_total", policy=policy, reason=reason) >= before + 3,
        "the fallback is not counted",
    )


def test_all_loads_are_zero_after_a_thousand_requests_that_ended_badly(node: Node) -> None:
    """routing.md behaviour 1: aborted, failed, timed out and retried, on every endpoint and policy."""
    rng = random.Random(8)
    faults = (
        "",
        "status=503",
        "status=500",
        "reset",
        "close",
        "delay-head-ms=50",
        "cut=20",
        "malformed-head",
    )
    paths = (
        (CHAT, chat("a b c", stream=True)),
        (CHAT, chat("a b c")),
        ("/v1/completions", {"model": "m1", "prompt": "a b c"}),
        ("/generate", {"text": "a b c"}),
        ("/v1/messages", chat("a")),
        ("/v1/messages/count_tokens", chat("a")),
        ("/v1/responses", {"model": "m2", "input": "a", "store": False}),
        ("/v1/embeddings", {"model": "m2", "input": "a"}),
    )

    def one(number: int, path: str, body: dict[str, Any], fault: str, leaves: bool) -> None:
        data = json.dumps(body).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nhost: m\r\nconnection: close\r\ncontent-type: application/json\r\n"
            f"x-backend-fault: {fault}\r\nx-session-id: bad-{number % 9}\r\n"
            f"content-length: {len(data)}\r\n\r\n"
        )
        with node.connect() as client:
            client.sendall(head.encode() + data)
            while not leaves and client.recv(65536):
                pass

    with ThreadPoolExecutor(16) as pool:
        for policy in (*CERTAIN, "random", "power_of_two"):
            set_policy(node, policy)
            jobs = [
                pool.submit(one, number, *rng.choice(paths), rng.choice(faults), rng.random() < 0.2)
                for number in range(125)
            ]
            for job in jobs:
                job.result(60)
    wait_until(lambda: not node.held(), f"left behind: {node.held()}", timeout=20)
    assert set(held_load(node).values()) == {0}
