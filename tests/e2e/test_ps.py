"""``meshd ps`` against a running instance and what the kernel says of its processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from typing import Any

from meshd.control import Role, State
from tests.e2e.test_client_gone import send_request
from tests.fakes.node import Node, running, wait_until
from tests.fakes.raw_upstream import RawUpstream

ROLES = {"supervisor": 1, "controller": 1, "io": 2, "leader": 1, "prepare": 2}


def ps(*flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "meshd", "ps", *flags], capture_output=True, text=True, timeout=20
    )


def rows_of(node: Node) -> list[dict[str, Any]]:
    """Return the rows that the command prints for this node."""
    rows: list[dict[str, Any]] = json.loads(ps("--json").stdout)
    return [row for row in rows if row["instance"] == node.process.pid]


def test_every_process_is_listed_with_what_the_kernel_says(node):
    node.wait_until_proved()
    rows = rows_of(node)
    assert Counter(row["role"] for row in rows) == ROLES
    assert {row["pid"] for row in rows} == {node.process.pid, *node.descendants()}
    for row in rows:
        assert os.sched_getaffinity(row["pid"]) == cpu_set(row["cpus"])
        assert row["state"] == "ready"
        assert row["rss_bytes"] >= row["pss_bytes"] > 1 << 20
        assert row["uptime_s"] > 0
    assert rows[0]["role"] == "supervisor" and rows[0]["pid"] == node.process.pid


def cpu_set(text: str) -> set[int]:
    """Read a list such as ``0-3,8``."""
    spans = [part.partition("-") for part in text.split(",")]
    return {cpu for low, _, high in spans for cpu in range(int(low), int(high or low) + 1)}


def test_table_shows_the_same(node):
    node.wait_until_proved()
    lines = ps().stdout.splitlines()
    head = lines.index(f"meshd on port {node.port}, pid {node.process.pid}")
    columns = ["role", "index", "pid", "cpus", "rss", "pss", "state", "restarts", "uptime"]
    assert lines[head + 1].split() == columns
    pids = {row["pid"] for row in rows_of(node)}
    shown = [line.split() for line in lines]
    ours = {int(cells[2]): cells for cells in shown if len(cells) > 9 and cells[2].isdecimal()}
    assert pids <= ours.keys()
    assert all(ours[pid][5] == ours[pid][7] == "MiB" for pid in pids)
    assert any(line.endswith("in all (PSS)") for line in lines)


def test_state_restarts_and_pid_follow_what_happens():
    flags = ("--io-processes", "1", "--prepare-workers", "1", "--disable-health-check", "--worker-urls")
    with RawUpstream(b"") as upstream, running(*flags, upstream.url) as node:
        before = row_of(node, "prepare")
        os.kill(before["pid"], signal.SIGKILL)
        row = next(row for row in node.board().rows() if row.role is Role.PREPARE)
        wait_until(lambda: row.pid not in (0, before["pid"]) and row.state is State.READY, "not replaced")
        after = row_of(node, "prepare")
        assert (after["pid"], after["restarts"]) == (row.pid, before["restarts"] + 1)
        assert after["uptime_s"] < before["uptime_s"] + 10

        with send_request(node, is_stream=False):  # something to wait for while the node drains
            upstream.requests.get(timeout=10)
            node.process.send_signal(signal.SIGTERM)
            wait_until(lambda: row_of(node, "io")["state"] == "draining", "the I/O process does not drain")
            assert row_of(node, "supervisor")["state"] == "draining"
        assert node.process.wait(10) == 0
        assert str(node.process.pid) not in ps().stdout.split()


def row_of(node: Node, role: str) -> dict[str, Any]:
    return next(row for row in rows_of(node) if row["role"] == role)
