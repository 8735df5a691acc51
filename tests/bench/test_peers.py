"""Finding other routers, and starting them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from bench.front_end import Site
from bench.peers import PEERS, add_to_path, find_peer, parse_interpreter


def program(directory: Path, name: str, interpreter: str) -> Path:
    directory.mkdir(exist_ok=True)
    path = directory / name
    path.write_text(f"#!{interpreter}\nprint()\n")
    path.chmod(0o755)
    return path


def test_interpreter_is_read_from_a_console_script_and_from_nothing_else() -> None:
    assert parse_interpreter("#!/opt/x/bin/python3.11 -E\n") == "/opt/x/bin/python3.11"
    assert parse_interpreter("#!/bin/sh\n") is None
    assert parse_interpreter("\x7fELF") is None


def test_a_program_of_the_same_name_from_another_distribution_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(tmp_path / "a", "router", "/bin/sh")
    right = program(tmp_path / "b", "router", sys.executable)
    monkeypatch.setenv("PATH", os.pathsep.join([str(tmp_path / "a"), str(tmp_path / "b")]))
    found = find_peer("router", "pytest")
    assert found == (str(right), pytest.__version__)
    assert find_peer("router", "no-such-distribution") is None


def test_given_directories_come_after_the_rest_of_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/bin")
    add_to_path([tmp_path])
    assert os.environ["PATH"] == f"/bin{os.pathsep}{tmp_path}"


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)
def test_a_peer_runs_the_policy_of_its_own_that_is_nearest(peer: object, tmp_path: Path) -> None:
    assert peer in PEERS
    known = next(one for one in PEERS if one is peer)
    for ours, theirs in known.policies.items():
        site = Site(tmp_path, 7000, 7003, ("http://127.0.0.1:7001", "http://127.0.0.1:7002"), ours, None)
        command = known.command(site)
        assert command[command.index("--policy") + 1] == theirs
