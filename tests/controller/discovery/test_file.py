"""Upstreams listed in a file."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from meshd.config import WorkerSpec
from meshd.controller.announcement import Announcement
from meshd.controller.discovery.file import MAX_FILE_BYTES, SETTLE_S, FileSource, read_workers
from tests.fakes.discovery import Bench


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "workers.toml"


def source(bench: Bench, path: Path) -> FileSource:
    def announce(spec: WorkerSpec) -> Announcement:
        return Announcement.of(spec, "sk-default", "sglang")

    return FileSource(str(path), 5.0, bench.reconciler("file"), announce, bench.log, rng=random.Random(1))


def looks(watched: FileSource, *changes: Callable[[], object]) -> list[float]:
    """Look until the file has settled, apply a change, look again, and so on; return all delays."""

    async def run() -> list[float]:
        delays = []
        for change in (lambda: None, *changes):
            change()
            delays.append(await watched.look())
            while delays[-1] == SETTLE_S:
                delays.append(await watched.look())
        return delays

    return asyncio.run(run())


def replace(path: Path, text: str) -> Callable[[], object]:
    def write() -> None:
        fresh = path.with_suffix(".new")
        fresh.write_text(text)
        os.replace(fresh, path)

    return write


def tables(*urls: str) -> str:
    return "".join(f'[[workers]]\nurl = "{url}"\n' for url in urls)


def test_a_file_that_loses_an_entry_drains_that_upstream_only(path: Path) -> None:
    """Behaviour 26 of routing.md, file."""
    bench = Bench()
    path.write_text(tables("http://a", "http://b", "http://c"))
    looks(source(bench, path), replace(path, tables("http://a", "http://c")))
    assert bench.keeper.urls("file") == ["http://a", "http://c"]
    assert [call for call in bench.keeper.calls if call[0] == "withdraw"] == [
        ("withdraw", "file", "http://b")
    ]
    assert bench.counts("file") == (2, 3, 1)


def test_an_unreadable_file_removes_none_and_is_tried_again_with_backoff(path: Path) -> None:
    """Behaviour 26 of routing.md, file."""
    bench = Bench()
    path.write_text(tables("http://a"))
    delays = looks(source(bench, path), path.unlink, lambda: None, lambda: None)
    assert bench.keeper.urls("file") == ["http://a"]
    assert delays[:2] == [SETTLE_S, 5.0]
    assert delays[2] == 1.0
    assert 1 <= delays[3] <= 2 <= delays[4] <= 4
    assert bench.log.problems() == ["No such file or directory"]


def test_a_file_that_comes_back_unchanged_is_readable_again(path: Path) -> None:
    bench = Bench()
    path.write_text(tables("http://a"))
    away = path.with_suffix(".away")
    delays = looks(source(bench, path), lambda: path.rename(away), lambda: away.rename(path))
    assert delays[-1] == 5.0
    assert bench.log.events() == ["discovery_read", "discovery_unreadable", "discovery_readable"]


def test_a_file_that_appears_later_is_read(path: Path) -> None:
    bench = Bench()
    looks(source(bench, path), replace(path, tables("http://a")))
    assert bench.keeper.urls("file") == ["http://a"]


@pytest.mark.parametrize(
    "text", ["[[workers]]\nurl = ", "", "{", "[[workers]]\nurl = 'ftp://x'\n", "[[workers]]\nlabels = {}\n"]
)
def test_a_bad_file_changes_nothing_and_is_told_once_for_each_change(path: Path, text: str) -> None:
    bench = Bench()
    path.write_text(tables("http://a"))
    watched = source(bench, path)
    looks(watched, replace(path, text), lambda: None, lambda: None)
    assert bench.keeper.urls("file") == ["http://a"]
    assert len(bench.log.problems()) == 1
    assert bench.log.problems()[0].endswith("; nothing changed")
    looks(watched, replace(path, text + "\n# changed"), replace(path, tables("http://b")))
    assert len(bench.log.problems()) == 2
    assert bench.keeper.urls("file") == ["http://b"]


def test_a_file_that_is_being_written_is_not_taken_for_a_shorter_list(path: Path) -> None:
    bench = Bench()
    path.write_text(tables("http://a", "http://b"))
    watched = source(bench, path)
    looks(watched)

    async def write_slowly() -> None:
        path.write_text(tables("http://a"))
        assert await watched.look() == SETTLE_S
        with path.open("a") as file:
            file.write(tables("http://b", "http://c"))
        assert await watched.look() == SETTLE_S
        assert await watched.look() == 5.0

    asyncio.run(write_slowly())
    assert [call[0] for call in bench.keeper.calls] == ["announce"] * 3
    assert bench.keeper.urls("file") == ["http://a", "http://b", "http://c"]


def test_an_unchanged_file_is_not_read_again(path: Path) -> None:
    bench = Bench()
    path.write_text(tables("http://a"))
    looks(source(bench, path), lambda: None, lambda: None)
    assert bench.log.events() == ["discovery_read"]


def test_what_is_no_file_is_not_opened(tmp_path: Path) -> None:
    bench = Bench()
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    looks(source(bench, pipe), lambda: None)
    assert bench.log.problems() == ["is not a regular file"]


def test_members_and_defaults_are_those_of_the_configuration_file(path: Path) -> None:
    bench = Bench()
    path.write_text(
        '[[workers]]\nurl = "HTTP://A:1/"\nlabels = { tier = "x" }\n'
        '[[workers]]\nurl = "http://b"\napi-key = "k"\n'
    )
    looks(source(bench, path))
    first = bench.keeper.upstreams["file", "http://a:1"]
    assert (first.api_key, first.labels) == ("sk-default", (("tier", "x"),))
    assert bench.keeper.upstreams["file", "http://b"].api_key == "k"


@pytest.mark.parametrize("name", ["w.json", "w.conf"])
def test_json_is_read_by_its_name_or_by_its_brace(name: str) -> None:
    data = json.dumps({"workers": [{"url": "http://a", "model_id": "m"}]}).encode()
    assert read_workers(name, data) == (WorkerSpec("http://a", model_id="m"),)


def test_a_list_without_any_is_written_so() -> None:
    assert read_workers("w.toml", b"workers = []") == ()
    assert read_workers("w.json", b'{"workers": []}') == ()


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("w.toml", b"", "has no workers"),
        ("w.toml", b"worker = []", "unknown key worker: did you mean workers?"),
        ("w.toml", b"x = []", "unknown key x: the only one is workers"),
        ("w.toml", b"workers = 1", "workers: must be tables, each written"),
        (
            "w.toml",
            b"[[workers]]\nurl = 'http://a'\n[[workers]]\nurl = 1",
            "workers: table 2: url: must be a string",
        ),
        (
            "w.toml",
            b"[[workers]]\nurl = 'http://a'\nlables = {}",
            "unknown member lables: did you mean labels?",
        ),
        (
            "w.toml",
            b"[[workers]]\nurl = 'http://a'\n[[workers]]\nurl = 'http://a/'",
            "http://a is given more than once",
        ),
        (
            "w.toml",
            b"[[workers]]\nurl = 'http://a'\nworker_type = 'prefill'",
            "needs prefill/decode topology",
        ),
        ("w.toml", b"\xff", "is not TOML"),
        ("w.json", b"[]", "is not a JSON object"),
        ("w.json", b"workers = []", "is not JSON"),
        ("w.toml", b"#" * (MAX_FILE_BYTES + 1), "is larger than"),
    ],
)
def test_a_fault_is_named_as_in_the_configuration_file(name: str, data: bytes, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        read_workers(name, data)
