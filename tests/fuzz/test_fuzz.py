"""Each fuzz target for a moment, with a fixed seed, after all inputs that ever failed."""

from __future__ import annotations

import pytest

from tests.fuzz import chunked_body, client_connection, request_head, response_head, sse_scanner
from tests.fuzz.engine import CORPUS, Target, cuts

TARGETS = [
    request_head.TARGET,
    chunked_body.TARGET,
    sse_scanner.TARGET,
    response_head.TARGET,
    client_connection.TARGET,
]
by_name = pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)


@by_name
def test_inputs_that_failed_once_never_fail_again(target: Target):
    target.replay()


@by_name
def test_target_holds_for_some_hundred_inputs(target: Target):
    target.run(20261003, 300, shrinks=False)


def test_every_kept_input_belongs_to_a_target():
    assert {path.parent.name for path in CORPUS.glob("*/*.bin")} <= {target.name for target in TARGETS}


def test_cuts_lose_no_byte():
    data = bytes(range(256))
    assert all(b"".join(pieces) == data for pieces in cuts(data))
