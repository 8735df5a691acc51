from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshd.api.answer import Answer
from meshd.api.view import RoutingView
from meshd.errors import CODES, MeshError
from meshd.memory import Segment
from meshd.prepare.codec import (
    HEAD_BYTES,
    CodecFault,
    Results,
    ViewTooLarge,
    ViewWriter,
    decode_result,
    encode_answer,
    encode_refusal,
)
from meshd.slab import BodySlab, Slot
from tests.fakes.results import encode_view

U64 = st.integers(0, 2**64 - 1)
VIEWS = st.builds(
    RoutingView,
    model=st.text(),
    wants_stream=st.booleans(),
    batch_size=st.integers(1, 2**32 - 1),
    wants_logprobs=st.booleans(),
    has_state=st.booleans(),
    creates_state=st.booleans(),
    key_position=st.just(0) | U64,
    text_bytes=st.just(0) | U64,
    rank_free=st.none() | st.lists(st.tuples(U64, U64), max_size=32).map(lambda pairs: sum(pairs, ())),
    block_keys=st.lists(st.binary(min_size=8, max_size=8), max_size=100).map(b"".join),
)


PLAIN_VIEWS = st.builds(
    RoutingView,
    model=st.text(),
    wants_stream=st.booleans(),
    batch_size=st.integers(1, 2**32 - 1),
    wants_logprobs=st.booleans(),
    has_state=st.booleans(),
    creates_state=st.booleans(),
)


def area(size: int = 8192) -> memoryview:
    return memoryview(bytearray(b"\xaa" * size))


@given(VIEWS | PLAIN_VIEWS)
def test_a_view_survives_the_round_trip(view):
    out = area()
    assert decode_result(out[: encode_view(view, out)]) == view


def test_token_ids_and_their_key_stay_with_the_worker():
    out = area()
    view = RoutingView("m1", token_ids=b"\1\0\0\0" * 256, prefix_key=5, key_position=6)
    assert decode_result(out[: encode_view(view, out)]) == RoutingView("m1", key_position=6)


@given(PLAIN_VIEWS)
def test_a_plain_view_ends_with_the_name_of_its_model(view):
    assert encode_view(view, area()) == HEAD_BYTES + len(view.model.encode())


@given(st.lists(VIEWS | PLAIN_VIEWS, min_size=2, max_size=6))
def test_a_writer_writes_what_it_would_write_first(views):
    writer = ViewWriter()
    for view in views + views[::-1]:
        out, expected = area(), area()
        assert writer.write(view, out, 0, len(out)) == encode_view(view, expected)
        assert out == expected


def test_a_view_is_written_within_its_area_alone():
    for view in (RoutingView("m1"), RoutingView("m1", block_keys=b"12345678")):
        out = area()
        length = ViewWriter().write(view, out, 4096, 100)
        assert decode_result(out[4096 : 4096 + length]) == view
        assert set(out[:4096]) == set(out[4096 + length :]) == {0xAA}


@given(st.sampled_from(sorted(CODES)), st.text())
def test_a_refusal_survives_the_round_trip(code, message):
    out = area()
    refusal = decode_result(out[: encode_refusal(code, message, out)])
    assert isinstance(refusal, MeshError)
    assert (refusal.code, refusal.message, refusal.status) == (code, message, CODES[code].status)


def test_a_view_that_does_not_fit_leaves_the_area_as_it_was():
    view = RoutingView("m" * 10, block_keys=b"12345678" * 2, rank_free=(0, 9))
    out = area(HEAD_BYTES + 41)
    with pytest.raises(ViewTooLarge):
        encode_view(view, out)
    assert set(out) == {0xAA}
    assert encode_view(view, area(HEAD_BYTES + 42)) == HEAD_BYTES + 42
    out = area(HEAD_BYTES + 9)
    with pytest.raises(ViewTooLarge):
        encode_view(RoutingView("m" * 10), out)
    assert set(out) == {0xAA}
    assert encode_view(RoutingView("m" * 10), area(HEAD_BYTES + 10)) == HEAD_BYTES + 10


def test_a_refusal_always_fits_by_cutting_its_message():
    out = area(256)
    refusal = decode_result(out[: encode_refusal("invalid_request", "é" * 1000, out)])
    assert isinstance(refusal, MeshError)
    assert set(refusal.message) == {"é"}


def test_a_refusal_takes_a_message_with_a_lone_surrogate():
    out = area()
    refusal = decode_result(out[: encode_refusal("invalid_request", "a\ud800", out)])
    assert isinstance(refusal, MeshError)
    assert refusal.message == "a?"


@given(st.text(), st.binary(min_size=1))
def test_an_answer_stays_in_the_area_and_is_found_there(model, body):
    out = area()
    length = encode_answer(model, body, out)
    answer = decode_result(out[:length])
    assert isinstance(answer, Answer) and answer.is_written
    assert (answer.model, answer.view_bytes) == (model, length)
    assert bytes(out[answer.start : answer.start + answer.length]) == body


def test_an_answer_that_does_not_fit_says_how_much_room_it_needs():
    out, body = area(1000), b"x" * 5000
    answer = decode_result(out[: encode_answer("m1", body, out)])
    assert isinstance(answer, Answer)
    assert (answer.is_written, answer.model) == (False, "m1")
    large = area(answer.view_bytes)
    assert encode_answer("m1", body, large[:-1]) < HEAD_BYTES + 5
    assert encode_answer("m1", body, large) == len(large)


