"""SIGHUP of a real node: what changes, what does not, and what is said of it (cli.md §6, behaviour 17)."""

from __future__ import annotations

import json
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.load import SteadyLoad
from tests.fakes.node import Backend, Node, running, wait_until

ASK = b"GET /liveness HTTP/1.1\r\nhost: h\r\n\r\n"


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("reload") / "meshd.toml"
    path.write_text("")
    return path


@pytest.fixture(scope="module")
def file_node(backends: tuple[Backend, Backend], file: Path) -> Iterator[Node]:
    flags = ("--io-processes", "1", "--prepare-workers", "1", "--disable-health-check", "--config", str(file))
    with running(*flags, backends=backends[:1]) as node:
        yield node


def reload(node: Node, event: str, timeout: float = 10) -> dict[str, Any]:
    """Send SIGHUP; return the next line of ``event``."""
    before = len(node.lines)
    node.process.send_signal(signal.SIGHUP)

    def found() -> list[dict[str, Any]]:
        return [line for line in node.lines[before:] if line.get("event") == event]

    wait_until(found, f"no {event}", timeout)
    return found()[0]


def pids(node: Node) -> dict[str, int]:
    return {row["role"]: row["pid"] for row in node.ps()}


def is_closed_within(connection: socket.socket, seconds: float) -> bool:
    connection.settimeout(seconds)
    try:
        return connection.recv(4096) == b""
    except TimeoutError:
        return False


def test_a_changed_timeout_is_applied_by_new_processes_and_fails_no_request(file_node, file):
    node, before = file_node, pids(file_node)
    file.write_text("client_idle_timeout_secs = 0.5")
    with SteadyLoad(node, connections=4) as load:
        reload(node, "replacement_done", 60)
        load.wait_for_more(10)
    assert load.failures == [] and load.refused == []
    with node.connect() as connection:
        connection.sendall(ASK)
        assert connection.recv(4096).startswith(b"HTTP/1.1 200")
        assert is_closed_within(connection, 5)
    after = pids(node)
    assert {role for role in after if after[role] != before[role]} == {"io", "controller"}
    changed = next(line for line in node.lines if line.get("event") == "configuration_changed")
    assert changed["new_processes"] == "client_idle_timeout_secs 75.0 -> 0.5"


def test_a_bad_file_changes_nothing_and_is_logged(file_node, file):
    good, before = file.read_text(), pids(file_node)
    file.write_text("client_idle_timeout_secs = -1\nmax_paylod_size = 1")
    line = reload(file_node, "configuration_refused")
    file.write_text(good)
    assert "client_idle_timeout_secs" in line["message"] and "max_payload_size" in line["message"]
    assert pids(file_node) == before
    assert file_node.request("GET", "/liveness")[0] == 200


def test_what_needs_a_restart_is_named_and_stays(file_node, file):
    good, before = file.read_text(), pids(file_node)
    file.write_text(good + "\nprometheus_duration_buckets = [1.0, 2.0]")
    line = reload(file_node, "configuration_needs_restart")
    file.write_text(good)
    assert line["level"] == "warn"
    assert line["needs_restart"].startswith("prometheus_duration_buckets ")
    assert pids(file_node) == before


def test_a_shorter_grace_period_is_live_within_a_second(file_node, file):
    good, before = file.read_text(), pids(file_node)
    took, former = [], "180.0"
    for value in ("7.0", "8.0", "9.0"):
        file.write_text(f"{good}\nshutdown_grace_period_secs = {value}")
        sent_at = time.monotonic()
        line = reload(file_node, "configuration_changed")
        took.append(time.monotonic() - sent_at)
        assert line["live"] == f"shutdown_grace_period_secs {former} -> {value}"
        former = value
        if took[-1] < 1:  # the machine may be busy: one try of three is enough to show that it can
            break
    assert took[-1] < 1, took
    assert pids(file_node) == before


def test_a_server_added_to_the_file_is_asked(file_node, file, backends):
    node = file_node
    file.write_text(file.read_text() + f'\n[[workers]]\nurl = "{backends[1].url}"\n')
    reload(node, "replacement_done", 60)

    def urls() -> set[str]:
        answer = json.loads(node.request("GET", "/workers")[2])
        return {worker["url"] for worker in answer["workers"]}

    wait_until(lambda: urls() == {backend.url for backend in backends}, "the new server is not listed")
