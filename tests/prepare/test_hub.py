"""Sources of tokenizers: paths, and hub ids that a throw-away child fetches."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from meshd.prepare.hub import SourceNotFound, find_source


def children() -> str:
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text()


def never(repository: str) -> str:
    raise AssertionError("a path is not fetched")


def test_a_path_is_taken_as_it_is(tmp_path: Path) -> None:
    assert find_source(str(tmp_path), 1.0, never) == str(tmp_path)


@pytest.mark.parametrize("source", ["/nowhere/tokenizer.json", "./m1", "a/b/c", "m1 m2", "-x"])
def test_a_missing_path_that_is_no_hub_id_is_not_fetched(source: str) -> None:
    with pytest.raises(SourceNotFound, match="no such file"):
        find_source(source, 1.0, never)


def test_a_hub_id_is_fetched_in_a_child_of_its_own() -> None:
    ours = os.getpid()
    assert (
        find_source("org/m1", 10.0, lambda name: f"/hub/{name}/{os.getpid() != ours}") == "/hub/org/m1/True"
    )


def test_a_failed_download_tells_why_in_one_line() -> None:
    def fail(repository: str) -> str:
        raise OSError("no route to host\nand a long story")

    with pytest.raises(SourceNotFound) as caught:
        find_source("org/m1", 10.0, fail)
    assert str(caught.value) == "org/m1 is no path here and cannot be fetched: OSError: no route to host"


def test_a_download_that_takes_too_long_or_dies_is_given_up() -> None:
    def wait(repository: str) -> str:
        signal.pause()
        return ""

    before = children()
    with pytest.raises(SourceNotFound, match=r"not end within 0\.01 s"):
        find_source("m1", 0.01, wait)
    with pytest.raises(SourceNotFound, match="died"):
        find_source("m1", 10.0, lambda name: os.kill(os.getpid(), signal.SIGKILL) or "")
    assert children() == before


def test_without_the_hubs_client_an_id_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshd.prepare.hub.find_spec", lambda name: None)
    with pytest.raises(SourceNotFound, match="huggingface_hub is not installed"):
        find_source("org/m1", 1.0)
