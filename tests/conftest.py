"""Options of the test run."""

from __future__ import annotations

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
