"""Options of the test run, and what tests of several packages start."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run the longer stress runs")
    parser.addoption("--chaos-seed", type=int, default=0, help="replay this plan of the chaos test")
    parser.addoption("--chaos-seconds", type=float, default=25.0, help="how long its chaos lasts")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--slow"):
        return
    skip = pytest.mark.skip(reason="a longer run; make test ARGS=--slow")
    for item in items:
        if "slow" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(scope="module", autouse=True)
def segments_end_with_their_module() -> Iterator[None]:
    """Close the memfds that the tests of a module made: a process of meshd keeps its own until it ends.

    Thousands of tests in one process would come to the descriptors above 1023, which select() does not take.
    """
    before = memfds()
    yield
    for fd in memfds() - before:
        os.close(fd)


def memfds() -> set[int]:
    """Return the descriptors of this process that are segments."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith("/memfd:meshd:"):
                found.add(int(name))
    return found


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
