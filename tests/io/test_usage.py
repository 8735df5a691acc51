"""The usage of plain answers is read as if the whole body were parsed, however it is written."""

from __future__ import annotations

import json
import re
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshd.io import usage
from meshd.io.usage import Usage, UsageReader

WORDS = (
    "usage",
    '"usage"',
    '"usage":{',
    "\\",
    '\\"usage":',
    "prompt_tokens",
    "message",
    "meta_info",
    "x",
    "",
)
NUMBERS = st.one_of(st.none(), st.booleans(), st.integers(-2, 99), st.just(1.5), st.text(max_size=2))
USAGES = st.dictionaries(
    st.sampled_from(
        ("prompt_tokens", "completion_tokens", "input_tokens", "output_tokens", "cache_read_input_tokens",
         "cache_creation_input_tokens", "usage", "x")
    ),
    st.one_of(NUMBERS, st.dictionaries(st.just("usage"), st.just({"prompt_tokens": 1}), max_size=1)),
    max_size=4,
)  # fmt: skip
VALUES = st.recursive(
    st.one_of(NUMBERS, USAGES, st.sampled_from(WORDS)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(("usage", "response", "meta_info", *WORDS)), inner, max_size=4),
    ),
    max_leaves=12,
)
BODIES = st.one_of(
    VALUES,
    st.dictionaries(
        st.sampled_from(("usage", "response", "message", "meta_info", *WORDS)),
        st.one_of(USAGES, VALUES),
        max_size=5,
    ),
)


def parsed(text: str, is_messages: bool) -> Usage:
    expected = Usage()
    whole = json.loads(text)
    if isinstance(whole, dict):
        expected.merge_payload(whole, is_messages)
    return expected


def with_other_digits(text: str, rng: Random) -> str:
    """Put other digits in, except in escapes and so that the text stays JSON."""
    return re.sub(
        r"\\u....|\d+",
        lambda found: found[0] if found[0][0] == "\\" else str(rng.randrange(1, 10)) * len(found[0]),
        text,
    )


@given(body=BODIES, is_messages=st.booleans(), indent=st.sampled_from((None, 2)), twice=st.booleans())
def test_usage_of_a_body_is_what_parsing_the_whole_of_it_tells(body, is_messages, indent, twice):
    text = json.dumps(body, indent=indent)
    if twice and text.startswith("{") and body:  # a key that comes again counts as it does when parsed
        text = text[:-1].rstrip() + ', "usage": {"prompt_tokens": 5}, "y": [1]}'
    expected = parsed(text, is_messages)
    found = UsageReader(is_messages).read(text.encode())
    assert (found.is_known, repr(found)) == (expected.is_known, repr(expected)), text


@pytest.mark.parametrize(
    "body",
    [
        b'{"choices":[{"text":"\\"usage\\":{"}],"usage":{"prompt_tokens":3,"completion_tokens":4}}',
        b'{"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":4},"prompt_logprobs":null} \n',
        b'{"usage":{"prompt_tokens":3,"completion_tokens":4},"choices":[{"usage":{"prompt_tokens":9}}]}',
        b'{"usage":{"prompt_tokens":9},"choices":["usage"],"usage":{"prompt_tokens":3,"output_tokens":4}}',
        b'{"usage":{"prompt_tokens":3,"completion_tokens":4},"x\\"usage":{"prompt_tokens":9}}',
        b'{"id":1,"meta_info":{"prompt_tokens":3,"completion_tokens":4},"usage":null}',
    ],
)
def test_usage_is_found_wherever_it_stands_in_a_body(body):
    assert repr(UsageReader(False).read(body)) == "Usage(in=3 out=4)"


@pytest.mark.parametrize("body", [b"", b'"usage"', b'{"usage":', b'[{"usage":{"prompt_tokens":3}}]', b"{no}"])
def test_body_that_is_no_json_object_has_no_usage(body):
    assert not UsageReader(False).read(body).is_known


@given(body=BODIES, is_messages=st.booleans(), seed=st.integers(0, 1000), bodies=st.lists(BODIES, max_size=2))
def test_usage_by_its_shape_is_what_parsing_the_whole_body_tells(body, is_messages, seed, bodies):
    reader, rng = UsageReader(is_messages), Random(seed)
    for _ in range(4):
        for each in (body, *bodies):
            text = with_other_digits(json.dumps(each), rng)
            found, expected = reader.read(text.encode()), parsed(text, is_messages)
            assert (found.is_known, repr(found)) == (expected.is_known, repr(expected)), text


