from __future__ import annotations

from meshd.api.view import NEEDS_TEXT, NEEDS_TOKENS, RoutingView


def test_a_view_of_a_model_alone_asks_for_one_plain_answer():
    view = RoutingView("m1")
    assert (view.batch_size, view.wants_stream, view.token_ids) == (1, False, b"")
    assert not view.is_asked


def test_needs_are_independent_bits():
    assert NEEDS_TEXT & NEEDS_TOKENS == 0
