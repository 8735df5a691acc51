"""The invariants of the chaos test, each a check of what was seen; numbered as the specification does."""

from __future__ import annotations

import base64
import contextlib
import os
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from meshd.control import Role
from tests.fakes.node import Node, wait_until
from tests.stress.chaos.asks import BROKEN, PATHS, key_of
from tests.stress.chaos.faults import Strike, Upstream
from tests.stress.chaos.traffic import Outcome
from tests.stress.chaos.watch import Probe, Watch

MAX_ATTEMPTS: Final = 5
QUIET_SECS: Final = 10.0  # two of the specification's, and what a busy machine needs
IDLE_SECS: Final = 15.0  # until idle upstream connections have been closed
MORE_FDS: Final = 2
GROWTH_BYTES: Final = 1 << 20
GROWTH_BYTES_A_SECOND: Final = GROWTH_BYTES / 600
NOT_OURS: Final = ("internal_error", "prepare_failed", "malformed_request", "not_found", "method_not_allowed")
DIES_LATE_S: Final = 1.0  # a killed process may be seen to be dead so much later
LOGGED_LATE_S: Final = 1.0  # and takes with it the access lines of so long before
CLOSE_WAIT: Final = "08"


# ------------------------------------------------------------------------------------------- outcomes


def check_outcomes(outcomes: list[Outcome], strikes: list[Strike], lines: list[dict[str, Any]]) -> None:
    """1 and 3: one outcome each; nothing mixed up, truncated or hung; cuts only where something was cut."""
    bad = [o for o in outcomes if o.kind in ("wrong", "hang", "") or o.code in NOT_OURS]
    assert not bad, f"{len(bad)} of {len(outcomes)}: {bad[:3]}"
    by_id = by_request(lines)
    twice = {name: found for name, found in by_id.items() if len(found) > 1}
    assert not twice, f"logged twice: {list(twice.values())[:2]}"
    kills = [strike for strike in strikes if strike.act == "kill" and strike.role is Role.IO]
    for outcome in outcomes:
        line = by_id.get(outcome.ask.id, [None])[0]
        check_line(outcome, line, [kill for kill in kills if may_have_hit(kill, outcome, by_id)])


def check_line(outcome: Outcome, line: dict[str, Any] | None, kills: list[Strike]) -> None:
    """Compare what the client and the node say of a request. ``kills``: those that can have hit it."""
    if outcome.kind == "cut" and not kills:
        assert line is not None, f"cut, and not by a kill: {outcome}"
        assert line["outcome"] in ("body_error", "backend_error"), f"cut without a reason: {outcome} {line}"
        assert not outcome.is_silent, f"only the kernel may end a body so, for a killed process: {outcome}"
    if line is None:
        # The head of one that left early may not have arrived; a killed process logs nothing.
        assert outcome.kind == "aborted" or kills, f"no access line: {outcome}"
        return
    if outcome.kind in ("complete", "refused"):
        assert line["status"] == outcome.status, (outcome, line)
    if outcome.kind == "complete":
        assert line["outcome"] in ("completed", "canceled"), (outcome, line)
    if outcome.ask.api == BROKEN:
        assert "upstream" not in line, (outcome, line)


def may_have_hit(kill: Strike, outcome: Outcome, by_id: dict[str, list[dict[str, Any]]]) -> bool:
    """Say whether that kill may have cut the connection of ``outcome``, or lost its access line."""
    if not outcome.connected_at - DIES_LATE_S <= kill.at <= outcome.ended_at + LOGGED_LATE_S:
        return False
    served_by = {line["io_process"] for name in outcome.fellows for line in by_id.get(name, ())}
    return not served_by or kill.index in served_by