@pytest.mark.parametrize("is_messages", [False, True])
@pytest.mark.parametrize("number", [10**9, 2**63, 2**64 - 1, 10**30])
def test_number_beyond_any_context_is_no_count(number, is_messages):
    """It would not fit into the word of a counter, and end the process that counts."""
    reader = UsageReader(is_messages)
    names = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
    body = json.dumps({"usage": {**dict.fromkeys(names, number), "output_tokens": 3}})
    for _ in range(4):  # parsed, learned, by its shape
        assert repr(reader.read(body.encode())) == "Usage(in=0 out=3)"
    largest = body.replace(str(number), "999999999")
    for _ in range(4):
        expected = 999999999 * (3 if is_messages else 1)
        assert repr(reader.read(largest.encode())) == f"Usage(in={expected} out=3)"


def answer(prompt: int, output: int, end: str = "}}") -> bytes:
    text = '{"id":"c-%d","choices":[{"text":"x"}],"usage":{"prompt_tokens":%d,"completion_tokens":%d%s'
    return (text % (prompt * 7, prompt, output, end)).encode()


def test_shape_that_has_come_twice_is_not_parsed_again(monkeypatch):
    reader = UsageReader(False)
    for prompt in (10, 20):
        reader.read(answer(prompt, 16))
    monkeypatch.setattr(usage.orjson, "loads", None)
    assert repr(reader.read(answer(37, 25))) == "Usage(in=37 out=25)"
    assert repr(reader) == "UsageReader(1 shapes known, 1 met)"


def test_answers_of_several_shapes_in_turn_are_each_read_by_their_own():
    reader = UsageReader(False)
    for turn in range(4):
        for digits in range(1, 6):
            prompt = 10 ** (digits - 1) + turn
            found = reader.read(answer(prompt, turn, ',"details":{"cached_tokens":3}},"x":null}'))
            assert repr(found) == f"Usage(in={prompt} out={turn})"
    assert repr(reader) == "UsageReader(5 shapes known, 5 met)"


def test_counts_of_a_cache_are_part_of_the_shape():
    reader = UsageReader(True)
    for read in (10, 20, 30):
        body = b'{"usage":{"input_tokens":5,"cache_read_input_tokens":%d,"output_tokens":7}}' % read
        assert repr(reader.read(body)) == f"Usage(in={5 + read} out=7)"


@pytest.mark.parametrize(
    ("first", "then", "expected"),
    [
        (b'{"usage":{"prompt_tokens":-0,"output_tokens":4}}',
         b'{"usage":{"prompt_tokens":-5,"output_tokens":4}}', "Usage(in=0 out=4)"),
        (b'{"usage":{"prompt_tokens":10000000000000000000,"output_tokens":4}}',
         b'{"usage":{"prompt_tokens":99999999999999999999,"output_tokens":4}}', "Usage(in=0 out=4)"),
        (b'{"usage":{"\\u0071rompt_tokens":8,"prompt_tokens":2,"output_tokens":4}}',
         b'{"usage":{"\\u0070rompt_tokens":8,"prompt_tokens":3,"output_tokens":4}}', "Usage(in=3 out=4)"),
        (b'{"x":1,"usage":{"prompt_tokens":3,"output_tokens":4}}',
         b'{"x\\"usage":{"prompt_tokens":8,"output_tokens":9}}', "Usage(in=0 out=0)"),
        (b'{"x":1,"usage":{"prompt_tokens":3,"output_tokens":4}}',
         b'"usage":{"prompt_tokens":3,"output_tokens":4}}', "Usage(in=0 out=0)"),
    ],
)  # fmt: skip
def test_shape_does_not_hide_what_other_digits_or_another_place_would_mean(first, then, expected):
    reader = UsageReader(False)
    for _ in range(3):
        reader.read(first)
    assert repr(reader.read(then)) == expected


def test_shapes_are_not_kept_without_bound():
    reader = UsageReader(False)
    for number in range(1000):
        for prompt in (10, 20):
            assert (
                reader.read(answer(prompt, 1, '},"id":"%s"}' % ("x" * (number % 400)))).input_tokens == prompt
            )
    known, met = map(int, re.findall(r"\d+", repr(reader)))
    assert known <= 256 and met <= 256
