"""Chaos: whatever can fail fails while traffic runs; in the end nothing is lost, mixed up or left behind.

A printed seed replays the plan: ``pytest tests/stress/test_chaos.py --chaos-seed N --chaos-seconds S``.
"""

from __future__ import annotations

import random
import signal
import time
from collections import Counter

import pytest

from meshd.control import Role
from tests.e2e.conftest import DEMO_TOKENIZER
from tests.fakes.node import Node, wait_until
from tests.stress.chaos import invariants
from tests.stress.chaos.bad_upstream import BadUpstream
from tests.stress.chaos.faults import KEY, Chaos, Upstream
from tests.stress.chaos.traffic import Outcome, Traffic
from tests.stress.chaos.watch import Watch

GRACE_SECS = 15
FLAGS = (
    "--prepare-group-size", "1", "--prepare-workers", "2",
    "--tokenizer-path", DEMO_TOKENIZER,
    "--max-concurrent-requests", "16", "--queue-size", "8", "--queue-timeout-secs", "3",
    "--health-check-interval-secs", "1", "--health-check-timeout-secs", "1",
    "--cb-failure-threshold", "6", "--cb-timeout-duration-secs", "2",
    "--request-timeout-secs", "10", "--first-byte-timeout-secs", "2", "--stream-idle-timeout-secs", "2",
    "--upstream-connect-timeout-secs", "1", "--client-body-timeout-secs", "10",
    "--retry-max-backoff-ms", "1000", "--retry-budget-min", "40",
    "--shutdown-grace-period-secs", str(GRACE_SECS),
)  # fmt: skip


@pytest.mark.timeout(600)
def test_every_request_has_one_outcome_whatever_dies(pytestconfig: pytest.Config) -> None:
    seed = pytestconfig.getoption("--chaos-seed") or random.SystemRandom().randrange(1 << 32)
    seconds = pytestconfig.getoption("--chaos-seconds")
    print(f"--chaos-seed {seed} --chaos-seconds {seconds}")
    rng = random.Random(seed)
    fixed = [Upstream(), Upstream("--keepalive-secs", "1"), Upstream("--capacity", "6")]
    registered = [Upstream(key=KEY)]
    flags = (
        *FLAGS,
        "--policy", rng.choice(("prefix_hash", "cache_aware")),
        "--io-processes", rng.choice("223"),
        "--worker-urls", *(upstream.url for upstream in fixed),
    )  # fmt: skip
    node = Node(*flags)
    try:
        with BadUpstream(random.Random(rng.random())) as bad:
            run(node, rng, fixed, registered, bad, seconds)
    except BaseException:
        print(*(line for line in node.raw_lines if '"access"' not in line), sep="\n")
        raise
    finally:
        node.kill()
        for upstream in (*fixed, *registered):
            upstream.kill()


def run(
    node: Node,
    rng: random.Random,
    fixed: list[Upstream],
    registered: list[Upstream],
    bad: BadUpstream,
    seconds: float,
) -> None:
    chaos = Chaos(node, random.Random(rng.random()), fixed, registered, bad, seconds)
    start = invariants.steady_holdings(node)
    bad.is_good = True
    chaos.settle()
    warm = calm_traffic(node, rng, 100)
    invariants.check_log(node)
    bad.is_good = False
    wild = Traffic(node.host, node.port, random.Random(rng.random()), 24)
    with Watch(node) as watch:
        with wild:
            with chaos:
                time.sleep(seconds)
            chaos.settle()
            time.sleep(3)
        wait_until(lambda: settled(node), "a replacement does not end", 90)
        calm = calm_traffic(node, rng, 150)
    print(report(chaos, wild, bad))
    assert not chaos.faults and not watch.faults and not bad.mixed, (chaos.faults, watch.faults, bad.mixed)
    assert not wild.refused, f"the supervisor holds the listening sockets: {wild.refused[:3]}"
    assert calm.kinds()["complete"] >= 0.99 * len(calm.outcomes), failures(calm)
    outcomes = warm.outcomes + wild.outcomes + calm.outcomes
    invariants.check_at_rest(node, start)
    lines = node.access_lines()
    invariants.check_outcomes(outcomes, chaos.strikes, lines)
    arrivals = bad.arrivals + invariants.logged_arrivals([*fixed, *registered])
    invariants.check_arrivals(arrivals, outcomes, lines)
    invariants.check_probes(watch.probes, chaos.strikes)
    invariants.check_counters(node, outcomes, endangered(outcomes, chaos))
    invariants.check_memory(watch)
    shares = wild.kinds()
    assert shares["complete"] > 0.3 * len(wild.outcomes), f"too wild to tell: {shares}"
    leave(node, rng)
    invariants.check_log(node)


def calm_traffic(node: Node, rng: random.Random, requests: int) -> Traffic:
    with Traffic(node.host, node.port, random.Random(rng.random()), 8, is_calm=True) as traffic:
        wait_until(lambda: len(traffic.outcomes) >= requests, "no traffic gets through", 60)
    return traffic


def settled(node: Node) -> bool:
    """Say whether nothing is being replaced: everyone is ready, and no old process is left."""
    seen = Counter(line.get("event") for line in list(node.lines))
    ended = seen["replacement_done"] + seen["replacement_given_up"] + seen["replacement_incomplete"]
    rows = [row for row in node.board().rows() if row.pid]
    return seen["replacement_started"] == ended and all(row.state == 2 for row in rows)


def endangered(outcomes: list[Outcome], chaos: Chaos) -> int:
    """Count the requests that were under way when an I/O process was killed, or counted but a tick before."""
    kills = [s.at for s in chaos.strikes if s.act == "kill" and s.role is Role.IO]
    return sum(any(o.asked_at - 1 <= at <= o.ended_at + 1 for at in kills) for o in outcomes)


def leave(node: Node, rng: random.Random) -> None:
    """9: SIGTERM under traffic loses nothing that fits the grace period, and ends in time with 0."""
    with Traffic(node.host, node.port, random.Random(rng.random()), 4, is_calm=True) as traffic:
        wait_until(lambda: len(traffic.outcomes) > 20, "no traffic gets through", 30)
        started_at = time.monotonic()
        node.process.send_signal(signal.SIGTERM)
        wait_until(lambda: traffic.refused, "it still accepts", 30)
    assert node.process.wait(GRACE_SECS + 2) == 0
    assert time.monotonic() - started_at <= GRACE_SECS + 2
    lost = [outcome for outcome in traffic.outcomes if outcome.kind != "complete" and not met(outcome)]
    assert not lost, failures(traffic)
    assert not node.descendants()


def met(outcome: Outcome) -> bool:
    """Say whether a request crossed with the end of its idle connection, as it may with any server."""
    return outcome.kind == "cut" and not outcome.status and outcome.fellows[0] != outcome.ask.id


def failures(traffic: Traffic) -> str:
    bad = [outcome for outcome in traffic.outcomes if outcome.kind != "complete"]
    return f"{traffic.kinds()} {bad[:4]}"


def report(chaos: Chaos, wild: Traffic, bad: BadUpstream) -> str:
    codes = Counter((outcome.status, outcome.code) for outcome in wild.outcomes if outcome.kind == "refused")
    counted = {"acts": Counter(chaos.acts), "outcomes": wild.kinds(), "refused": codes, "bad": bad.played}
    return "\n".join(f"{name}: {dict(counter)}" for name, counter in counted.items())