def by_request(lines: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        found.setdefault(line["request_id"], []).append(line)
    return found


def check_arrivals(arrivals: Counter[str], outcomes: list[Outcome], lines: list[dict[str, Any]]) -> None:
    """2: an upstream sees a request once an attempt, and once more for a reused connection that died."""
    by_id = by_request(lines)
    for outcome in outcomes:
        seen = arrivals[outcome.ask.id]
        attempts = by_id.get(outcome.ask.id, [{}])[0].get("attempts", MAX_ATTEMPTS)
        most = 1 if outcome.ask.is_stateful else 2 * attempts
        assert seen <= most, f"{seen} arrivals of a request with {attempts} attempts: {outcome}"
    strangers = set(arrivals) - {outcome.ask.id for outcome in outcomes}
    assert not strangers, f"requests that nobody made: {list(strangers)[:3]}"


def logged_arrivals(upstreams: list[Upstream]) -> Counter[str]:
    """3: read what bundled upstreams remember; each request is of one piece, with the right credentials."""
    arrivals: Counter[str] = Counter()
    for upstream in upstreams:
        assert upstream.backend is not None
        for request in upstream.backend.requests():
            if request["target"] not in PATHS.values():
                continue
            fields = {name.lower(): value for name, value in request["headers"]}
            name = fields["x-request-id"]
            arrivals[name] += 1
            assert fields.get("authorization") == f"Bearer {upstream.key or key_of(name)}", request
            assert name.encode() in base64.b64decode(request["body"]), request
            assert not upstream.key or key_of(name) not in str(request["headers"]), request
    return arrivals


def check_probes(probes: list[Probe], strikes: list[Strike]) -> None:
    """8: ``/liveness`` answers, unless the very process that took the connection is dead or stopped."""
    hits = [strike for strike in strikes if strike.role is Role.IO]
    for probe in probes:
        if not probe.what:
            continue
        near = [s for s in hits if probe.at - DIES_LATE_S <= s.until and s.at <= probe.until]
        assert near, f"not alive: {probe}"
    good = [probe for probe in probes if not probe.what]
    assert len(good) > 0.9 * len(probes), f"{len(good)} of {len(probes)}"


# ------------------------------------------------------------------------------------------------- rest


@dataclass(frozen=True)
class Holdings:
    """What the processes of a node hold: how many of each kind there are, and the most descriptors of one."""

    counts: dict[str, int]
    fds: dict[str, int]
    memory_files: int

    @classmethod
    def of(cls, node: Node) -> Holdings:
        counts: Counter[str] = Counter()
        fds: dict[str, int] = {}
        for row in node.ps():
            counts[row["role"]] += 1
            with contextlib.suppress(OSError):  # it has just ended
                held = len(os.listdir(f"/proc/{row['pid']}/fd"))
                fds[row["role"]] = max(fds.get(row["role"], 0), held)
        links = Path(f"/proc/{node.process.pid}/fd").iterdir()
        return cls(dict(counts), fds, sum(os.readlink(link).startswith("/memfd:") for link in links))


def steady_holdings(node: Node) -> Holdings:
    """Return the holdings of a node at rest: right after its start workers may still be forked anew."""
    before, now = None, Holdings.of(node)
    deadline = time.monotonic() + QUIET_SECS
    while now != before:
        assert time.monotonic() < deadline, (before, now)
        time.sleep(0.5)
        before, now = now, Holdings.of(node)
    return now


def check_at_rest(node: Node, start: Holdings) -> None:
    """5 and 6: nothing is held, nothing was left, nobody is missing."""
    wait_until(lambda: not node.held(), f"held: {node.held()}", QUIET_SECS)
    deadline = time.monotonic() + IDLE_SECS
    while left := surplus(Holdings.of(node), start) or strangers(node):
        assert time.monotonic() < deadline, left
        time.sleep(0.3)
    half_closed = [pid for pid in node.descendants() if CLOSE_WAIT in socket_states(pid)]
    assert not half_closed, f"sockets whose peers have closed: {half_closed}"


def surplus(now: Holdings, start: Holdings) -> str:
    """Say what is not as it was at the start; empty if all is."""
    if now.counts != start.counts or now.memory_files != start.memory_files:
        return f"{now} is not {start}"
    more = {kind: (start.fds[kind], n) for kind, n in now.fds.items() if n - start.fds[kind] > MORE_FDS}
    return f"descriptors before and after: {more}" if more else ""


def strangers(node: Node) -> str:
    """Describe the processes that nobody knows; a child that proves a tokenizer is one for a moment."""
    known = {row["pid"] for row in node.ps()}
    return "; ".join(describe(pid) for pid in node.descendants() - known)


def describe(pid: int) -> str:
    """Return the state, the parent and the command line of a process; a zombie's state is Z."""
    state, parent, *_ = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return f"{pid} {state} child of {parent}: {command}"


def socket_states(pid: int) -> set[str]:
    """Return the TCP states of the sockets that a process holds."""
    inodes = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        target = os.readlink(link)
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    with open(f"/proc/{pid}/net/tcp") as file:
        rows = [line.split() for line in file.readlines()[1:]]
    return {row[3] for row in rows if row[9] in inodes}


def check_counters(node: Node, outcomes: list[Outcome], endangered: int) -> None:
    """4: what began has ended and is counted, but for what died with its process; jobs are conserved.

    ``endangered``: requests that a killed process may have had.
    """
    asked = len(outcomes)
    unheard = sum(outcome.kind == "aborted" for outcome in outcomes)  # at most: before the head was there
    began = node.metric("mesh_http_requests_total", method="POST")
    ended = node.metric("mesh_http_request_duration_seconds_count", method="POST")
    assert 0 <= began - ended <= endangered, (began, ended, endangered)
    inference = sum(
        node.metric("mesh_http_requests_total", method="POST", path=path) for path in PATHS.values()
    )
    assert asked - endangered - unheard <= inference <= asked, (asked, inference, endangered, unheard)
    jobs = node.metric("mesh_prepare_jobs_total")
    runs = node.metric("mesh_prepare_run_seconds_count")
    errors = node.metric("mesh_prepare_errors_total")
    assert jobs == runs + errors, (jobs, runs, errors)


def check_memory(watch: Watch) -> None:
    """7: what the supervisor has for itself does not grow, over the last two thirds of the run."""
    settled = watch.anonymous[len(watch.anonymous) // 3 :]
    (start_at, _), (end_at, _) = settled[0], settled[-1]
    third = max(1, len(settled) // 3)
    before = sorted(size for _, size in settled[:third])[third // 2]
    after = sorted(size for _, size in settled[-third:])[third // 2]
    most = GROWTH_BYTES + GROWTH_BYTES_A_SECOND * (end_at - start_at)
    assert after - before <= most, f"the supervisor grew by {after - before} bytes"


def check_log(node: Node) -> None:
    """11: every line is a line of the log, and none tells of a fault of our own."""
    words = ("Traceback", "never retrieved", "never awaited", "resource_tracker", "internal_error")
    bad = [line for line in node.raw_lines if any(word in line for word in words) or not line.startswith("{")]
    assert not bad, bad[:5]
