"""One real node in front of two real backends, shared by the tests that leave it as they found it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import meshd
from tests.fakes.node import Backend, Node, running

DEMO_TOKENIZER = str(Path(meshd.__file__).parent / "backend" / "tokenizer")
COMMON = ("--io-processes", "2", "--prepare-workers", "2", "--health-check-interval-secs", "1",
          "--health-check-timeout-secs", "1", "--disable-circuit-breaker")  # fmt: skip


@pytest.fixture(scope="session")
def backends() -> Iterator[tuple[Backend, Backend]]:
    pair = (Backend("--model", "m1"), Backend("--model", "m1"))
    yield pair
    for backend in pair:
        backend.stop()


@pytest.fixture(scope="session")
def node(backends: tuple[Backend, Backend]) -> Iterator[Node]:
    """Its tokenizer is proved meanwhile: ``node.wait_until_proved()`` where processes are counted."""
    flags = (*COMMON, "--policy", "prefix_hash", "--tokenizer-path", DEMO_TOKENIZER)
    with running(*flags, backends=backends, is_settled=False) as running_node:
        yield running_node


@pytest.fixture
def clean_backends(backends: tuple[Backend, Backend]) -> Iterator[tuple[Backend, Backend]]:
    """The shared backends without faults and with an empty request log."""

    def clean() -> None:
        for backend in backends:
            backend.control("PUT", "/_backend/fault", b"")
            backend.control("DELETE", "/_backend/requests")

    clean()
    yield backends
    clean()
