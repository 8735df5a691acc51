"""Chunked bodies: every row of the strictness table, and any way to cut the bytes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshd.io.chunked import ChunkedDecoder, ChunkedError
from meshd.io.http1 import parse_request_head


def chunked(pieces: list[bytes], extension: bytes = b"", trailers: bytes = b"") -> bytes:
    body = b"".join(b"%x%b\r\n%b\r\n" % (len(p), extension, p) for p in pieces if p)
    return body + b"0\r\n" + trailers + b"\r\n"


@given(
    st.lists(st.binary(max_size=40), max_size=8),
    st.lists(st.integers(1, 30), min_size=1, max_size=40),
    st.sampled_from([b"", b";a=b", b"; x"]),
    st.sampled_from([b"", b"authorization: x\r\n"]),
)
def test_chunked_body_is_the_same_wherever_it_is_cut(pieces, cuts, extension, trailers):
    wire = chunked(pieces, extension, trailers) + b"GET /next"
    decoder = ChunkedDecoder()
    got = b""
    at = 0
    for size in cuts * 400:
        got += b"".join(decoder.feed(wire[at : at + size]))
        at += size
        if decoder.is_complete:
            break
    assert decoder.is_complete, decoder
    assert got == b"".join(pieces)
    assert (decoder.rest + wire[at:]).endswith(b"GET /next")
    assert decoder.rest + wire[at:] == b"GET /next"


@pytest.mark.parametrize(
    "wire",
    [
        b"x\r\n",
        b"+3\r\nabc\r\n",
        b"0x3\r\nabc\r\n",
        b"-1\r\n",
        b"\r\n",
        b" 3\r\nabc\r\n",
        b"3 \r\nabc\r\n",
        b"3 ;a\r\nabc\r\n",
        b"0\r\nnonsense\r\n\r\n",
        b"0\r\nx: y\r\n z\r\n\r\n",
        b"0\r\nx: \0\r\n\r\n",
        b"0\r\n" + b"x: y\r\n" * 257,
        b"3\nabc\r\n",
        b"3\r\nabcd\r\n",
        b"3\r\nabc\n",
        b"3\r\nabcX\r\n",
        b"11111111111111111\r\n",
        b"3;" + b"a" * 1100 + b"\r\n",
        b"3" + b" " * 1100,
        b"3\r\nabc\r\n0\r\nbad: \n\r\n",
        b"0\r\n" + b"x: y\r\n" * 20000,
    ],
)
def test_broken_chunked_framing_is_refused(wire):
    with pytest.raises(ChunkedError):
        ChunkedDecoder().feed(wire)


def test_framing_may_exceed_the_data_by_a_mebibyte_only():
    decoder = ChunkedDecoder()
    with pytest.raises(ChunkedError):
        for _ in range(3000):
            decoder.feed(b"1;" + b"e" * 1000 + b"\r\na\r\n")
    decoder = ChunkedDecoder()
    decoder.feed(b"300000\r\n" + b"a" * 0x300000 + b"\r\n")
    for _ in range(3000):  # the data before counts: these do not exceed it yet
        decoder.feed(b"1;" + b"e" * 1000 + b"\r\na\r\n")
    with pytest.raises(ChunkedError):
        for _ in range(3000):
            decoder.feed(b"1;" + b"e" * 1000 + b"\r\na\r\n")


def test_trailers_count_against_the_limits_of_their_head():
    raw = b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n"
    for max_bytes, max_fields, is_refused in (
        (len(raw) + 6, 3, False),
        (len(raw) + 5, 3, True),
        (999, 2, True),
    ):
        parsed = parse_request_head(raw, max_bytes, max_fields)
        decoder = ChunkedDecoder(parsed.trailer_bytes, parsed.trailer_fields)
        if is_refused:
            with pytest.raises(ChunkedError):
                decoder.feed(b"0\r\nx: y\r\n\r\n")
        else:
            decoder.feed(b"0\r\nx: y\r\n\r\n")
            assert decoder.is_complete


@given(st.binary(max_size=100))
def test_arbitrary_bytes_never_crash_the_chunked_decoder(raw):
    try:
        ChunkedDecoder().feed(raw)
    except ChunkedError:
        pass


EVENTS = (
    b"\n\n",
    b"data: 1\n\n",
    b"x" * 14 + b"\n\n",
    b"data: " + b"y" * 300 + b"\n\n",
    b"z" * 2000 + b"\n\n",
)
OTHERS = (b"\n", b"data: 1", b"data: 1\n", b"x" * 16)


def framed(*payloads: bytes) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(payload), payload) for payload in payloads)


@pytest.mark.parametrize("first", EVENTS)
@pytest.mark.parametrize("second", (*EVENTS, None))
def test_whole_events_in_whole_chunks_pass_with_their_framing(first: bytes, second: bytes | None) -> None:
    events = (first,) if second is None else (first, second)
    decoder = ChunkedDecoder()
    assert decoder.pass_events(framed(*events)) == sum(map(len, events))
    assert b"".join(decoder.feed(framed(b"next"))) == b"next"


@pytest.mark.parametrize("payload", OTHERS)
def test_chunk_that_does_not_end_with_an_event_does_not_pass(payload: bytes) -> None:
    assert ChunkedDecoder().pass_events(framed(payload)) == 0
    assert ChunkedDecoder().pass_events(framed(EVENTS[1], payload)) == 0
    assert ChunkedDecoder().pass_events(framed(payload, EVENTS[1])) == 0


@pytest.mark.parametrize("event", EVENTS)
def test_no_part_of_a_chunk_passes_and_no_other_framing(event: bytes) -> None:
    wire = framed(event)
    for cut in range(1, len(wire)):
        assert ChunkedDecoder().pass_events(wire[:cut]) == 0
        assert ChunkedDecoder().pass_events(wire[cut:]) == 0
    assert ChunkedDecoder().pass_events(wire + b"0\r\n\r\n") == 0
    assert ChunkedDecoder().pass_events(wire[:-2] + b"\n\n") == 0
    assert ChunkedDecoder().pass_events(b"0" + wire) == len(event)  # a size may begin with zeros


def test_chunk_that_is_open_lets_nothing_pass() -> None:
    decoder = ChunkedDecoder()
    decoder.feed(b"20\r\nabc")
    assert decoder.pass_events(framed(EVENTS[1])) == 0
