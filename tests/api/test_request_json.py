from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshd.api.request_json import parse_body, parse_exactly
from meshd.errors import MeshError

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=20,
)


def nested(levels: int) -> bytes:
    """An object around arrays, ``levels`` deep in all."""
    return b'{"a":' + b"[" * (levels - 1) + b"]" * (levels - 1) + b"}"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b" ",
        b"\xef\xbb\xbf{}",
        '{"a":"é"}'.encode("utf-16"),
        b'{"a":NaN}',
        b'{"a":Infinity}',
        b'{"a":-Infinity}',
        b'{"a":"\\ud800"}',
        b'{"a":"\\udc00\\ud800"}',
        b'{"\\ud800":1}',
        b'{"a":"\\ud800","a":1}',
        b'{"a":1e999,"b":"\\ud800"}',
        b'{"a":1e999,"b":"\\ud83d\\u0041"}',
        b'{"a":"\xff"}',
        b'{"a":"\xed\xa0\x80"}',
        b'{"a":"\x01"}',
        b"{} x",
        b"{}{}",
        b"{}\0",
        b'{"a":01}',
        b'{"a":1.}',
        b'{"a":+1}',
        b"{'a':1}",
        b'{"a":1,}',
        b"[]",
        b'"text"',
        b"1" * 400,
        b"null",
        nested(513),
        nested(1100),
        nested(100_000),
        b'{"n":1e999,"a":' + nested(600) + b"}",
    ],
)
def test_what_is_not_one_strict_json_object_is_refused(body):
    with pytest.raises(MeshError) as refusal:
        parse_body(memoryview(body))
    assert (refusal.value.code, refusal.value.status) == ("invalid_request", 400)


@pytest.mark.parametrize(
    ("body", "members"),
    [
        (b" \r\n\t{} \n", {}),
        (b'{"a":1,"b":2,"a":3}', {"a": 3, "b": 2}),
        (b'{"a":"\\ud83d\\ude00"}', {"a": "\U0001f600"}),
        (b'{"n":1e999,"a":"\\\\ud800 \\ud83d\\ude00"}', {"n": float("inf"), "a": "\\ud800 \U0001f600"}),
        (b'{"a":-0.0,"b":1e-9999}', {"a": 0.0, "b": 0.0}),
    ],
)
def test_strict_json_of_any_size_of_number_is_read(body, members):
    assert parse_body(memoryview(body)) == members


def test_exactly_512_levels_are_read():
    assert "a" in parse_body(nested(512))
    assert "n" in parse_exactly(b'{"n":1e999,"a":' + nested(511) + b"}")


def test_wide_bodies_with_many_containers_are_not_deep():
    body = json.dumps({"a": [[{}] for _ in range(5000)]}).encode()
    assert len(parse_body(body)["a"]) == 5000


def test_exact_reading_keeps_integers_integers():
    value = parse_exactly(b'{"a":18446744073709551616,"b":-' + b"9" * 5000 + b"}")
    assert value["a"] == 2**64
    assert type(value["b"]) is int and value["b"] < -(2**64)


@given(st.dictionaries(st.text(max_size=5), JSON, max_size=5))
def test_both_parsers_read_every_document_alike(members):
    body = json.dumps(members).encode()
    exact = parse_exactly(body)
    assert exact == members
    # Integers beyond 64 bits come as floats from the fast parser, and only those differ.
    assert _as_floats(parse_body(body)) == _as_floats(exact)


def _as_floats(value):
    if isinstance(value, dict):
        return {k: _as_floats(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_as_floats(v) for v in value]
    if type(value) is int:
        return float(value)
    return value
