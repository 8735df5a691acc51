from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshd.api.answer import Answer
from meshd.api.view import RoutingView, StageTimes
from meshd.errors import CODES
from meshd.prepare.codec import (
    HEAD_BYTES,
    CodecFault,
    Refusal,
    ViewTooLarge,
    decode_result,
    encode_answer,
    encode_refusal,
    encode_view,
)

U64 = st.integers(0, 2**64 - 1)
VIEWS = st.builds(
    RoutingView,
    model=st.text(),
    wants_stream=st.booleans(),
    batch_size=st.integers(1, 2**32 - 1),
    wants_logprobs=st.booleans(),
    has_state=st.booleans(),
    creates_state=st.booleans(),
    token_ids=st.lists(st.binary(min_size=4, max_size=4), max_size=300).map(b"".join),
    prefix_key=U64,
    key_position=U64,
    text_bytes=U64,
    stage_ns=st.builds(StageTimes, U64, U64, U64, U64, U64),
    rank_free=st.none() | st.lists(st.tuples(U64, U64), max_size=32).map(lambda pairs: sum(pairs, ())),
    block_keys=st.lists(st.binary(min_size=8, max_size=8), max_size=100).map(b"".join),
)


def area(size: int = 8192) -> memoryview:
    return memoryview(bytearray(b"\xaa" * size))


@given(VIEWS)
def test_a_view_survives_the_round_trip(view):
    out = area()
    length = encode_view(view, out)
    assert decode_result(out[:length]) == view


@given(st.sampled_from(sorted(CODES)), st.text())
def test_a_refusal_survives_the_round_trip(code, message):
    out = area()
    times = StageTimes(1, 2, 3, 4, 5)
    refusal = decode_result(out[: encode_refusal(code, message, out, times)])
    assert isinstance(refusal, Refusal)
    error = refusal.error
    assert (error.code, error.message, error.status) == (code, message, CODES[code].status)
    assert refusal.stage_ns == times


def test_a_view_that_does_not_fit_leaves_the_area_as_it_was():
    view = RoutingView("m" * 10, token_ids=b"\1\0\0\0" * 4, rank_free=(0, 9))
    out = area(HEAD_BYTES + 41)
    with pytest.raises(ViewTooLarge):
        encode_view(view, out)
    assert set(out) == {0xAA}
    assert encode_view(view, area(HEAD_BYTES + 42)) == HEAD_BYTES + 42


def test_a_refusal_always_fits_by_cutting_its_message():
    out = area(256)
    refusal = decode_result(out[: encode_refusal("invalid_request", "é" * 1000, out)])
    assert isinstance(refusal, Refusal)
    assert set(refusal.error.message) == {"é"}


def test_a_refusal_takes_a_message_with_a_lone_surrogate():
    out = area()
    refusal = decode_result(out[: encode_refusal("invalid_request", "a\ud800", out)])
    assert isinstance(refusal, Refusal)
    assert refusal.error.message == "a?"


@given(st.text(), st.binary(min_size=1), st.builds(StageTimes, U64, U64, U64, U64, U64))
def test_an_answer_stays_in_the_area_and_is_found_there(model, body, times):
    out = area()
    length = encode_answer(model, body, times, out)
    answer = decode_result(out[:length])
    assert isinstance(answer, Answer) and answer.is_written
    assert (answer.model, answer.view_bytes, answer.stage_ns) == (model, length, times)
    assert bytes(out[answer.start : answer.start + answer.length]) == body


def test_an_answer_that_does_not_fit_says_how_much_room_it_needs():
    out, times, body = area(1000), StageTimes(1, 0, 2), b"x" * 5000
    answer = decode_result(out[: encode_answer("m1", body, times, out)])
    assert isinstance(answer, Answer)
    assert (answer.is_written, answer.model, answer.stage_ns) == (False, "m1", times)
    large = area(answer.view_bytes)
    assert encode_answer("m1", body, times, large[:-1]) < HEAD_BYTES + 5
    assert encode_answer("m1", body, times, large) == len(large)


def test_an_answer_whose_model_name_does_not_fit_is_no_answer():
    with pytest.raises(ViewTooLarge):
        encode_answer("m" * 1000, b"{}", StageTimes(), area(1000))


def test_a_batch_beyond_32_bits_is_recorded_as_the_largest_count():
    out = area()
    view = decode_result(out[: encode_view(RoutingView("m", batch_size=10**30), out)])
    assert isinstance(view, RoutingView)
    assert view.batch_size == 2**32 - 1


def test_a_decoded_view_owns_its_bytes():
    out = area()
    length = encode_view(RoutingView("m1", token_ids=b"\1\2\3\4"), out)
    view = decode_result(out[:length])
    out[:] = bytes(len(out))
    assert isinstance(view, RoutingView)
    assert (view.model, view.token_ids) == ("m1", b"\1\2\3\4")


@given(st.binary(max_size=200))
def test_garbage_is_a_fault_of_the_layout(data):
    with pytest.raises(CodecFault):
        decode_result(memoryview(data))


@given(VIEWS, st.data())
def test_a_cut_or_overlong_record_is_a_fault_of_the_layout(view, data):
    out = area()
    length = encode_view(view, out)
    wrong = data.draw(st.integers(0, len(out)).filter(lambda n: n != length))
    with pytest.raises(CodecFault):
        decode_result(out[:wrong])


@pytest.mark.parametrize(("offset", "value"), [(0, 0), (4, 9), (5, 16), (6, 2), (12, 200), (16, 3)])
def test_a_wrong_word_in_the_head_is_a_fault_of_the_layout(offset, value):
    out = area()
    length = encode_view(RoutingView("m1", token_ids=b"\1\0\0\0"), out)
    out[offset] = value
    with pytest.raises(CodecFault):
        decode_result(out[:length])


def test_an_unknown_error_code_is_a_fault_of_the_layout():
    out = area()
    length = encode_refusal("no_such_code", "text", out)
    with pytest.raises(CodecFault):
        decode_result(out[:length])
