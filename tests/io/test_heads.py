"""A head that comes again: known by its bytes, whatever its length, and never taken for another one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshd.io.heads import RequestHead, ResponseHead
from meshd.io.http1 import parse_request_head, parse_response_head
from tests.fakes.heads import facts

LIMIT = 2000
POST = b"POST /v1/x?y HTTP/1.1\r\nHost: h\r\nContent-Length: 12\r\nX: content-length: 7\r\nx-a:  b \r\n\r\n"


def request(raw: bytes) -> RequestHead:
    return parse_request_head(raw, LIMIT, 64)


def response(raw: bytes) -> ResponseHead:
    return parse_response_head(raw, "POST")


def test_same_bytes_are_the_same_head_whatever_follows():
    head = request(POST)
    assert head.again(POST) is head and head.again(POST + b"GET / HTTP/1.1\r\n") is head
    assert len(head.raw) == len(POST)


@pytest.mark.parametrize("length", [b"0", b"7", b"13", b"00012", b"123456", b"9" * 19])
def test_head_with_another_length_means_what_reading_it_would_give(length):
    head, raw = request(POST), POST.replace(b" 12", b" " + length)
    other = head.again(raw + b"body")
    assert other is not None and facts(other) == facts(request(raw)) and other.raw == raw
    assert other.values[b"content-length"] == length and (b"Content-Length", length) in other.fields
    assert facts(head) == facts(request(POST)), "the first is as it was"


def test_what_was_derived_is_shared_by_heads_of_different_lengths():
    head = request(POST)
    other = head.again(POST.replace(b" 12", b" 130"))
    assert other is not None and other.facts is head.facts
    raw = b"HTTP/1.1 200 OK\r\ncontent-length: 12\r\n\r\n"
    answer = response(raw)
    other_answer = answer.again(raw.replace(b" 12", b" 130"))
    assert other_answer is not None and other_answer.derived is answer.derived


def test_repeats_of_a_repeat_are_found_as_well():
    head = request(POST).again(POST.replace(b" 12", b" 5"))
    assert head is not None
    third = head.again(POST.replace(b" 12", b" 1000"))
    assert third is not None and third.content_length == 1000


@pytest.mark.parametrize(
    "raw",
    [
        POST[:-1],
        POST[:-4] + b"\r\nx: y\r\n\r\n",
        POST.replace(b"/v1/x", b"/v1/z"),
        POST.replace(b" 12", b" "),
        POST.replace(b" 12", b" " + b"1" * 20),
        POST.replace(b" 12", b" 12, 12"),
        POST.replace(b" 12", b" +12"),
        POST.replace(b" 12", b" 12 "),
        POST.replace(b" 12\r", b" 12"),
        b"",
    ],
)
def test_anything_else_is_left_to_the_parser(raw):
    assert request(POST).again(raw) is None


def test_length_that_could_take_a_head_over_its_limit_is_left_to_the_parser():
    head = parse_request_head(POST, len(POST) + 18, 64)
    assert head.again(POST) is head
    assert head.again(POST.replace(b" 12", b" 123")) is None


def test_two_length_fields_are_left_to_the_parser():
    raw = POST.replace(b"x-a:  b", b"content-length: 12")
    assert request(raw).again(raw.replace(b"12", b"13")) is None


def test_empty_line_before_a_head_belongs_to_it():
    head = request(b"\r\n" + POST)
    other = head.again(b"\r\n" + POST.replace(b" 12", b" 345") + b"x")
    assert other is not None and other.content_length == 345 and len(other.raw) == len(POST) + 3
    assert head.again(POST) is None


def test_response_with_another_length_means_what_reading_it_would_give():
    raw = b"HTTP/1.1 200 OK\r\ncontent-length: 12\r\ncontent-type: a/b\r\n\r\n"
    other_raw = raw.replace(b"12", b"3456")
    other = response(raw).again(other_raw + b"x")
    assert other is not None and facts(other) == facts(response(other_raw)) and other.raw == other_raw


def test_response_without_a_length_of_its_own_repeats_as_a_whole_alone():
    raw = b"HTTP/1.1 204 No Content\r\ncontent-length: 12\r\n\r\n"
    head = response(raw)
    assert head.again(raw) is head and head.again(raw.replace(b"12", b"13")) is None


NAMES = st.sampled_from(["content-length", "Content-Length", "x-content-length", "x", "content-lengthy"])
VALUES = st.sampled_from(["1", "20", "content-length: 3", "", "a", "1 ", "0x1", "content-length:4"])


@given(st.lists(st.tuples(NAMES, VALUES), max_size=5), st.binary(max_size=3), st.data())
def test_again_gives_what_the_parser_gives_or_nothing(fields, rest, data):
    raw = b"POST / HTTP/1.1\r\nhost: h\r\n" + "".join(f"{n}: {v}\r\n" for n, v in fields).encode() + b"\r\n"
    try:
        head = request(raw)
    except Exception:  # whatever is refused is never repeated
        return
    at = data.draw(st.integers(0, len(raw)))
    other = raw[:at] + data.draw(st.sampled_from([b"", b"0", b"7", b"\r\n", b": ", b"\n"])) + raw[at:] + rest
    again = head.again(other)
    if again is not None:
        assert other.startswith(again.raw)
        assert facts(again) == facts(request(again.raw))