def test_an_answer_whose_model_name_does_not_fit_is_no_answer():
    with pytest.raises(ViewTooLarge):
        encode_answer("m" * 1000, b"{}", area(1000))


def test_a_batch_beyond_32_bits_is_recorded_as_the_largest_count():
    out = area()
    view = decode_result(out[: encode_view(RoutingView("m", batch_size=10**30), out)])
    assert isinstance(view, RoutingView)
    assert view.batch_size == 2**32 - 1


def test_a_decoded_view_owns_its_bytes():
    out = area()
    length = encode_view(RoutingView("m1", block_keys=b"\1\2\3\4" * 2), out)
    view = decode_result(out[:length])
    out[:] = bytes(len(out))
    assert isinstance(view, RoutingView)
    assert (view.model, view.block_keys) == ("m1", b"\1\2\3\4" * 2)


@given(st.binary(max_size=200))
def test_garbage_is_a_fault_of_the_layout(data):
    with pytest.raises(CodecFault):
        decode_result(memoryview(data))


@given(VIEWS | PLAIN_VIEWS, st.data())
def test_a_cut_or_overlong_record_is_a_fault_of_the_layout(view, data):
    out = area()
    length = encode_view(view, out)
    wrong = data.draw(st.integers(0, len(out)).filter(lambda n: n != length))
    with pytest.raises(CodecFault):
        decode_result(out[:wrong])


@pytest.mark.parametrize(
    ("offset", "value"), [(16, 1), (17, 1), (20, 9), (24, 0), (28, 0), (29, 16), (30, 1), (30, 3), (31, 1)]
)
def test_a_wrong_word_in_the_head_is_a_fault_of_the_layout(offset, value):
    out = area()
    length = encode_view(RoutingView("m1", text_bytes=9, block_keys=b"12345678"), out)
    out[offset] = value
    with pytest.raises(CodecFault):
        decode_result(out[:length])


@pytest.mark.parametrize(
    ("offset", "value"), [(0, 1), (8, 1), (16, 3), (20, 1), (24, 0), (28, 9), (29, 16), (30, 1), (36, 0xFF)]
)
def test_a_wrong_byte_of_a_plain_view_is_a_fault_of_the_layout(offset, value):
    out = area()
    length = encode_view(RoutingView("m1"), out)
    out[offset] = value
    with pytest.raises(CodecFault):
        decode_result(out[:length])


def test_an_unknown_error_code_is_a_fault_of_the_layout():
    out = area()
    length = encode_refusal("no_such_code", "text", out)
    with pytest.raises(CodecFault):
        decode_result(out[:length])


# ------------------------------------------------------------------------------- views that are known


class Reader:
    """The reading end over a slot of a slab, and a worker that writes there."""

    def __init__(self) -> None:
        slab = BodySlab(Segment.create("slab", 1 << 20), 4096)
        self.slot: Slot = slab.reserve(1)  # type: ignore[assignment]
        self.results = Results(slab)

    def read(self, view: RoutingView) -> object:
        length = encode_view(view, self.slot.view)
        return self.results.read(self.slot.view_offset, self.slot.view, length)


@given(st.lists(VIEWS | PLAIN_VIEWS, min_size=2, max_size=6))
def test_views_read_one_after_the_other_are_what_was_written(views):
    reader = Reader()
    for view in views * 2:
        assert reader.read(view) == view


def test_requests_of_the_same_facts_share_one_view():
    reader = Reader()
    first = reader.read(RoutingView("m1", True))
    assert reader.read(RoutingView("m1", True)) is first
    assert reader.read(RoutingView("m1", False)) is not first
    assert reader.read(RoutingView("m1", True)) is first


def test_a_view_with_keys_is_one_of_its_own():
    reader = Reader()
    for number in range(1, 1000):
        keyed = RoutingView("m1", text_bytes=9, block_keys=b"%08d" % number * (number % 9))
        placed = RoutingView("m1", key_position=number)
        assert (reader.read(keyed), reader.read(placed)) == (keyed, placed)
        assert reader.read(keyed) is not reader.read(keyed)
    assert len(reader.results._known) == 1


def test_a_view_with_keys_of_another_length_than_it_says_is_a_fault_also_when_its_facts_are_known():
    reader = Reader()
    view = RoutingView("m1", text_bytes=9, block_keys=b"12345678" * 3)
    assert reader.read(view) == view
    length = encode_view(view, reader.slot.view)
    for wrong in (length - 8, length - 1, length + 1, length + 8):
        with pytest.raises(CodecFault):
            reader.results.read(reader.slot.view_offset, reader.slot.view, wrong)


def test_names_that_strangers_choose_do_not_pile_up():
    reader = Reader()
    for number in range(3000):
        assert reader.read(RoutingView(f"model-{number}")).model == f"model-{number}"
    long_name = "m" * 3000
    assert reader.read(RoutingView(long_name)) is not reader.read(RoutingView(long_name))
    assert len(reader.results._known) <= 256


def test_a_record_that_is_none_is_a_fault_for_the_reader_too():
    reader = Reader()
    for length in (0, 10, 35, 37, 300, 9000):
        with pytest.raises(CodecFault):
            reader.results.read(reader.slot.view_offset, reader.slot.view, length)
    reader.read(RoutingView("m1"))
    with pytest.raises(CodecFault):  # shorter or longer than what is known
        reader.results.read(reader.slot.view_offset, reader.slot.view, HEAD_BYTES + 1)
