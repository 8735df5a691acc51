"""Options of the test run, and what tests of several packages start."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from meshd.memory import Segment

_FIRST = ("stress", "e2e", "prepare", "controller", "supervisor")
_PR_SET_CHILD_SUBREAPER = 36


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run the longer stress runs")
    parser.addoption("--chaos-seed", type=int, default=0, help="replay this plan of the chaos test")
    parser.addoption("--chaos-seconds", type=float, default=25.0, help="how long its chaos lasts")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):  # side by side: long waits begin, or one of them would end alone
        items.sort(key=_place)
    if config.getoption("--slow"):
        return
    skip = pytest.mark.skip(reason="a longer run; make test ARGS=--slow")
    for item in items:
        if "slow" in item.keywords:
            item.add_marker(skip)


def _place(item: pytest.Item) -> int:
    """Where the package of a test stands among all: those before that start nodes, the rest in any order."""
    package = Path(item.path).relative_to(Path(__file__).parent).parts[0]
    return _FIRST.index(package) if package in _FIRST else len(_FIRST)


@pytest.fixture(scope="module", autouse=True)
def segments_end_with_their_module(monkeypatch_module: pytest.MonkeyPatch) -> Iterator[None]:
    """Close the descriptors of segments that the tests of a module made.

    A process of meshd keeps its own until it ends, but thousands of tests in one process would come to those
    above 1023, which select() does not take.
    """
    made: list[tuple[int, int]] = []
    init = Segment.__init__

    def noted(segment: Segment, fd: int, size: int) -> None:
        made.append((fd, os.fstat(fd).st_ino))
        init(segment, fd, size)

    monkeypatch_module.setattr(Segment, "__init__", noted)
    yield
    for fd, inode in made:
        with contextlib.suppress(OSError):  # closed already, perhaps
            if os.fstat(fd).st_ino == inode:
                os.close(fd)


@pytest.fixture(autouse=True)
def orphans_are_ours_for_a_test_at_most() -> Iterator[None]:
    """Stop being a subreaper, which some tests become: others would inherit what they leave behind."""
    yield
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(0), 0, 0, 0)


@pytest.fixture(scope="module")
def monkeypatch_module() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.fixture
def fork() -> Callable[[Callable[[], int]], int]:
    """Fork a child that runs a function, exits with its result, and never outlives a minute."""

    def start(run: Callable[[], int]) -> int:
        pid = os.fork()
        if pid:
            return pid
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(60)
        status = 1
        try:
            status = run()
        finally:
            os._exit(status)

    return start
